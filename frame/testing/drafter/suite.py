"""The conformance suite of drafters: drafts of random and repeating texts, slots that are used
again, tokens that come one by one or in runs, and the time of a call. Device drafters have checks
of their own. It cannot see whether drafts are good. Must not know a plugin by name."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType, ModuleType

import numpy as np

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.drafter import Drafter, DrafterContext, Drafts
from frame.core.interfaces.sampling_params import SamplingParams
from frame.testing.conformance import Check, Subject, find_checks
from frame.testing.generators import make_alike, require_bounded, require_fast, require_growth

VOCAB, SLOTS, CONTEXT, STEPS = 37, 6, 16_384, 5
CONTEXT_OF = DrafterContext(vocab_size=VOCAB, max_slots=SLOTS, max_context=CONTEXT, num_steps=STEPS)
SHORT, LONG = 256, 12_288  # tokens of texts whose calls are timed
LARGE_VOCAB, MANY_SLOTS = 150_000, 256
MAX_SECONDS = 1.8e-3  # of the drafts of a few slots
MAX_ROUNDS = 120  # of four long texts each, after which a drafter that keeps texts holds no more
MAX_RATIO = 3.0  # of their times
MIN_SECONDS = 2e-4  # shorter times are not compared

Make = Callable[[], Drafter]


def suite(subject: Subject) -> Iterator[Check]:
    """The checks of a drafter."""
    make = partial(subject.target, CONTEXT_OF, subject.options)
    if getattr(subject.record.capabilities, "runs_on", "host") == "device":
        from frame.testing.drafter.device import device_checks

        yield from device_checks(subject)
        return
    of_subject = {"real_sizes", "ended_requests_are_forgotten"}
    for name, function in find_checks(__name__):
        yield Check(name, partial(function, subject if name in of_subject else make))
    keeps_texts = getattr(subject.record.capabilities, "keeps_texts", False)
    yield Check("slot_is_used_again", partial(_slot_is_used_again, make, keeps_texts))
    if keeps_texts:
        yield Check("tenants_are_told_apart", partial(_tenants_are_told_apart, make))


def _text(seed: int, count: int) -> list[int]:
    """Random tokens, then copies of parts of them."""
    numbers = random.Random(seed)
    tokens = [numbers.randrange(VOCAB) for _ in range(max(2, count // 3))]
    while len(tokens) < count:
        first = numbers.randrange(len(tokens))
        tokens += tokens[first : first + numbers.randint(1, 9)]
    return tokens[:count]


def _add(drafter: Drafter, slot: int, tokens: Sequence[int], tenant: str = "") -> None:
    """Set a slot up; each slot's request has a tenant of its own."""
    ids = np.array(tokens, np.int32)
    ids.flags.writeable = False
    drafter.add_slot(SlotSetup(slot, SamplingParams(), 0, len(tokens), ids, tenant=tenant or f"tenant {slot}"))


def _observe(drafter: Drafter, runs: dict[int, Sequence[int]]) -> None:
    width = max(map(len, runs.values()))
    tokens = np.zeros((len(runs), width), np.int32)
    for row, run in enumerate(runs.values()):
        tokens[row, : len(run)] = run
    counts = np.array([len(run) for run in runs.values()], np.int32)
    drafter.observe_tokens(np.array(list(runs), np.int64), tokens, counts)


def _propose(drafter: Drafter, slots: Sequence[int], maximum: Sequence[int] | int = STEPS) -> list[list[int]]:
    """The drafts as lists; checks their form."""
    limits = np.array([maximum] * len(slots) if isinstance(maximum, int) else maximum, np.int32)
    drafts = drafter.propose_tokens(np.array(slots, np.int64), limits)
    assert isinstance(drafts, Drafts), f"propose_tokens returns {type(drafts).__name__}, not Drafts"
    assert drafts.counts.dtype == drafts.token_ids.dtype == np.int32, "token ids and counts must be int32"
    assert drafts.counts.shape == (len(slots),), f"there are {drafts.counts.shape} counts for {len(slots)} slots"
    assert bool(((drafts.counts >= 0) & (drafts.counts <= limits)).all()), f"drafts of {drafts.counts} tokens, where {limits} may be"
    assert drafts.token_ids.shape == (int(drafts.counts.sum()),), "the number of token ids is not the sum of the counts"
    assert bool(((drafts.token_ids >= 0) & (drafts.token_ids < VOCAB)).all()), "a drafted token is outside of the vocabulary"
    ends = np.cumsum(drafts.counts)
    return [drafts.token_ids[end - count : end].tolist() for end, count in zip(ends, drafts.counts, strict=True)]


