"""The conformance suite of samplers. Must not know a sampler by name.

No check knows how tokens are drawn: those of other rows, slots, steps and dtypes are compared with
the same draws alone, and parameters by what they exclude.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.device_operations import DeviceOperations
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.sampling.sampler import TORCH
from frame.interfaces.sampler import RowSampler, SupportsSlots
from frame.plugins.devices import capture_graph, open_platform
from frame.testing.conformance import Check, Subject, collect, count_elements, unchanged_process
from frame.testing.sampling import sampler_values
from frame.testing.sampling.processor_inputs import BAD_VALUES
from frame.testing.sampling.sampler_bench import PROMPT, SLOTS, VOCAB, Bed, Bench, make_logits, require_tokens
from frame.testing.torch_calls import TorchCalls

LARGE_VOCAB, HUGE_VOCAB = 32_001, 151_936
NEAR, DTYPE_STEPS = 16, 150  # tokens that are about equally likely, and steps in which they are drawn
NUM_STEPS = 120  # after which a sampler holds no more than after half of them
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def suite(subject: Subject) -> Iterator[Check]:
    """The suite of the kind `sampler`, with the parameter sets of the class's `conformance_params`,
    or none. Checks of what the record does not promise are left out."""
    examples = getattr(subject.target, "conformance_params", None) or (SamplingParams(),)
    bench = Bench(subject, tuple(examples))
    leave_out = {
        "seed_": "seed" not in bench.can.params,
        "row_": not issubclass(subject.target, RowSampler),
        "slot_": not issubclass(subject.target, SupportsSlots),
        "custom_": not bench.can.custom,
        "draft_": not bench.can.drafts or "seed" not in bench.can.params,
        "gpu_": bench.device != "cuda" or not bench.can.graphs,
    }
    checks = (*collect(__name__, bench), *collect(sampler_values.__name__, bench))
    return (check for check in checks if not any(no and check.name.startswith(name) for name, no in leave_out.items()))


# what is drawn ------------------------------------------------------------------------------------


def check_greedy_rows(bench: Bench) -> None:
    """Temperature 0 yields the greatest logit, in any dtype, number of rows and vocabulary."""
    sizes = ((VOCAB, 1, torch.float32), (VOCAB, SLOTS, torch.bfloat16), (LARGE_VOCAB, 5, torch.float16), (3, 4, torch.float32))
    for vocab, rows, dtype in sizes:
        logits, slots = make_logits(rows, vocab).to(dtype), range(rows)
        logits[torch.arange(rows), torch.arange(rows) * 7 % vocab] = 40.0
        bed = bench.make(vocab).enter(*(bench.setup(slot, slot, temperature=0.0) for slot in slots))
        results = bed.draw(logits, slots, [PROMPT] * rows)
        assert torch.equal(results, logits.argmax(-1)), f"temperature 0 does not yield the greatest logit of {rows} rows in {dtype}"


def check_many_rows(bench: Bench) -> None:
    """300 rows of large vocabularies, greedy and drawn ones side by side."""
    rows = 300
    bed = bench.make(LARGE_VOCAB, rows).enter(*(bench.setup(slot, slot, temperature=float(slot % 2)) for slot in range(rows)))
    logits = make_logits(rows, LARGE_VOCAB)
    results = bed.draw(logits, range(rows), [PROMPT] * rows)
    assert torch.equal(results[::2], logits[::2].argmax(-1)), "rows of temperature 0 beside drawn ones do not yield their greatest logits"


def check_vocabularies_of_today(bench: Bench) -> None:
    """Tokens after the first 65,536 are drawn, greedily and not."""
    places = torch.tensor([65_535, 65_536, 100_000, HUGE_VOCAB - 1])
    for temperature in (0.0, 1.0):
        bed = bench.make(HUGE_VOCAB).enter(*(bench.setup(slot, slot, temperature=temperature) for slot in range(4)))
        logits = torch.full((4, HUGE_VOCAB), -30.0)
        logits[torch.arange(4), places] = 30.0
        drawn = bed.draw(logits, range(4), [PROMPT] * 4)
        sentence = f"of {HUGE_VOCAB} tokens, {drawn.tolist()} are drawn where {places.tolist()} have the probability 1"
        assert torch.equal(drawn, places), sentence


def check_seed_of_rows_of_other_magnitude(bench: Bench) -> None:
    """A row draws what it draws alone beside rows whose logits are greater by up to 10,000, and a
    row's tokens are those of its values, in whichever dtype they are stored."""
    shifts = torch.tensor([0.0, 120.0, 1e4])[torch.arange(SLOTS) // 3 % 3].unsqueeze(1)
    setups = [bench.setup(slot, slot, seed=slot) for slot in range(SLOTS)]
    bed, wide = bench.make().enter(*setups), bench.make().enter(*setups)
    for step in range(DTYPE_STEPS):
        logits, positions = make_logits(SLOTS, seed=700 + step, spread=0.6), [PROMPT + step] * SLOTS
        logits[:, NEAR:] = -torch.inf  # so that many probabilities are near the limits of the examples
        rounded = logits.bfloat16()
        drawn = bed.draw(rounded, range(SLOTS), positions), wide.draw(rounded.float(), range(SLOTS), positions)
        assert torch.equal(*drawn), "logits in bfloat16 draw other tokens than the same values in float32"
        if step < 8:
            shifted = logits + shifts
            together = wide.draw(shifted, range(SLOTS), positions)
            for slot in range(SLOTS):
                alone = wide.draw(shifted[slot : slot + 1], [slot], positions[:1])
                assert int(alone[0]) == int(together[slot]), "a row draws another token beside rows of much greater logits"


def check_likely_tokens_are_drawn(bench: Bench) -> None:
    """A token with nearly all of the probability is drawn; flat logits yield many tokens."""
    bed, slots = bench.make().enter(*(bench.setup(slot, slot) for slot in range(SLOTS))), range(SLOTS)
    certain = torch.full((SLOTS, VOCAB), -30.0)
    certain[torch.arange(SLOTS), torch.arange(SLOTS) * 5] = 30.0
    assert torch.equal(bed.draw(certain, slots, [PROMPT] * SLOTS), torch.arange(SLOTS) * 5), "a token of probability 1 is not drawn"
    flat = {token for step in range(8) for token in bed.draw(torch.zeros(SLOTS, VOCAB), slots, [PROMPT + step] * SLOTS).tolist()}
    assert len(flat) > 20, f"{8 * SLOTS} draws of {VOCAB} equal logits yield {len(flat)} different tokens"


def check_temperature(bench: Bench) -> None:
    """A low temperature sharpens, higher ones flatten."""
    logits, seen = make_logits(1, seed=4).expand(SLOTS, -1), []
    for temperature in (0.01, 1.0, 20.0):
        bed = bench.make().enter(*(bench.setup(slot, 0, temperature=temperature) for slot in range(SLOTS)))
        seen.append(len({token for step in range(6) for token in bed.draw(logits, range(SLOTS), [PROMPT + step] * SLOTS).tolist()}))
    assert seen[0] <= 2, f"{6 * SLOTS} draws at temperature 0.01 yield {seen[0]} different tokens"
    assert seen[0] < max(seen), f"temperatures of 0.01, 1 and 20 yield {seen} different tokens"


def check_excluded_tokens(bench: Bench) -> None:
    """Logits of -inf are never drawn, at any temperature, where one token is left or half of
    them."""
    for dtype, temperature in product(DTYPES, (0.0, 1.0, 50.0)):
        bed = bench.make().enter(*(bench.setup(slot, slot, temperature=temperature) for slot in range(SLOTS)))
        logits = make_logits(SLOTS, seed=1).to(dtype)
        allowed = torch.rand(SLOTS, VOCAB, generator=torch.Generator().manual_seed(3)) < 0.5
        allowed[0], allowed[1] = False, False
        allowed[0, 0] = allowed[1, VOCAB - 1] = True
        logits[~allowed] = -torch.inf
        for step in range(4):
            results = bed.draw(logits, range(SLOTS), [PROMPT + step] * SLOTS)
            assert bool(allowed[torch.arange(SLOTS), results].all()), f"a token whose logit is -inf was drawn in {dtype}"


def check_grammar_masks(bench: Bench) -> None:
    """Tokens that a grammar mask forbids are not drawn; rows without a mask are not limited."""
    bed = bench.make().enter(*(bench.setup(slot, slot, temperature=slot % 3 / 2) for slot in range(SLOTS)))
    logits, words = make_logits(SLOTS, seed=2), -(-VOCAB // 32)
    mask = np.random.default_rng(4).integers(-(2**31), 2**31, (SLOTS, words)).astype(np.int32)
    mask[::4] = -1
    allowed = torch.from_numpy(np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB].astype(bool))
    for dtype in DTYPES:
        results = bed.draw(logits.to(dtype), range(SLOTS), [PROMPT] * SLOTS, mask)
        assert bool(allowed[torch.arange(SLOTS), results].all()), "a token that the grammar mask forbids was drawn"
        greedy = torch.arange(0, SLOTS, 3)
        expected = logits.masked_fill(~allowed, -torch.inf)[greedy].argmax(-1)
        assert torch.equal(results[greedy], expected), "a greedy row under a mask does not yield the greatest allowed logit"


def check_parameters_that_it_honours(bench: Bench) -> None:
    """top_k, top_p and min_p exclude tokens, each in its own row and all together."""
    logits = make_logits(1, seed=5)
    weights = logits.softmax(-1)[0]
    order = weights.argsort(descending=True)
    before = weights[order].cumsum(0) - weights[order]
    kept: dict[str, tuple[str, float, set[int]]] = {"top_k": ("top_k", 3, set(order[:3].tolist())), "one": ("top_k", 1, {int(order[0])})}
    kept["top_p"] = ("top_p", 0.5, set(order[before < 0.5].tolist()))
    kept["min_p"] = ("min_p", 0.3, set(torch.nonzero(weights >= 0.3 * weights.max()).flatten().tolist()))
    cases = [each for each in kept.values() if each[0] in bench.can.params]
    changes: list[dict[str, Any]] = [{name: value} for name, value, _ in cases]
    setups = [bench.setup(slot, 0, **change) for slot, change in enumerate(changes)]
    setups.append(bench.setup(len(cases), 0))  # without a filter
    bed, rows = bench.make().enter(*setups), len(setups)
    for step in range(25):
        results = bed.draw(logits.expand(rows, -1), range(rows), [PROMPT + step] * rows).tolist()
        for token, (name, value, allowed) in zip(results, cases, strict=False):
            assert token in allowed, f"{name}={value} keeps {len(allowed)} tokens, and another one was drawn"


def check_log_probabilities(bench: Bench) -> None:
    """They come from the model's logits, whatever is drawn."""
    setups = (bench.setup(0, 0, logprobs=4), bench.setup(1, 1), bench.setup(2, 2, logprobs=0, temperature=0.0))
    bed, logits = bench.make().enter(*setups), make_logits(3, seed=6)
    sampled = bed.sample(logits, range(3), [PROMPT] * 3)
    expected = logits.double().log_softmax(-1)
    chosen = torch.stack([expected[row, int(sampled.token_ids[row])] for row in (0, 2)])
    assert sampled.logprobs is not None and sampled.top_ids is not None, "the rows have no log-probabilities"
    error = float((sampled.logprobs.cpu().double() - chosen).abs().max())
    assert error < 1e-4, f"the log-probabilities of the drawn tokens differ by {error:.1e}"
    assert torch.equal(sampled.top_ids[0].cpu(), expected[0].topk(4).indices), "the likeliest tokens are others"


# company ------------------------------------------------------------------------------------------


def check_rows_of_nan(bench: Bench) -> None:
    """A row that is not finite gets some token and is shown by its greatest logit, and the others
    keep theirs."""
    setups = [bench.setup(slot, slot, temperature=0.0 if slot % 2 else 1.0) for slot in range(SLOTS)]
    for value in (torch.nan, torch.inf, -torch.inf):
        logits = make_logits(SLOTS, seed=7)
        logits[1::2, 3] = 40.0
        logits[::4] = value
        sampled = bench.make().enter(*setups).sample(logits, range(SLOTS), [PROMPT] * SLOTS)
        assert not bool(torch.isfinite(sampled.best[::4]).any()), f"a row of {value} counts as finite, so that its request goes on"
        assert bool(torch.isfinite(sampled.best[1::4]).all()), f"a row beside one of {value} counts as not finite"
        assert set(sampled.token_ids[1::2].tolist()) == {3}, f"rows of {value} changed the tokens of others"


def check_seed_decides_alone(bench: Bench) -> None:
    """Seed, position and logits: the same tokens in another slot, order and company, in later
    steps, of another instance, and in other dtypes."""
    setups = [bench.setup(slot, slot, seed=100 + slot) for slot in range(SLOTS)]
    logits, positions = make_logits(SLOTS, seed=8), [PROMPT + slot for slot in range(SLOTS)]
    bed = bench.make().enter(*setups)
    together = bed.draw(logits, range(SLOTS), positions)
    order = [5, 3, 14, 0, 9]
    some = bed.draw(logits[order], order, [positions[row] for row in order])
    assert torch.equal(some, together[order]), "rows have other tokens in another order and company"
    for row in (0, 7, SLOTS - 1):
        moved = bench.make().enter(bench.setup((row + 3) % SLOTS, row, seed=100 + row))
        alone = moved.draw(logits[row : row + 1], [(row + 3) % SLOTS], [positions[row]])
        assert int(alone) == int(together[row]), f"row {row} has another token alone, in another slot"
    for dtype in DTYPES[1:]:
        rounded = logits.to(dtype)
        small, wide = (bench.make().enter(*setups).draw(each, range(SLOTS), positions) for each in (rounded, rounded.float()))
        assert torch.equal(small, wide), f"logits in {dtype} have other tokens than the same values in float32"
    assert torch.equal(bed.draw(logits, range(SLOTS), positions), together), "a later step draws other tokens"


def check_seed_and_position_vary(bench: Bench) -> None:
    """Other seeds and other positions draw other tokens."""
    flat = torch.zeros(SLOTS, VOCAB)
    seeds = bench.make().enter(*(bench.setup(slot, 0, seed=slot) for slot in range(SLOTS)))
    same = bench.make().enter(*(bench.setup(slot, 0, seed=1) for slot in range(SLOTS)))
    for bed, positions, what in ((seeds, [PROMPT] * SLOTS, "seeds"), (same, range(PROMPT, PROMPT + SLOTS), "positions")):
        results = set(bed.draw(flat, range(SLOTS), positions).tolist())
        assert len(results) > SLOTS // 3, f"{SLOTS} {what} draw {len(results)} different tokens from equal logits"


def check_seed_and_repeated_draws(bench: Bench) -> None:
    """A graph draws a step's tokens plainly, then with filters or under a mask: the last draw is
    that of a single one."""
    setups = [bench.setup(slot, slot) for slot in range(SLOTS)]
    once, often = bench.make().enter(*setups), bench.make().enter(*setups)
    for step in range(6):
        logits, positions = make_logits(SLOTS, seed=20 + step), [PROMPT + step] * SLOTS
        often.draw(make_logits(SLOTS, seed=90 + step), range(SLOTS), positions)
        again = often.step(logits, range(SLOTS), positions)
        assert torch.equal(once.step(logits, range(SLOTS), positions), again), "a draw that did not count changed a later one"


def check_instances_stand_alone(bench: Bench) -> None:
    """Two samplers of one process, of other vocabularies and numbers of slots."""

    def make(vocab: int, count: int) -> Bed:
        return bench.make(vocab, count).enter(*(bench.setup(slot, slot + count) for slot in range(count)))

    def draw(bed: Bed, vocab: int, count: int, step: int) -> list[int]:
        torch.manual_seed(step)
        return bed.step(make_logits(count, vocab, step), range(count), [PROMPT + step] * count).tolist()

    sizes = ((VOCAB, 4), (640, 9))
    alone = []
    for size in sizes:
        bed = make(*size)
        alone.append([draw(bed, *size, step) for step in range(8)])
    beds = [make(*size) for size in sizes]
    for step in range(8):
        results = [draw(bed, *size, step) for bed, size in zip(beds, sizes, strict=True)]
        assert results == [each[step] for each in alone], "of two samplers one changed the tokens of the other"


def check_tokens_stay(bench: Bench) -> None:
    """A step's tokens are copied to the host while the next step runs."""
    bed = bench.make().enter(*(bench.setup(slot, slot) for slot in range(SLOTS)))
    results = bed.sample(make_logits(SLOTS, seed=30), range(SLOTS), [PROMPT] * SLOTS).token_ids
    before = results.clone()
    bed.sample(make_logits(SLOTS, seed=31), range(SLOTS), [PROMPT + 1] * SLOTS)
    assert torch.equal(results, before), "the next step wrote to the tokens of the step before"


def check_draws_of_graphs(bench: Bench) -> None:
    """What a decode graph calls: the tokens are written to the table of last tokens, padding rows
    share the last slot, and the logits, which a later draw reads, stay."""
    bed = bench.make().enter(*(bench.setup(slot, slot, temperature=0.0) for slot in range(SLOTS)))
    table = torch.full((SLOTS + 1,), -7, device=bed.device)
    slots = torch.tensor([4, 2, SLOTS, SLOTS, SLOTS], device=bed.device)
    logits = make_logits(5, seed=32).to(bed.device)
    before, zeros = logits.clone(), torch.zeros(5, device=bed.device)
    draw = bed.operations.draw_plain
    token_ids, best = draw(logits, zeros, torch.zeros(5, dtype=torch.int64, device=bed.device), (table, slots))
    assert torch.equal(logits, before), "a draw changed the logits"
    require_tokens(token_ids, 5, VOCAB)
    assert table[[4, 2]].tolist() == logits.argmax(-1)[:2].tolist() == token_ids[:2].tolist(), "the table of last tokens has others"
    assert [place for place, token in enumerate(table.tolist()) if token == -7] == [*range(2), 3, *range(5, SLOTS)]
    assert torch.allclose(best.cpu(), before.amax(-1).cpu()), "the greatest logits are others"
    if bed.operations.draw_filtered is not None:
        keys = torch.arange(5, device=bed.device)
        params = {"temperature": zeros + 1, "key": keys, "top_k": torch.ones(5, dtype=torch.int32, device=bed.device)}
        params |= {"top_p": zeros + 1, "log_min_p": zeros - torch.inf}
        again, _ = bed.operations.draw_filtered(logits, params, (token_ids, best), (table, slots))
        assert torch.equal(logits, before), "a draw with filters changed the logits"
        assert "top_k" not in bench.can.params or torch.equal(again.cpu(), before.argmax(-1).cpu()), "top_k=1 is not the greatest logit"


def check_draft_rows(bench: Bench) -> None:
    """Verification: several positions of one request in one draw have the tokens of steps one
    after the other."""
    setups, width = [bench.setup(slot, slot) for slot in range(4)], 16
    slots, positions = [slot for slot in range(4) for _ in range(width)], [PROMPT + step for _ in range(4) for step in range(width)]
    logits = make_logits(4 * width, seed=33, spread=1.0)
    together = bench.make().enter(*setups).draw(logits, slots, positions).view(4, width)
    bed = bench.make().enter(*setups)
    for step in range(width):
        alone = bed.step(logits.view(4, width, -1)[:, step], range(4), [PROMPT + step] * 4)
        assert torch.equal(alone, together[:, step]), f"the token of a drafted position {step} places on is another one in a step"


def check_row_work_is_done_in_batches(bench: Bench) -> None:
    """As many calls of torch for 64 rows as for 4, none of which waits for the device, and the same
    for what is told of slots."""
    counts = []
    for rows in (4, 64):
        bed = bench.make(VOCAB, 64, _PLAIN).enter(*(bench.setup(slot, slot) for slot in range(64)))
        assert bed.rows is not None
        logits, slots = make_logits(rows), torch.arange(rows)
        params = {"temperature": torch.ones(rows), "key": torch.arange(rows), "top_k": torch.full((rows,), 5, dtype=torch.int32)}
        params |= {"top_p": torch.ones(rows), "log_min_p": torch.full((rows,), -9.0)}
        token_ids = bed.rows.draw_tokens(logits, params, slots)  # what a sampler prepares once
        with TorchCalls() as calls:
            bed.rows.draw_tokens(logits, params, slots)
            if isinstance(bed.rows, SupportsSlots):
                bed.rows.observe_tokens(slots, token_ids)
        assert not calls.waits, f"the sampler waits for the device by {', '.join(sorted(calls.waits))}"
        counts.append(calls.count)
    assert counts[1] <= counts[0], f"a draw calls torch {counts[0]} times for 4 rows and {counts[1]} times for 64"


def check_row_inputs_are_left_alone(bench: Bench) -> None:
    """Logits, parameters and slots are not changed, and not kept: the engine uses their memory
    again."""
    setups = [bench.setup(slot, slot) for slot in range(SLOTS)]
    clean, reused = bench.make().enter(*setups), bench.make().enter(*setups)
    assert clean.rows is not None and reused.rows is not None
    for step in range(5):
        params = {"temperature": torch.ones(SLOTS), "key": torch.arange(SLOTS) + 77 * step}
        inputs = {"logits": make_logits(SLOTS, seed=40 + step), **params, "slots": torch.arange(SLOTS)}
        kept, before = ({name: value.clone() for name, value in inputs.items()} for _ in range(2))
        names = ("temperature", "key")
        torch.manual_seed(step)
        expected = clean.rows.draw_tokens(inputs["logits"], {name: inputs[name] for name in names}, inputs["slots"])
        torch.manual_seed(step)
        results = reused.rows.draw_tokens(kept["logits"], {name: kept[name] for name in names}, kept["slots"])
        changed = [name for name, value in before.items() if not torch.equal(kept[name], value)]
        assert not changed, f"draw_tokens() changed {' and '.join(changed)}"
        assert torch.equal(expected, results), "the sampler keeps a tensor of an earlier step, which the engine has overwritten"
        clean.observe(range(SLOTS), expected)
        observed, slots = results.clone(), kept["slots"].clone()
        if isinstance(reused.rows, SupportsSlots):
            reused.rows.observe_tokens(slots, observed)
        for value in (*kept.values(), observed, slots):
            value.fill_(0)


# slots --------------------------------------------------------------------------------------------


def check_slot_of_a_new_request(bench: Bench) -> None:
    """The next request of a slot has nothing of the last one, whether it left or not; the others
    keep what they have."""
    used, fresh = bench.make(), bench.make()
    used.enter(*(bench.setup(slot, slot + 1) for slot in range(SLOTS)))
    for step in range(12):
        used.step(make_logits(SLOTS, seed=50 + step), range(SLOTS), [PROMPT + step] * SLOTS)
    used.enter(released=list(range(0, SLOTS, 2)))
    setups = [bench.setup(slot, slot, seed=7 + slot) for slot in range(SLOTS)]
    used.enter(*setups)
    fresh.enter(*setups)
    for step in range(12):
        _require_equal_steps(used, fresh, step, range(SLOTS), "an earlier request of a slot left something behind")


def check_slot_of_a_neighbour(bench: Bench) -> None:
    """Requests have the tokens that they have alone, while others come and go beside
    them, and rows of padding."""
    mine = (4, 5, 8)
    alone, crowd = (bench.make().enter(*(bench.setup(slot, slot) for slot in mine)) for _ in range(2))
    for step in range(30):
        others = [bench.setup(slot, step + slot) for slot in range(SLOTS) if slot not in mine and (slot + step) % 4]
        crowd.enter(*others, released=[slot for slot in range(SLOTS) if slot not in mine and (slot + step) % 5 == 0])
        if others:
            slots = [setup.slot for setup in others]
            crowd.step(make_logits(len(slots), seed=step, spread=9.0), slots, [PROMPT] * len(slots))
        padding = torch.tensor([SLOTS, SLOTS], device=crowd.device)
        table, zeros = torch.zeros(SLOTS + 1, dtype=torch.int64, device=crowd.device), torch.zeros(2, device=crowd.device)
        crowd.operations.draw_plain(make_logits(2, seed=step).to(crowd.device), zeros, zeros.long(), (table, padding))
        _require_equal_steps(crowd, alone, step, mine, "a request has other tokens beside others")


def check_slot_may_be_any(bench: Bench) -> None:
    """A request has the same tokens in any slot."""
    beds = [bench.make().enter(*(bench.setup((slot + shift) % SLOTS, slot, seed=slot) for slot in range(3))) for shift in (0, 7, 14)]
    for step in range(30):
        logits, results = make_logits(3, seed=500 + step, spread=1.0), []
        for bed, shift in zip(beds, (0, 7, 14), strict=True):
            torch.manual_seed(step)
            results.append(bed.step(logits, [(slot + shift) % SLOTS for slot in range(3)], [PROMPT + step] * 3).tolist())
        assert results[0] == results[1] == results[2], f"after {step} tokens requests in other slots draw others: {results}"


def check_slot_is_told_once(bench: Bench) -> None:
    """What draws depend on moves with `observe_tokens`, not with draws, which are repeated."""
    setups = [bench.setup(slot, slot) for slot in range(SLOTS)]
    once, often = bench.make().enter(*setups), bench.make().enter(*setups)
    for step in range(10):
        positions = [PROMPT + step] * SLOTS
        for seed in (300, 400):
            often.draw(make_logits(SLOTS, seed=seed + step, spread=1.0 + seed / 100), range(SLOTS), positions)
        _require_equal_steps(often, once, step, range(SLOTS), "a draw that did not count changed a later one")


def check_slot_without_tokens(bench: Bench) -> None:
    """Steps of no rows, slots that leave twice, and slots that were never used."""
    bed = bench.make()
    bed.enter(released=[0, 3, SLOTS - 1])
    bed.enter(bench.setup(3))
    bed.enter(released=[3, 3])
    bed.observe([], torch.empty(0, dtype=torch.int64))
    bed.enter(bench.setup(3, temperature=0.0)).step(make_logits(1), [3], [PROMPT])


def _require_equal_steps(one: Bed, other: Bed, step: int, slots: Sequence[int], sentence: str) -> None:
    """Both draw the same tokens of the same logits, from the same generator if they use one."""
    logits, results = make_logits(len(slots), seed=200 + step, spread=1.0), []
    for bed in (one, other):
        torch.manual_seed(step)
        results.append(bed.step(logits, slots, [PROMPT + step] * len(slots)))
    assert torch.equal(*results), sentence


def check_custom_parameters(bench: Bench) -> None:
    """The examples are taken, and have an effect; wrong values are refused with ValueError and one
    sentence that names the key, or do not fail later."""
    checks = bench.make().processors.check_params
    for params, name in product(bench.examples, bench.can.custom):
        refused = checks(params)
        assert refused is None, f"validate_params() refuses {params.custom}: {refused and refused.error}"
        for value in BAD_VALUES:
            bad = bench.setup(0, temperature=1.0, custom={**params.custom, name: value})
            finish = checks(bad.params)
            if finish is None:
                bench.make().enter(bad).step(make_logits(1), [0], [PROMPT])
                continue
            what = f"custom[{name!r}] = {value[:20]!r}"
            assert finish.code == "invalid_request", f"validate_params() does not raise ValueError for {what}: {finish.error}"
            assert name in (finish.error or ""), f"the error for {what} does not name the key: {finish.error}"
    logits = make_logits(1, seed=9).expand(SLOTS, -1)
    counts = []
    for params in (SamplingParams(), *bench.examples):
        bed = bench.make().enter(*(bench.setup(slot, 0, seed=slot, custom=params.custom) for slot in range(SLOTS)))
        torch.manual_seed(0)
        counts.append([bed.step(logits, range(SLOTS), [PROMPT + step] * SLOTS).tolist() for step in range(8)])
    assert any(each != counts[0] for each in counts[1:]), "no example of `conformance_params` changes a token"


# the process --------------------------------------------------------------------------------------


def check_process_and_memory(bench: Bench) -> None:
    """Hundreds of steps and requests leave the process alone, and no memory behind."""
    sizes, bed = [], bench.make()
    with unchanged_process("the sampler changed"):
        for step in range(NUM_STEPS):
            slots = [(step + place) % SLOTS for place in range(3)]
            bed.enter(*(bench.setup(slot, step, seed=step) for slot in slots), released=slots)
            bed.step(make_logits(3, seed=step), slots, [PROMPT + step] * 3)
            if step % (NUM_STEPS // 2) == NUM_STEPS // 2 - 1:
                sizes.append(count_elements(bed.plugin))
    assert sizes[1] <= sizes[0] + 20, f"it holds {sizes[0]} objects after {NUM_STEPS // 2} steps, and {sizes[1]} after {NUM_STEPS}"


def check_gpu_graphs(bench: Bench) -> None:
    """The draws are captured in a graph, and a replay draws from the values of its time."""
    bed, device = bench.make().enter(*(bench.setup(slot, slot) for slot in range(4))), bench.device
    slots, table = torch.arange(4, device=device), torch.zeros(SLOTS + 1, dtype=torch.int64, device=device)
    logits, temperature, keys = make_logits(4).to(device), torch.zeros(4, device=device), torch.arange(4, device=device)
    graph = capture_graph(open_platform(device), lambda: bed.operations.draw_plain(logits, temperature, keys, (table, slots)))
    logits.copy_(make_logits(4, seed=60))
    graph.replay()
    assert torch.equal(table[:4], logits.argmax(-1)), "a replay of a graph draws from the logits of its capture"


def _draw_greatest(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, last_tokens: Any = None) -> Any:
    return logits.argmax(dim=-1), logits.amax(dim=-1).float()


# Device operations that make the same calls of torch for any number of rows.
_PLAIN = DeviceOperations(draw_plain=_draw_greatest, mask_logits=TORCH.mask_logits, compute_logprobs=TORCH.compute_logprobs)
