"""The conformance suite of logits processors. Must not know a processor by name.

A check makes processors with `make(vocab_size, max_slots)` and gets parameters that the processor
applies to.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import LogitsProcessor, ProcessorCapabilities, ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.testing.conformance import Check, SkipCheck, Subject, collect, count_elements
from frame.testing.generators import require_near_reference
from frame.testing.sampling.processor_inputs import (
    BAD_VALUES,
    EXAMPLES,
    LARGE_VOCAB,
    MANY_SLOTS,
    MAX_IDLE_BYTES,
    MEANINGS,
    ONE_PARAM,
    OUTPUT,
    PROMPT,
    SLOTS,
    VOCAB,
    Make,
    apply_processor,
    call_processor,
    cut_setup,
    fill_half,
    fill_processor,
    make_logits,
    make_setups,
    move_setup,
    observe_outputs,
)
from frame.testing.sampling.processor_limits import all_values_of_a_request_count, rows_of_others_keep_their_nan
from frame.testing.torch_calls import TorchCalls


def suite(subject: Subject) -> Iterable[Check]:
    """The suite of the kind `logits_processor`, with those parameter sets of `EXAMPLES` (or of the
    class's `conformance_params`) that the processor applies to."""
    candidates = getattr(subject.target, "conformance_params", None) or EXAMPLES

    def make(vocab_size: int, max_slots: int) -> LogitsProcessor:
        processor: LogitsProcessor = subject.target(ProcessorContext(vocab_size, max_slots, torch.device("cpu")), subject.options)
        return processor

    def applies_to_something() -> None:
        assert any(make(VOCAB, SLOTS).applies_to(params) for params in candidates), (
            "applies_to() is false for every example; give the class a tuple `conformance_params` of SamplingParams that it applies to"
        )

    yield Check("applies_to_something", applies_to_something)
    examples = [params for params in candidates if make(VOCAB, SLOTS).applies_to(params)]
    if examples:
        yield from checks_of(make, examples)
        yield Check("record_names_its_parameters", partial(record_names_its_parameters, subject.record.capabilities, make, examples))
        yield Check("parameters_have_their_meaning", partial(parameters_have_their_meaning, subject.record.capabilities, make))
        yield Check("all_values_of_a_request_count", partial(all_values_of_a_request_count, subject, make))
        yield Check("rows_of_others_keep_their_nan", partial(rows_of_others_keep_their_nan, make, examples))


def checks_of(make: Make, examples: Sequence[SamplingParams]) -> Iterator[Check]:
    """All checks. `wanted`: at least one parameter set that the processor applies to; two different
    ones find more."""
    yield from collect(__name__, make, examples)


def record_names_its_parameters(can: object, make: Make, examples: Sequence[SamplingParams]) -> None:
    """The processor applies to a request with a parameter that its record names, and to none with
    others alone: the server refuses a parameter that no record names."""
    if not isinstance(can, ProcessorCapabilities):
        raise SkipCheck("the record names no parameters; register it with capabilities=ProcessorCapabilities(...)")
    processor = make(VOCAB, SLOTS)
    for name, params in ONE_PARAM.items():
        assert processor.applies_to(params) == (name in can.params), (
            f"applies_to() is {name not in can.params} for a request with {name} alone, but ProcessorCapabilities.params is {can.params}"
        )
    for key in {key for params in examples for key in params.custom}:
        assert can.custom is None or key in can.custom, f"the processor reads custom[{key!r}], which ProcessorCapabilities.custom lacks"


def parameters_have_their_meaning(can: object, make: Make) -> None:
    """A parameter of the API that the record names changes the logits as the API says, after a
    prompt alone, few output tokens and many, of which some are equal."""
    for name in (name for name in getattr(can, "params", ()) if name in MEANINGS):
        params = ONE_PARAM[name]
        for seed, num_output in enumerate((0, 1, 3, 7, 7)):
            (setup,) = make_setups([params], 1, 30, seed=seed)
            setup = cut_setup(setup, PROMPT + num_output)
            setup.token_ids[PROMPT + 1 :: 2] = setup.token_ids[-1]
            ids, logits = torch.from_numpy(setup.token_ids.astype(np.int64)), make_logits(1)
            expected = MEANINGS[name](logits[0], ids[PROMPT:], ids, params)
            resumed = apply_processor(fill_processor(make, [setup]), logits, [0], [setup])[0]
            grown = fill_processor(make, [cut_setup(setup, PROMPT)])
            for token in ids[PROMPT:]:
                grown.observe_tokens(torch.tensor([setup.slot]), token[None])
            for what, result in (("that comes back", resumed), ("that grew", apply_processor(grown, logits, [0], [setup])[0])):
                wrong = ~torch.isclose(result, expected, rtol=1e-5, atol=1e-5)
                assert not wrong.any(), (
                    f"{name} of a request {what} with {num_output} output tokens: token {int(wrong.nonzero()[0])} is wrong"
                )


# rows and slots -----------------------------------------------------------------------------------


def check_applies_to_is_pure(make: Make, examples: Sequence[SamplingParams]) -> None:
    """A request without special parameters pays nothing."""
    processor = make(VOCAB, SLOTS)
    for _ in range(3):
        assert not processor.applies_to(SamplingParams()), "applies_to() is true for default parameters: every request would pay"
        for params in examples:
            assert processor.applies_to(params), f"applies_to() is not always true for {params}"


def check_bad_parameters_are_refused(make: Make, examples: Sequence[SamplingParams]) -> None:
    """`validate_params` takes the wanted parameters. It refuses what the processor cannot use, with
    ValueError and one sentence that names the field; what it takes does not fail later."""
    processor = make(VOCAB, SLOTS)
    for params in examples:
        processor.validate_params(params)
        for name, value in product(params.custom, BAD_VALUES):
            bad = replace(params, custom={**params.custom, name: value})
            what = f"custom[{name!r}] = {value[:20]!r}"
            if not processor.applies_to(bad) or _is_refused(processor, bad, name, what):
                continue
            setup = replace(make_setups(examples, 1)[0], params=bad)
            try:
                used = fill_processor(make, [setup])
                observe_outputs(used, [setup], 3)
                result = apply_processor(used, make_logits(1), [0], [setup])
            except Exception as error:
                raise AssertionError(f"validate_params() takes {what}, on which the processor fails: {type(error).__name__}") from error
            assert not (result.isnan() | result.isposinf()).any(), f"validate_params() takes {what}, which makes logits NaN or infinite"
            assert not result.isneginf().all(), f"validate_params() takes {what}, which excludes every token"


def _is_refused(processor: LogitsProcessor, params: SamplingParams, name: str, what: str) -> bool:
    try:
        processor.validate_params(params)
    except ValueError as error:
        assert name in str(error), f"the error for {what} does not name the field: {str(error)!r}"
        assert "\n" not in str(error), f"the error for {what} is no sentence: {str(error)!r}"
        return True
    except Exception as error:
        raise AssertionError(f"validate_params() raises {type(error).__name__} and not ValueError for {what}") from error
    return False


def check_apply_changes_named_rows(make: Make, examples: Sequence[SamplingParams]) -> None:
    """`apply` works in place, on the rows that it is given alone, and returns nothing else."""
    setups = make_setups(examples, SLOTS // 2)
    logits = make_logits(2 * len(setups))
    processor = fill_processor(make, setups)
    rows = list(range(1, 2 * len(setups), 2))
    changed = logits.clone()
    before = (changed.data_ptr(), changed.dtype, changed.shape, changed.stride())
    call_processor(processor, changed, rows, setups)
    assert before == (changed.data_ptr(), changed.dtype, changed.shape, changed.stride()), "apply() gave the logits other memory or a dtype"
    others = [row for row in range(len(logits)) if row not in rows]
    assert torch.equal(changed[others], logits[others]), "apply() changed rows that it was not given"
    assert not torch.equal(changed[rows], logits[rows]), "apply() has no effect on any row: does it work in place?"


def check_apply_repeats(make: Make, examples: Sequence[SamplingParams]) -> None:
    """The state changes with tokens, not with calls of `apply`: steps are also run to warm up."""
    setups, logits, processor = fill_half(make, examples)
    rows = range(len(setups))
    first = apply_processor(processor, logits, rows, setups)
    assert torch.equal(first, apply_processor(processor, logits, rows, setups)), "a second apply() of one step gives other logits"


def check_rows_stand_alone(make: Make, examples: Sequence[SamplingParams]) -> None:
    """A row's logits do not depend on the rows beside it, their number, their order or their
    slots."""
    setups = make_setups(examples, SLOTS // 2)
    logits, processor = make_logits(2 * len(setups)), fill_processor(make, setups)
    rows = list(range(1, 2 * len(setups), 2))
    together = apply_processor(processor, logits, rows, setups)
    assert torch.equal(together, apply_processor(processor, logits, rows[::-1], setups[::-1])), "the order of rows changed the logits"
    for row, setup in zip(rows, setups, strict=True):
        few = apply_processor(processor, logits, [row], [setup])
        assert torch.allclose(few[row], together[row]), f"row {row} differs in a step without the other rows"
        moved = move_setup(setup, (setup.slot + 5) % SLOTS)
        alone = apply_processor(fill_processor(make, [moved]), logits[row : row + 1], [0], [moved])
        assert torch.allclose(alone[0], together[row]), f"row {row} differs when its request is the only one, in another slot"


def check_instances_stand_alone(make: Make, examples: Sequence[SamplingParams]) -> None:
    """Two processors of one class, of two engines, share no state."""
    setups = make_setups(examples, SLOTS + 1)
    ours, others = setups[: SLOTS // 2], [move_setup(setup, i) for i, setup in enumerate(setups[SLOTS // 2 + 1 :])]
    logits, rows = make_logits(len(ours)), range(len(ours))
    processor = fill_processor(make, ours)
    before = apply_processor(processor, logits, rows, ours)
    other = fill_processor(make, others)
    observe_outputs(other, others, 3)
    after = apply_processor(processor, logits, rows, ours)
    assert torch.equal(before, after), "a second processor of the class changes the state of the first"


def check_tensors_are_left_alone(make: Make, examples: Sequence[SamplingParams]) -> None:
    """`apply` and `observe_tokens` change no index tensor and keep none: the engine uses their
    memory again in the next step."""
    setups = make_setups(examples, SLOTS // 2)
    clean, reused = fill_processor(make, setups), fill_processor(make, setups)
    logits, rows = make_logits(len(setups)), torch.arange(len(setups))
    for step in range(3):
        arguments = [torch.tensor([setup.slot for setup in setups]), torch.arange(len(setups)) + step]
        clean.observe_tokens(*(tensor.clone() for tensor in arguments))
        kept = [tensor.clone() for tensor in arguments]
        reused.observe_tokens(*kept)
        assert all(map(torch.equal, kept, arguments)), "observe_tokens() changed the slots or token ids that it was given"
        slots, positions = arguments[0].clone(), torch.tensor([len(setup.token_ids) + step + 1 for setup in setups])
        inputs = [rows.clone(), slots.clone(), positions.clone()]
        ours, theirs = logits.clone(), logits.clone()
        clean.apply(ours, rows.clone(), slots.clone(), positions.clone())
        reused.apply(theirs, *inputs)
        assert all(map(torch.equal, inputs, (rows, slots, positions))), "apply() changed the rows, slots or positions that it was given"
        assert torch.equal(ours, theirs), "the processor keeps a tensor of an earlier step, which the engine has overwritten"
        for tensor in (*kept, *inputs):
            tensor.fill_(0)


def check_recovery_keeps_the_state(make: Make, examples: Sequence[SamplingParams]) -> None:
    """A request that comes back with its output so far, in another slot, has the state of one that
    stayed. All requests of a step observe their tokens in one call, in any order of slots."""
    made = make_setups(examples, max(4, len(examples)), same_tokens=False)
    setups = [move_setup(setup, (3 * i + 2) % SLOTS) for i, setup in enumerate(made)]
    setups = setups[:SLOTS]
    stayed = fill_processor(make, [cut_setup(setup, PROMPT) for setup in setups])
    for step in range(OUTPUT):
        chosen = setups[::-1] if step % 2 else setups
        tokens = torch.tensor([int(setup.token_ids[PROMPT + step]) for setup in chosen])
        stayed.observe_tokens(torch.tensor([setup.slot for setup in chosen]), tokens)
    logits, rows = make_logits(len(setups)), range(len(setups))
    here = apply_processor(stayed, logits, rows, setups)
    moved = [move_setup(setup, (setup.slot + 7) % SLOTS) for setup in setups]
    there = apply_processor(fill_processor(make, moved), logits, rows, moved)
    for row, setup in enumerate(setups):
        assert torch.allclose(here[row], there[row]), f"a recovered request has other logits than one that stayed ({setup.params})"


def check_slots_are_reused(make: Make, examples: Sequence[SamplingParams]) -> None:
    """The next request of a slot has nothing of the last one, however often slots change hands, and
    the others keep what they have."""
    used, setups = make(VOCAB, SLOTS), make_setups(examples, 4 * SLOTS)
    stays = move_setup(setups[1], SLOTS - 1)
    used.add_slot(stays)
    logits = make_logits(1)
    before = apply_processor(used, logits, [0], [stays])
    for turn in range(0, len(setups), SLOTS // 2):
        group = setups[turn : turn + SLOTS // 2]
        for setup in group:
            used.add_slot(setup)
        observe_outputs(used, group, turn)
        for setup in group[:: 1 if turn % 3 else -1]:
            used.remove_slot(setup.slot)
    assert torch.equal(before, apply_processor(used, logits, [0], [stays])), "a request changed when others came and went"
    for setup in (*setups[: len(examples)], move_setup(setups[0], SLOTS - 1)):
        if setup.slot == stays.slot:
            used.remove_slot(setup.slot)
        used.add_slot(setup)
        fresh = fill_processor(make, [setup])
        results = [apply_processor(processor, logits, [0], [setup]) for processor in (used, fresh)]
        assert torch.equal(*results), "the earlier request of a slot left something behind"


def check_neighbours_stay(make: Make, examples: Sequence[SamplingParams]) -> None:
    """The requests of all slots keep their state when the one beside them ends, and when another
    one takes its place."""
    setups = make_setups(examples, SLOTS, same_slots=False)
    processor, logits = fill_processor(make, setups), make_logits(SLOTS)
    before = apply_processor(processor, logits, range(SLOTS), setups)
    for slot in (3, 0, SLOTS - 1, 8):
        others = [row for row in range(SLOTS) if row != slot]
        processor.remove_slot(slot)
        for _ in range(2):
            after = apply_processor(processor, logits, others, [setups[row] for row in others])
            assert torch.equal(after[others], before[others]), f"the requests beside slot {slot} have other logits when it ends"
            processor.add_slot(setups[slot])


def check_values_at_one_address(make: Make, examples: Sequence[SamplingParams]) -> None:
    """Steps have their slots and rows at one address, with other values each time."""
    setups = make_setups(examples, SLOTS, same_slots=False)
    processor, logits = fill_processor(make, setups), make_logits(SLOTS)
    rows, slots, positions = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    for first in (0, 5, 9, 0):
        chosen = setups[first : first + 4]
        expected = apply_processor(processor, logits, range(first, first + 4), chosen)
        rows.copy_(torch.arange(first, first + 4))
        slots.copy_(rows)
        positions.copy_(torch.tensor([len(setup.token_ids) for setup in chosen]))
        changed = logits.clone()
        processor.apply(changed, rows, slots, positions)
        assert torch.equal(changed, expected), "the logits are those of the rows or slots that were at this address before"


def check_long_outputs(make: Make, examples: Sequence[SamplingParams]) -> None:
    """600 tokens, many of them equal: a request that stayed and one that comes back have the same
    logits."""
    setup = make_setups(examples[:1], 1)[0]
    for params in examples:
        tokens = np.array([*setup.token_ids[:PROMPT], *([11] * 300), *(number % 7 for number in range(300))], np.int32)
        whole = replace(setup, params=params, token_ids=tokens)
        stayed = fill_processor(make, [cut_setup(whole, PROMPT)])
        for token in tokens[PROMPT:].tolist():
            stayed.observe_tokens(torch.tensor([whole.slot]), torch.tensor([token]))
        here, there = (apply_processor(each, make_logits(1), [0], [whole]) for each in (stayed, fill_processor(make, [whole])))
        assert torch.allclose(here, there), f"after 600 tokens, a recovered request has other logits than one that stayed ({params})"


def check_counts_do_not_wrap(make: Make, examples: Sequence[SamplingParams]) -> None:
    """A token that changes the logits when it is in the output once, 100 and 255 times changes them
    after 256, 512 and 65,536 uses too."""
    for params in examples:
        (setup,) = make_setups([params], 1)
        prompt = np.full(PROMPT, 60, np.int32)

        def find_effect(uses: int, params: SamplingParams = params, setup: SlotSetup = setup, prompt: np.ndarray = prompt) -> bool:
            size, results = max(uses, 1) + 3, []
            for token in (11, 61):  # the same number of tokens, with and without the one that is looked at
                output = np.array([token] * uses + [61] * (size - uses), np.int32)
                whole = replace(setup, token_ids=np.concatenate((prompt, output)))
                results.append(apply_processor(fill_processor(make, [whole]), make_logits(1), [0], [whole])[0, 11])
            return not torch.equal(*results)

        if all(find_effect(uses) for uses in (1, 100, 255)):
            for uses in (256, 512, 65_536):
                assert find_effect(uses), f"a token that was used {uses} times counts as one that was not ({params})"


def check_real_sizes(make: Make, examples: Sequence[SamplingParams]) -> None:
    """256 requests in one step, each as when it is alone; tokens above 2**15 of a vocabulary of
    50,000; and a prompt of 100,000 tokens, which gets a change where a short one does."""
    setups = [replace(setup, slot=slot) for slot, setup in enumerate(make_setups(examples, MANY_SLOTS))]
    processor = make(VOCAB, MANY_SLOTS)
    for setup in setups:
        processor.add_slot(setup)
    logits = make_logits(MANY_SLOTS)
    together = apply_processor(processor, logits, range(MANY_SLOTS), setups)
    for row in (0, 127, 128, 200, MANY_SLOTS - 1):
        alone = apply_processor(processor, logits, [row], [setups[row]])
        assert torch.allclose(alone[row], together[row]), f"row {row} of {MANY_SLOTS} has other logits than when it is alone"
    large = [move_setup(setup, slot) for slot, setup in enumerate(make_setups(examples, min(len(examples), 4), LARGE_VOCAB))]
    stayed, back = make(LARGE_VOCAB, SLOTS), make(LARGE_VOCAB, SLOTS)
    for setup in large:
        setup.token_ids[-3:] = (40_000, LARGE_VOCAB - 1, 40_001)
        stayed.add_slot(cut_setup(setup, PROMPT))
        back.add_slot(setup)
    for step in range(PROMPT, PROMPT + OUTPUT):
        tokens = torch.tensor([int(setup.token_ids[step]) for setup in large])
        stayed.observe_tokens(torch.tensor([setup.slot for setup in large]), tokens)
    wide = make_logits(len(large), LARGE_VOCAB)
    here, there = (apply_processor(each, wide, range(len(large)), large) for each in (stayed, back))
    assert torch.allclose(here, there), f"with tokens above 32,768, a recovered request has other logits in a vocabulary of {LARGE_VOCAB}"
    for setup in make_setups(examples, len(examples)):
        prompt = np.resize(setup.token_ids[:PROMPT], 11_112 * PROMPT)
        long = replace(setup, prompt_len=len(prompt), token_ids=np.concatenate((prompt, setup.token_ids[PROMPT:])))
        outputs = [apply_processor(fill_processor(make, [each]), make_logits(1), [0], [each]) for each in (setup, long)]
        results = [not torch.equal(output, make_logits(1)) for output in outputs]
        assert results[0] <= results[1], (
            f"apply() changes the logits after {PROMPT} tokens of prompt, and none after {len(prompt)} ({setup.params})"
        )


def check_apply_is_fast(make: Make, examples: Sequence[SamplingParams]) -> None:
    """A step of eight requests takes little more than a few operations on their logits."""
    setups, logits, processor = fill_half(make, examples)
    slots = torch.tensor([setup.slot for setup in setups])
    positions, rows = torch.tensor([len(setup.token_ids) for setup in setups]), torch.arange(len(setups))
    require_near_reference(
        lambda: processor.apply(logits, rows, slots, positions),
        lambda: logits.index_add_(0, rows, logits[rows] * 0),
        "apply of 8 rows",
        20,
        1.5e-3,
    )


def check_all_slots_and_tokens_exist(make: Make, examples: Sequence[SamplingParams]) -> None:
    """The last slot and the last token id are as good as others, in any vocabulary."""
    for vocab in (VOCAB, 640):
        setups = [move_setup(setup, SLOTS - 1 - i) for i, setup in enumerate(make_setups(examples, 4, vocab))]
        processor = make(vocab, SLOTS)
        for setup in setups:
            setup.token_ids[-2:] = vocab - 1
            processor.add_slot(setup)
        observe_outputs(processor, setups, vocab - len(setups))
        result = apply_processor(processor, make_logits(4, vocab), range(4), setups)
        assert result.shape == (4, vocab), "apply() changed the shape of the logits"


# values -------------------------------------------------------------------------------------------


def check_banned_tokens_stay_banned(make: Make, examples: Sequence[SamplingParams]) -> None:
    """Logits of minus infinity, from a grammar or another processor, stay so, and make no NaN."""
    setups, logits, processor = fill_half(make, examples)
    banned = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    logits[banned] = -torch.inf
    result = apply_processor(processor, logits, range(len(setups)), setups)
    assert not result.isnan().any(), "apply() makes NaN of logits of minus infinity"
    assert result[banned].isneginf().all(), "apply() allows a token again that was banned with minus infinity"
    assert not result.isposinf().any(), "apply() makes a logit plus infinity"


def check_large_logits_stay_finite(make: Make, examples: Sequence[SamplingParams]) -> None:
    """Large logits make no NaN and no infinity, as an exponential without its maximum would."""
    setups = make_setups(examples, SLOTS // 2)
    processor = fill_processor(make, setups)
    for scale in (1e3, 1e30):
        result = apply_processor(processor, make_logits(len(setups)) * scale, range(len(setups)), setups)
        assert not result.isnan().any() and not result.isposinf().any(), f"apply() makes NaN or infinity of logits around {scale:g}"
        assert not result.isneginf().all(dim=1).any(), f"apply() bans every token of a row with logits around {scale:g}"


def check_precision_is_kept(make: Make, examples: Sequence[SamplingParams]) -> None:
    """Logits that differ in float32 alone stay different: the row is not rounded to 16 bits."""
    setups = make_setups(examples, SLOTS // 2)
    logits = (1 + torch.arange(VOCAB) * 2.0**-20).repeat(len(setups), 1)
    result = apply_processor(fill_processor(make, setups), logits, range(len(setups)), setups)
    for row in result:
        finite = row[row.isfinite()]
        assert len(finite.unique()) > 0.8 * len(finite), "apply() rounds logits: many that differed are now equal"


# work ---------------------------------------------------------------------------------------------


def check_work_is_done_in_batches(make: Make, examples: Sequence[SamplingParams]) -> None:
    """`apply` and `observe_tokens` make as many calls for 12 requests as for 3, and none that waits
    for the device."""
    counts = []
    for size in (3, 12, 1):
        setups = make_setups(examples[:1], size, same_slots=False)
        processor, logits = fill_processor(make, setups), make_logits(size)
        slots, tokens = torch.tensor([setup.slot for setup in setups]), torch.arange(size) + 3
        positions = torch.tensor([len(setup.token_ids) for setup in setups])
        with TorchCalls() as calls:
            processor.apply(logits, torch.arange(size), slots, positions)
            processor.observe_tokens(slots, tokens)
        counts.append(calls.count)
        assert not calls.waits, f"apply() or observe_tokens() waits for the device: {', '.join(sorted(calls.waits))}"
    assert counts[1] <= counts[0] + 2, f"{counts[0]} calls of torch for 3 requests and {counts[1]} for 12: there is a loop over requests"


def check_memory_comes_with_requests(make: Make, examples: Sequence[SamplingParams]) -> None:
    """State is allocated on first use, and does not grow with the requests that are gone."""
    idle = _count_bytes(make(LARGE_VOCAB, MANY_SLOTS))
    assert idle <= MAX_IDLE_BYTES, f"a processor that no request uses holds {idle >> 20} MiB: allocate with the first request"
    processor, sizes = make(VOCAB, SLOTS), []
    for turn in range(60):
        setups = make_setups(examples, 8, seed=turn)
        for setup in setups:
            processor.add_slot(setup)
        observe_outputs(processor, setups, turn)
        for setup in setups:
            processor.remove_slot(setup.slot)
        if turn % 20 == 19:
            sizes.append(_count_bytes(processor) + 8 * count_elements(processor))
    grows = sizes[0] < sizes[1] < sizes[2]
    assert not grows, f"the processor holds {sizes} bytes after 160, 320 and 480 requests that are gone"


# helpers ------------------------------------------------------------------------------------------


def _count_bytes(processor: object) -> int:
    """Bytes of the tensors, arrays and containers that a processor refers to."""
    waiting, seen, size = [processor, *vars(type(processor)).values()], set[int](), 0
    while waiting and len(seen) < 100_000:
        one: Any = waiting.pop()
        if id(one) in seen or isinstance(one, type) or callable(one) or hasattr(one, "__spec__"):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor | np.ndarray):
            size += one.nbytes
        elif isinstance(one, list | dict | set | tuple):
            size += 8 * len(one)
        waiting += gc.get_referents(one)
    return size