def _follow(make: Make, slot: int, tokens: Sequence[int], start: int, step: int = 1) -> list[list[int]]:
    """The drafts after each run of `step` tokens from `start` on."""
    drafter = make()
    _add(drafter, slot, tokens[:start])
    return _go_on(drafter, slot, tokens, start, step)


def _go_on(drafter: Drafter, slot: int, tokens: Sequence[int], start: int, step: int = 1) -> list[list[int]]:
    """The same in a slot that has the tokens before `start`."""
    drafts = []
    for place in range(start, len(tokens), step):
        drafts += _propose(drafter, [slot])
        _observe(drafter, {slot: tokens[place : place + step]})
    return drafts


def check_drafts_fit(make: Make) -> None:
    for seed in range(6):
        drafter = make()
        texts = {slot: _text(10 * seed + slot, 90 + slot) for slot in range(SLOTS)}
        for slot, text in texts.items():
            _add(drafter, slot, text[: 1 + 3 * slot])
        for place in range(1, 60):
            _propose(drafter, list(texts))
            _observe(drafter, {slot: text[3 * slot + place : 3 * slot + place + 1] for slot, text in texts.items()})


def check_something_is_drafted(make: Make) -> None:
    """A text that repeats eight tokens has drafts, of the prompt or of the output."""
    tokens = [5 + number % 8 for number in range(160)]
    drafts = _follow(make, 0, tokens, 80)
    assert any(drafts), f"there is no draft in {len(drafts)} steps of a text that repeats eight tokens"


def check_neighbours_stay(make: Make) -> None:
    """The drafts of all slots are the same when a slot beside them ends and begins again."""
    drafter, texts = make(), {slot: [3 + slot, 4 + slot, 5 + slot, 6 + slot] * 12 for slot in range(SLOTS)}
    for slot, text in texts.items():
        _add(drafter, slot, text)
    before = _propose(drafter, list(texts))
    for slot in (2, 0, SLOTS - 1):
        others = [other for other in texts if other != slot]
        drafter.remove_slot(slot)
        assert _propose(drafter, others) == [before[other] for other in others], f"the drafts beside slot {slot} change when it ends"
        _add(drafter, slot, texts[slot])


def check_real_sizes(subject: Subject) -> None:
    """A vocabulary of 150,000 tokens and 256 slots in one call, each as when it is alone."""
    drafter: Drafter = subject.target(replace(CONTEXT_OF, vocab_size=LARGE_VOCAB, max_slots=MANY_SLOTS), subject.options)
    texts = {slot: [LARGE_VOCAB - 1 - slot - number for number in (0, 9, 4, 7)] * 9 for slot in range(MANY_SLOTS)}
    for slot, text in texts.items():
        _add(drafter, slot, text)
    slots = np.arange(MANY_SLOTS)
    together = drafter.propose_tokens(slots, np.full(MANY_SLOTS, STEPS, np.int32))
    ends = np.cumsum(together.counts)
    for slot in (0, 63, 64, 127, 128, MANY_SLOTS - 1):
        alone = drafter.propose_tokens(slots[slot : slot + 1], np.array([STEPS], np.int32))
        draft = together.token_ids[ends[slot] - together.counts[slot] : ends[slot]].tolist()
        assert draft == alone.token_ids.tolist(), f"slot {slot} of {MANY_SLOTS} has another draft than alone"
        assert set(draft) <= set(texts[slot]) or max(draft) > 1 << 17, f"slot {slot} drafts {draft}, tokens that its text does not have"


