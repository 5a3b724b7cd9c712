"""What every MoE dispatcher must satisfy, checked with one, two and three ranks against float64.

Ranks are threads. As in `frame.models.layers.moe`, each rank has all tokens, and a slice of every
expert or, of dispatchers for whole experts, those that it places there. Must not know a runner:
the experts are computed by their definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from frame.core.interfaces.moe import DispatcherCapabilities, DispatchOutput, ExpertPlacement, MoEDispatcher
from frame.core.interfaces.parallel import ParallelPlan
from frame.entrypoints.tools.bench.paged_batches import DTYPES, build_context
from frame.testing.conformance import Check, Subject, collect
from frame.testing.generators import require_bounded, require_fast
from frame.testing.moe.experts import TOLERANCE, draw, reference, split, supports
from frame.testing.ranks.thread_group import ThreadGroup, run_ranks
from frame.testing.tensors import require_form, require_near, unchanged
from frame.testing.torch_calls import unchanged_torch

SIZES = (
    (7, 8, 2, 32, 24),
    (1, 4, 1, 16, 12),
    (300, 6, 3, 16, 12),
    (9, 24, 12, 16, 12),
    (11, 288, 3, 8, 12),
)  # tokens, experts, k, hidden, inner
MAX_SHARE = 0.6  # of the pairs without weight, for one of six experts
MAX_SECONDS = 1.8e-3  # of a step on one rank
LayerInputs = tuple[torch.Tensor, ...]  # x, ids, weights, gate_up, down


@dataclass(frozen=True)
class Place:
    """Where a dispatcher is checked. `is_whole`: with whole experts on several ranks."""

    subject: Subject
    dtype: torch.dtype
    is_whole: bool = False

    def make(self, group: ThreadGroup, *, deterministic: bool = False) -> MoEDispatcher:
        plan = ParallelPlan(tp=group.size, ep=group.size if self.is_whole else 1)
        context = replace(build_context(self.subject.setting.device, self.dtype, 16, deterministic=deterministic), tp=group, plan=plan)
        dispatcher: MoEDispatcher = self.subject.target(context, self.subject.options)
        return dispatcher

    def draw(self, numbers: tuple[int, int, int, int, int], seed: int = 0, scale: float = 1.0) -> LayerInputs:
        if self.is_whole:  # 2 and 3 ranks hold as many experts each
            numbers = (numbers[0], -(-numbers[1] // 6) * 6, *numbers[2:])
        x, ids, weights, gate_up, down = draw(numbers, self.dtype, seed, scale)
        weights[1::3, 0] = 0  # tokens of which an expert counts for nothing
        return tuple(part.to(self.subject.setting.device) for part in (x, ids, weights, gate_up, down))


def suite(subject: Subject) -> Iterator[Check]:
    """The checks of MoE dispatchers, in every dtype of the capabilities."""
    capabilities = subject.record.capabilities
    sliced = not isinstance(capabilities, DispatcherCapabilities) or capabilities.sliced_experts
    whole = isinstance(capabilities, DispatcherCapabilities) and capabilities.whole_experts
    for name, dtype in DTYPES.items():
        if not supports(subject, name, num_ranks=1 if sliced else 2):
            continue
        place = Place(subject, dtype, is_whole=not sliced)
        for ranks in (1, 2, 3):
            yield Check(f"ranks-{ranks}-{name}", partial(_agrees, place, ranks))
        yield from collect(__name__, place, suffix=f"-{name}")
        if whole:
            others = replace(place, is_whole=True)
            for ranks in (2, 3) if sliced else ():
                yield Check(f"whole_experts-{ranks}-{name}", partial(_agrees, others, ranks))
            for check in (check_two_batches_at_once, check_steps_of_two_layers, check_large_values) if sliced else ():
                yield Check(f"whole_experts-{check.__name__.removeprefix('check_')}-{name}", partial(check, others))
            yield Check(f"work_is_spread-{name}", partial(_work_is_spread, others))
            yield Check(f"experts_are_anywhere-{name}", partial(_takes_placements, others))
        if getattr(capabilities, "batch_invariant", False):
            yield Check(f"batch_invariant-{name}", partial(_invariant, place))


def _invariant(place: Place) -> None:
    """A token has the bits that it has among any others. The group sums in the order of its
    ranks."""
    x, ids, weights, gate_up, down = place.draw(SIZES[2])

    def work(group: ThreadGroup) -> None:
        dispatcher = place.make(group, deterministic=True)

        def compute(some: slice) -> torch.Tensor:
            tokens = _dispatch(dispatcher, (x[some], ids[some], weights[some], gate_up, down))
            return dispatcher.combine(tokens.x * (tokens.weights[:, :1] + group.rank / 7).to(tokens.x.dtype), tokens)

        whole = compute(slice(None))
        for first, count in ((0, 1), (5, 3), (40, 100)):
            some = slice(first, first + count)
            assert torch.equal(compute(some), whole[some]), f"{count} tokens have other bits than among {len(x)}"

    run_ranks(3, work)


def _dispatch(dispatcher: MoEDispatcher, inputs: LayerInputs) -> DispatchOutput:
    x, ids, weights, gate_up, _ = inputs
    placement = dispatcher.place_experts(len(gate_up))
    with unchanged({"x": x, "ids": ids, "weights": weights}, "dispatch"):
        tokens = dispatcher.dispatch(x, ids, weights, placement)
    count, experts = tokens.x.shape[0], placement.per_rank
    assert tokens.x.dtype == x.dtype and tokens.x.shape[1:] == x.shape[1:], f"dispatched tokens are {tokens.x.dtype} {list(tokens.x.shape)}"
    form = f"dispatched ids are {tokens.ids.dtype} {list(tokens.ids.shape)}"
    assert tokens.ids.dtype == torch.int64 and tokens.ids.shape[0] == count, f"{form}, not one row for each of {count} tokens"
    assert tokens.weights.dtype == torch.float32, f"dispatched weights are {tokens.weights.dtype}, not torch.float32"
    assert tokens.weights.shape == tokens.ids.shape, "dispatched weights and ids have different shapes"
    assert bool(((tokens.ids >= 0) & (tokens.ids < experts)).all()), f"dispatched ids are not indices of the rank's {experts} experts"
    return tokens


def _run(dispatcher: MoEDispatcher, tokens: DispatchOutput, inputs: LayerInputs, group: ThreadGroup) -> torch.Tensor:
    """This rank's part of the experts' results."""
    placement = dispatcher.place_experts(len(inputs[3]))
    local = list(placement.find_local(group.rank))
    gate_up, down = inputs[3][local], inputs[4][local]
    if placement.ranks == 1:
        gate_up, down = split(gate_up, down, group.rank, group.size)
    return reference(tokens.x, tokens.ids, tokens.weights, gate_up, down).to(tokens.x.dtype)


def _combine(dispatcher: MoEDispatcher, out: torch.Tensor, tokens: DispatchOutput, inputs: LayerInputs) -> torch.Tensor:
    x, ids, weights, *_ = inputs
    with unchanged({"the layer's input": x, "ids": ids, "weights": weights}, "combine"):
        return dispatcher.combine(out, tokens)


def _compare(results: list[torch.Tensor], inputs: LayerInputs, what: str) -> None:
    expected = reference(*inputs)
    for rank, result in enumerate(results):
        require_form(result, expected, f"{what}, rank {rank}", inputs[0].dtype)
        require_near(result, expected, f"{what}, rank {rank}", TOLERANCE[result.dtype])


def _agrees(place: Place, ranks: int) -> None:
    for numbers in SIZES:
        inputs = place.draw(numbers)
        _compare(list(run_ranks(ranks, partial(_run_layer, place, inputs))), inputs, f"{ranks} ranks")


def _run_layer(place: Place, inputs: LayerInputs, group: ThreadGroup) -> torch.Tensor:
    """The rank's part of a layer with a new dispatcher."""
    dispatcher = place.make(group)
    tokens = _dispatch(dispatcher, inputs)
    return _combine(dispatcher, _run(dispatcher, tokens, inputs, group), tokens, inputs)