def check_ended_requests_are_forgotten(subject: Subject) -> None:
    """With `keeps_texts`, what is kept of one tenant, of many tenants, and of long texts has a
    bound, which is reached after at most 8 million tokens."""
    drafter: Drafter = subject.target(CONTEXT_OF, subject.options)
    if getattr(subject.record.capabilities, "keeps_texts", False):
        _require_bounded_texts(drafter)
        return

    def work(number: int) -> None:
        _add(drafter, number % SLOTS, _text(number % 50, 20))
        _observe(drafter, {number % SLOTS: [number % VOCAB]})
        drafter.remove_slot(number % SLOTS)

    require_bounded(drafter, work, 2000, "requests that have ended")


def _require_bounded_texts(drafter: Drafter) -> None:
    """Memory at the end of rounds of the same number of tokens: it stops to grow."""
    numbers, sizes = np.random.default_rng(0), list[int]()
    for round_ in range(MAX_ROUNDS):
        for number in range(4):
            tenant = "one" if number % 2 else f"tenant {round_}"
            text = numbers.integers(0, VOCAB, CONTEXT - 64).astype(np.int32)
            text.flags.writeable = False
            drafter.add_slot(SlotSetup(0, SamplingParams(), 0, len(text), text, tenant=tenant))
            _observe(drafter, {0: [number]})
            drafter.remove_slot(0)
        sizes.append(_count_bytes(drafter))
        if len(sizes) > 2 and sizes[-1] <= 1.02 * sizes[-3]:
            return
    kept = f"{sizes[0] >> 10} KiB after 4 of them, and {sizes[-1] >> 10} KiB after {4 * MAX_ROUNDS}"
    raise AssertionError(f"texts of ended requests take {kept}")


def _count_bytes(drafter: object) -> int:
    """Bytes of the arrays and containers that a drafter refers to."""
    waiting, seen, size = [drafter], set[int](), 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | MethodType):
            continue
        seen.add(id(one))
        size += one.nbytes if isinstance(one, np.ndarray) else sys.getsizeof(one)
        waiting += gc.get_referents(one)
    return size


def check_set_up_again_forgets_what_was_observed(make: Make) -> None:
    """A preempted request comes back in its slot, which was not removed: its text is that of the
    setup alone, as in a fresh slot."""
    for seed in range(8):
        text, other = _text(20 + seed, 160), _text(60 + seed, 120)
        drafter, fresh = make(), make()
        _add(drafter, 1, text[:50])
        _observe(drafter, {1: other[:9]})  # tokens that were drawn again otherwise
        for size in (59 + 4 * (seed % 2), 80):
            _add(drafter, 1, text[:size])
        _add(fresh, 1, text[:80])
        assert _go_on(drafter, 1, text, 80) == _go_on(fresh, 1, text, 80), "a slot that is set up again keeps tokens from before"


def _propose_tokens(drafter: Drafter, slot: int) -> list[int]:
    """The draft of a slot up to the first placeholder, as the scheduler cuts it."""
    drafts = drafter.propose_tokens(np.array([slot]), np.array([STEPS], np.int32)).token_ids.tolist()
    return drafts[: next((place for place, token in enumerate(drafts) if token < -1), len(drafts))]


def check_placeholders_are_not_drafted(make: Make) -> None:
    """Where a file's placeholder follows, a draft ends. Which file it is changes no token of a
    draft."""
    for first, second in ((-5, -1000), (-2, -(1 << 30)), (-VOCAB, -VOCAB - 7)):
        drafts = []
        for placeholder in (first, second):
            drafter, copied = make(), list[list[int]]()
            for slot, gap in enumerate((1, 2, 3)):
                text = [*(([20 + slot, 25, *([placeholder] * gap), 30, 31]) * 6), 20 + slot, 25]
                _add(drafter, slot, text)
                copied.append(_propose_tokens(drafter, slot))
                for token in (30, 31, 20 + slot):
                    _observe(drafter, {slot: [token]})
                    copied.append(_propose_tokens(drafter, slot))
            drafts.append(copied)
        assert drafts[0] == drafts[1], f"drafts depend on the id of a placeholder: {drafts[0]} for {first}, {drafts[1]} for {second}"
    plain = make()
    _add(plain, 0, [20, 25, 26, 30, 31] * 6 + [20, 25])
    if _propose_tokens(plain, 0)[:1] == [26]:  # it copies what followed before
        marked = make()
        _add(marked, 0, [20, 25, -9, 30, 31] * 6 + [20, 25])
        draft = _propose_tokens(marked, 0)
        assert not draft, f"the tokens {draft} are drafted where a placeholder followed; drafts end before one"


def check_a_draft_is_fast(make: Make) -> None:
    drafter = make()
    for slot in range(4):
        _add(drafter, slot, _text(slot, 100))
    slots, limits = np.arange(4), np.full(4, STEPS, np.int32)
    require_fast(lambda: drafter.propose_tokens(slots, limits), MAX_SECONDS, "drafts of four slots")


def check_drafts_shorter_where_asked(make: Make) -> None:
    drafter = make()
    for slot in range(SLOTS):
        _add(drafter, slot, [3, 4, 5, 6, 7, 8] * 8)
    for first in range(STEPS):
        _propose(drafter, list(range(SLOTS)), [1 + (first + slot) % STEPS for slot in range(SLOTS)])


def check_proposing_changes_nothing(make: Make) -> None:
    drafter = make()
    for slot in range(3):
        _add(drafter, slot, _text(slot, 120)[:80])
    first = _propose(drafter, [0, 1, 2])
    assert _propose(drafter, [0, 1, 2]) == first, "a second call of propose_tokens returns other drafts"
    expected = _follow(make, 1, _text(1, 120), 80)
    followed = []
    for place in range(80, 120):
        _propose(drafter, [0, 1, 2])
        followed += _propose(drafter, [1])
        _observe(drafter, {1: _text(1, 120)[place : place + 1]})
    assert followed == expected, "drafts depend on how often propose_tokens was called"


def check_inputs_stay_as_they_are(make: Make) -> None:
    drafter = make()
    _add(drafter, 2, _text(5, 60))
    slots, maximum = np.array([2], np.int64), np.array([STEPS], np.int32)
    tokens, counts = np.array([[1, 2, 3]], np.int32), np.array([2], np.int32)
    for array in (slots, maximum, tokens, counts):
        array.flags.writeable = False
    drafter.propose_tokens(slots, maximum)
    drafter.observe_tokens(slots, tokens, counts)
    _add(drafter, 0, [3, 4, 5] * 20)
    _add(drafter, 1, [6, 7, 8] * 20)
    kept = drafter.propose_tokens(np.array([0]), maximum)
    before = kept.token_ids.tolist()
    drafter.observe_tokens(slots, tokens, counts)
    drafter.propose_tokens(np.array([1]), maximum)
    assert kept.token_ids.tolist() == before, "a later call changes drafts that were returned"


def check_drafts_for_some_slots(make: Make) -> None:
    drafter = make()
    texts = {slot: _text(slot, 90) for slot in (5, 0, 3, 1)}
    for slot, text in texts.items():
        _add(drafter, slot, text)
    alone = {slot: _propose(drafter, [slot])[0] for slot in texts}
    for slots in ([5, 0, 3, 1], [1, 3], [3, 5, 1]):
        assert _propose(drafter, slots) == [alone[slot] for slot in slots], f"drafts of slots {slots} are those of other slots"
    assert _propose(drafter, []) == [], "there is a draft without a slot"


def check_runs_count_as_single_tokens(make: Make) -> None:
    text = _text(3, 240)
    singles = _follow(make, 4, text, 60)
    for step in (2, 3, 5):
        assert _follow(make, 4, text, 60, step) == singles[::step], f"runs of {step} tokens give other drafts than single tokens"
    drafter = make()
    _add(drafter, 0, text[:60])
    _add(drafter, 1, text[:60])
    _observe(drafter, {0: text[60:61], 1: text[60:64]})  # of the first row one token of the array is valid
    assert _propose(drafter, [0, 1]) == [singles[1], singles[4]], "rows of different counts give other drafts than single tokens"