def check_real_sizes(place: Place) -> None:
    """No tokens, and 70,000, of which a few are compared. The experts' results stand for
    themselves: each token times its weights."""
    x, ids, weights, gate_up, down = place.draw((70_000, 6, 2, 16, 4))

    for tokens in (slice(0, 0), slice(0, 70_000)):
        inputs = x[tokens], ids[tokens], weights[tokens], gate_up, down

        def work(group: ThreadGroup, inputs: LayerInputs = inputs) -> torch.Tensor:
            dispatcher = place.make(group)
            dispatched = _dispatch(dispatcher, inputs)
            return _combine(dispatcher, (dispatched.x * dispatched.weights.sum(1, keepdim=True)).to(x.dtype), dispatched, inputs)

        results = run_ranks(2, work)
        assert all(result.shape == inputs[0].shape for result in results), f"combine returns {results[0].shape} for {inputs[0].shape}"
        if len(inputs[0]):
            total = inputs[2].sum(1, keepdim=True) * (1 if place.is_whole else 2)
            for row in (0, 4095, 4096, 65_535, 65_536, 69_999):
                expected = (inputs[0][row].double() * total[row].double())[None]
                for result in results:
                    require_near(result[row : row + 1], expected, f"token {row} of 70,000", TOLERANCE[x.dtype] * 2)