def check_setup_counts_as_single_tokens(make: Make) -> None:
    text = _text(4, 200)
    drafts = _follow(make, 0, text, 40)
    for place in (41, 80, 150):
        drafter = make()
        _add(drafter, 0, text[:place])
        assert _propose(drafter, [0]) == [drafts[place - 40]], "tokens of a setup give other drafts than the same tokens observed"


def check_slot_is_set_up_again(make: Make) -> None:
    text = _text(6, 200)
    drafts = _follow(make, 2, text, 40)
    drafter = make()
    _add(drafter, 2, text[:40])
    _observe(drafter, {2: text[40:45]})
    _add(drafter, 2, text[:90])
    assert _go_on(drafter, 2, text, 90) == drafts[50:], "a slot that is set up again with more tokens gives other drafts"


def _slot_is_used_again(make: Make, keeps_texts: bool) -> None:
    """By a request of another tenant, and of the same one unless the drafter keeps texts."""
    text = _text(8, 90)
    expected = _follow(make, 1, text, 10)
    for tenant in ("another",) if keeps_texts else ("another", "tenant 1"):
        drafter = make()
        _add(drafter, 1, _text(9, 400), tenant)
        _add(drafter, 2, _text(8, 60), tenant)
        _observe(drafter, {1: [1, 2, 3, 4]})
        drafter.remove_slot(1)
        drafter.remove_slot(2)
        _add(drafter, 1, text[:10])
        followed = _go_on(drafter, 1, text, 10)
        assert followed == expected, f"drafts depend on a request of {tenant!r} that had the slot before, for one of 'tenant 1'"


def _tenants_are_told_apart(make: Make) -> None:
    """No draft comes from the text of a tenant whose name is alike."""
    text = _text(11, 60)
    expected = _follow(make, 0, text, 8)
    for one, other in (*make_alike(), ("tenant", "Tenant"), ("tenant", "tenant ")):
        drafter = make()
        _add(drafter, 1, text, one)
        _observe(drafter, {1: text[:8]})
        drafter.remove_slot(1)
        _add(drafter, 0, text[:8], other)
        followed = _go_on(drafter, 0, text, 8)
        assert followed == expected, f"the drafts of tenant {other!r} come from a text of tenant {one!r}"


def check_fills_the_context(make: Make) -> None:
    """The last token that the context holds is observed too, and has no draft."""
    drafter = make()
    text = _text(7, CONTEXT)
    _add(drafter, 0, text[: CONTEXT - 7])
    _add(drafter, SLOTS - 1, text[:1])
    for place in range(CONTEXT - 7, CONTEXT):
        if place < CONTEXT - 1:
            _propose(drafter, [0, SLOTS - 1], [min(STEPS, CONTEXT - 1 - place), STEPS])
        _observe(drafter, {0: text[place : place + 1]})


def check_time_does_not_grow_without_a_match(make: Make) -> None:
    """Texts whose end they do not have before, so that a search would read all of them."""

    def draft(count: int) -> Callable[[], object]:
        drafter, numbers = make(), random.Random(count)
        _add(drafter, 0, [*(numbers.randrange(VOCAB - 2) for _ in range(count)), VOCAB - 1, VOCAB - 2])
        slots, limits = np.zeros(1, np.int64), np.full(1, STEPS, np.int32)
        return lambda: [drafter.propose_tokens(slots, limits) for _ in range(60)]

    require_growth(draft, SHORT, LONG, "60 drafts after so many tokens", factor=MAX_RATIO, minimum=4e-3)


def check_time_does_not_grow(make: Make) -> None:
    seconds = {}
    for count in (SHORT, LONG):
        drafter, best = make(), 1.0
        text = _text(2, count)
        _add(drafter, 0, text)
        for round_ in range(12):
            began = time.perf_counter()
            for i in range(5):
                _propose(drafter, [0])
                _observe(drafter, {0: [text[(5 * round_ + i) % SHORT]]})
            best = min(best, time.perf_counter() - began)
        seconds[count] = best
    limit = max(MIN_SECONDS, MAX_RATIO * seconds[SHORT])
    assert seconds[LONG] <= limit, f"a draft of {LONG} tokens of text takes {seconds[LONG] / seconds[SHORT]:.0f} x that of {SHORT}"