def check_exchange_is_fast(place: Place) -> None:
    """On one rank, a step of seven tokens takes little more than a copy."""
    x, ids, weights, gate_up, _ = place.draw(SIZES[0])

    def work(group: ThreadGroup) -> None:
        dispatcher = place.make(group)
        placement = dispatcher.place_experts(len(gate_up))

        def exchange() -> torch.Tensor:
            tokens = dispatcher.dispatch(x, ids, weights, placement)
            return dispatcher.combine(tokens.x, tokens)

        require_fast(exchange, MAX_SECONDS, "dispatch and combine of seven tokens on one rank")

    run_ranks(1, work)


def check_two_batches_at_once(place: Place) -> None:
    """Two batches, of one size and of two, are dispatched before the first is combined: what
    `combine` needs is in the `DispatchOutput`."""
    for numbers in (SIZES[0], (3, *SIZES[0][1:])):
        first, second = place.draw(SIZES[0], seed=1), place.draw(numbers, seed=2)

        def work(group: ThreadGroup, both: tuple[LayerInputs, LayerInputs] = (first, second)) -> list[torch.Tensor]:
            dispatcher = place.make(group)
            tokens = [_dispatch(dispatcher, inputs) for inputs in both]
            outs = [_run(dispatcher, each, inputs, group) for each, inputs in zip(tokens, both, strict=True)]
            return [_combine(dispatcher, out, each, inputs) for out, each, inputs in zip(outs, tokens, both, strict=True)]

        for index, results in enumerate(zip(*run_ranks(2, work), strict=True)):
            _compare(list(results), (first, second)[index], f"batch {index} of two at once")


def check_large_values(place: Place) -> None:
    """Inputs far from 0, which no one may clip."""
    inputs = place.draw(SIZES[0], scale=30.0)
    _compare(list(run_ranks(2, partial(_run_layer, place, inputs))), inputs, "large values")


def _work_is_spread(place: Place) -> None:
    """(token, expert) pairs that count for nothing on a rank are not all of one expert, which would
    take as long as they do."""
    inputs = place.draw((600, 12, 2, 16, 4))

    def work(group: ThreadGroup) -> torch.Tensor:
        dispatcher = place.make(group)
        tokens = _dispatch(dispatcher, inputs)
        return tokens.ids[tokens.weights == 0].bincount(minlength=dispatcher.place_experts(len(inputs[3])).per_rank)

    for rank, counts in enumerate(run_ranks(2, work)):
        maximum = int(counts.max())
        what = f"of {int(counts.sum())} pairs without weight, rank {rank} gives {maximum} to one expert"
        assert maximum <= max(64, MAX_SHARE * int(counts.sum())), what


def _takes_placements(place: Place) -> None:
    """Experts in another order, of which two are on two ranks: `ids` are physical experts."""
    x, ids, weights, gate_up, down = place.draw(SIZES[2])
    count = len(gate_up)
    placement = ExpertPlacement((*reversed(range(count)), 0, 1), ranks=2)
    physical = (count - 1 - ids).where((ids > 1) | (torch.arange(len(ids), device=ids.device)[:, None] % 2 == 0), count + ids)

    def work(group: ThreadGroup) -> torch.Tensor:
        dispatcher, local = place.make(group), list(placement.find_local(group.rank))
        tokens = dispatcher.dispatch(x, physical, weights, placement)
        out = reference(tokens.x, tokens.ids, tokens.weights, gate_up[local], down[local])
        return dispatcher.combine(out.to(x.dtype), tokens)

    _compare(list(run_ranks(2, work)), (x, ids, weights, gate_up, down), "experts in reversed order, two of them twice")


def check_steps_of_two_layers(place: Place) -> None:
    """Steps of different sizes through two layers, of six experts and of twelve."""
    steps = [[place.draw((tokens, 6 * seed, 2, 16, 12), seed) for seed in (1, 2)] for tokens in (9, 1, 40, 9)]

    def work(group: ThreadGroup) -> list[torch.Tensor]:
        dispatcher, results = place.make(group), []
        for inputs in (layer for step in steps for layer in step):
            tokens = _dispatch(dispatcher, inputs)
            results.append(_combine(dispatcher, _run(dispatcher, tokens, inputs, group), tokens, inputs).clone())
        return results

    for index, results in enumerate(zip(*run_ranks(2, work), strict=True)):
        _compare(list(results), steps[index // 2][index % 2], f"step {index // 2}, layer {index % 2}")


def check_a_token_stands_alone(place: Place) -> None:
    """The first token's result does not change when all others are NaN."""
    x, *rest = place.draw(SIZES[0])
    poisoned = x.clone()
    poisoned[1:] = torch.nan

    def work(group: ThreadGroup) -> torch.Tensor:
        dispatcher = place.make(group)
        tokens = _dispatch(dispatcher, (poisoned, *rest))
        return _combine(dispatcher, _run(dispatcher, tokens, (x, *rest), group), tokens, (poisoned, *rest))

    results = [result[:1] for result in run_ranks(2, work)]
    _compare(results, (x[:1], *(part[:1] for part in rest[:2]), *rest[2:]), "the first token while all others are NaN")


def check_a_rank_without_results(place: Place) -> None:
    """The results of the experts of one rank may all be 0."""
    inputs = place.draw(SIZES[0])

    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        dispatcher = place.make(group)
        tokens = _dispatch(dispatcher, inputs)
        out = _run(dispatcher, tokens, inputs, group)
        alone = _combine(dispatcher, out * (group.rank == 1), tokens, inputs)
        tokens = _dispatch(dispatcher, inputs)
        return alone, _combine(dispatcher, out * (group.rank == 0), tokens, inputs)

    (first, second), others = run_ranks(2, work)
    assert all(map(torch.equal, (first, second), others)), "where the results of one rank are 0, the ranks have different sums"
    _compare([first.double().add(second).to(first.dtype)], inputs, "ranks whose results are 0 in turn")


def check_steps_leave_nothing(place: Place) -> None:
    """Steps of one size leave no tensor behind."""
    inputs = place.draw(SIZES[0])

    def work(group: ThreadGroup) -> None:
        dispatcher = place.make(group)
        placement = dispatcher.place_experts(len(inputs[3]))

        def exchange(number: int) -> None:
            tokens = dispatcher.dispatch(inputs[0], inputs[1], inputs[2], placement)
            dispatcher.combine(tokens.x, tokens)

        require_bounded(dispatcher, exchange, 40, "steps of one size", slack=5)

    run_ranks(1, work)


def check_process_is_left_as_it_is(place: Place) -> None:
    inputs = place.draw(SIZES[0])

    def work(group: ThreadGroup) -> None:
        with unchanged_torch("the dispatcher changes"):
            _run_layer(place, inputs, group)

    run_ranks(1, work)


def check_takes_parts_on_one_rank(place: Place) -> None:
    """On one rank a layer may pass the summands of `run_parts`, [tokens, parts, hidden]."""
    inputs = place.draw(SIZES[0])

    def work(group: ThreadGroup) -> torch.Tensor:
        dispatcher = place.make(group)
        tokens = _dispatch(dispatcher, inputs)
        out = _run(dispatcher, tokens, inputs, group)
        return _combine(dispatcher, torch.stack((out / 4, out * 3 / 4), dim=1), tokens, inputs)

    (result,) = run_ranks(1, work)
    _compare([result.sum(1) if result.dim() == 3 else result], inputs, "summands on one rank")
