"""What every MoE runner must satisfy, checked expert by expert in float64.

Weights lie in memory both ways that methods create them. Ids and weights are drawn, with experts
that no token chose, experts that all chose, and weights of zero. Must not know routing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from frame.core.interfaces.moe import DispatchOutput, MoERunner, SupportsPairMatmul
from frame.entrypoints.tools.bench.paged_batches import DTYPES, build_context
from frame.models.layers.weights.expert_weights import pack_small_experts
from frame.testing.conformance import Check, Subject, collect
from frame.testing.generators import call_at_one_address, require_bounded, require_kept, require_near_reference
from frame.testing.moe.experts import TOLERANCE, activate_by_halves, draw, reference, supports
from frame.testing.tensors import require_form, require_near, unchanged
from frame.testing.torch_calls import TorchCalls, unchanged_torch

SIZES = (  # tokens, experts, k, hidden, inner
    (1, 4, 1, 32, 16),
    (7, 8, 2, 64, 32),
    (33, 16, 4, 48, 24),
    (200, 8, 3, 64, 40),
    (5, 1, 1, 32, 16),  # one expert
    (6, 3, 3, 40, 24),  # every token chooses all
    (40, 96, 6, 32, 16),  # more experts than tokens
    (1100, 5, 2, 32, 16),
    (9, 24, 12, 32, 16),  # more than eight choices
    (7, 260, 6, 16, 8),  # more than 256 experts
    (5001, 4, 2, 16, 8),
)
LARGE = ((1, 64, 8, 512, 256), (300, 64, 8, 512, 256), (2048, 32, 4, 256, 128))
FP8_SIZES = (7, 4, 2, 256, 128)
FP8_FACTOR = 64.0  # what the values of a random weight are multiplied by before they are rounded
FP8_TOLERANCE = 0.1  # a runner may quantize the tokens, too
LayerInputs = tuple[torch.Tensor, ...]  # x, ids, weights, gate_up, down


@dataclass(frozen=True)
class Sizes:
    """One layer and one batch."""

    numbers: tuple[int, int, int, int, int]
    dtype: torch.dtype
    device: str


class PlainExperts(nn.Module):
    """`gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner]; with
    `hidden_first`, `down` lies hidden first."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, hidden_first: bool) -> None:
        super().__init__()
        if hidden_first:
            down = down.transpose(0, 1).contiguous().transpose(0, 1)
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        self.activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


def suite(subject: Subject) -> Iterator[Check]:
    """The checks of MoE runners, in every dtype of the capabilities."""
    setting = subject.setting
    for name, dtype in DTYPES.items():
        if not supports(subject, name):
            continue
        for numbers in (*SIZES, *(LARGE if setting.thorough else ())):
            sizes = Sizes(numbers, dtype, setting.device)
            label = "x".join(map(str, numbers))
            yield Check(f"agrees_with_float64-{label}-{name}", partial(_agrees, subject, sizes))
        sizes = Sizes(SIZES[1], dtype, setting.device)
        yield from collect(__name__, subject, sizes, suffix=f"-{name}")
        if getattr(subject.record.capabilities, "biased", False):
            yield Check(f"biases_and_activation-{name}", partial(_biased, subject, sizes))
        if getattr(subject.record.capabilities, "batch_invariant", False):
            yield Check(f"batch_invariant-{name}", partial(_invariant, subject, dtype))
        if getattr(subject.record.capabilities, "graphs", False):
            yield Check(f"can_be_captured-{name}", partial(_can_be_captured, subject, sizes))
        if dtype != torch.float16:  # whose largest number these values exceed
            yield Check(f"large_values-{name}", partial(_large_values, subject, sizes))
            yield Check(f"small_weights-{name}", partial(_small_weights, subject, sizes))
        if dtype == torch.bfloat16:
            for form in getattr(subject.target, "takes_fp8", ()):
                yield Check(f"experts_of_e4m3-{form}", partial(_fp8_experts, subject, sizes, form))


def _make(subject: Subject, sizes: Sizes) -> MoERunner:
    runner: MoERunner = subject.target(build_context(sizes.device, sizes.dtype, 16), subject.options)
    return runner


def _invariant(subject: Subject, dtype: torch.dtype) -> None:
    """Tokens have the bits that they have among any others, in any place."""
    device = subject.setting.device
    runner: MoERunner = subject.target(build_context(device, dtype, 16, deterministic=True), subject.options)
    for numbers in SIZES[3], SIZES[6], SIZES[7]:
        x, ids, weights, gate_up, down = (part.to(device) for part in draw(numbers, dtype))
        experts = PlainExperts(gate_up, down, hidden_first=False)
        whole = runner.run(DispatchOutput(x, ids, weights), experts)
        require_near(whole.double().cpu(), reference(x, ids, weights, gate_up, down).cpu(), f"{numbers}, {dtype}", TOLERANCE[dtype])
        for first, count in ((0, 1), (17, 1), (4, 2), (3, 7), (5, 33)):
            some = slice(first, first + count)
            alone = runner.run(DispatchOutput(x[some], ids[some], weights[some]), experts)
            assert torch.equal(alone, whole[some]), f"{count} tokens have other bits than among {len(x)} ({numbers}, {dtype})"


def _run(
    runner: MoERunner, sizes: Sizes, inputs: LayerInputs, experts: PlainExperts | None = None, poison: slice = slice(0)
) -> torch.Tensor:
    """The runner's result in float64 on the host; tokens of `poison` become NaN."""
    x, ids, weights, gate_up, down = (part.to(sizes.device) for part in inputs)
    x = x.clone()
    x[poison] = torch.nan
    experts = experts or PlainExperts(gate_up, down, hidden_first=False)
    read_only = {"x": x, "ids": ids, "weights": weights, "gate_up": experts.gate_up, "down": experts.down}
    with unchanged(read_only, "the runner"):
        out = runner.run(DispatchOutput(x, ids, weights), experts)
    require_form(out, x, str(sizes), sizes.dtype)
    return out.double().cpu()


def _close(got: torch.Tensor, expected: torch.Tensor, sizes: Sizes) -> None:
    require_near(got, expected, str(sizes), TOLERANCE[sizes.dtype])


def _agrees(subject: Subject, sizes: Sizes) -> None:
    inputs = draw(sizes.numbers, sizes.dtype)
    expected = reference(*inputs)
    for hidden_first, is_packed in ((False, False), (True, False), (False, True)):
        experts: Any = PlainExperts(inputs[3].to(sizes.device), inputs[4].to(sizes.device), hidden_first)
        if is_packed and sizes.device == "cpu":  # layers of small experts have these forms, too
            pack_small_experts(experts, experts.gate_up, experts.down)
        _close(_run(_make(subject, sizes), sizes, inputs, experts), expected, sizes)


def check_weight_of_zero_adds_nothing(subject: Subject, sizes: Sizes) -> None:
    inputs = draw(sizes.numbers, sizes.dtype)
    inputs[2][::2, 0] = 0  # as for experts of another rank
    _close(_run(_make(subject, sizes), sizes, inputs), reference(*inputs), sizes)


def check_one_expert_for_all(subject: Subject, sizes: Sizes) -> None:
    x, ids, *rest = draw(sizes.numbers, sizes.dtype)
    ids = torch.full_like(ids, sizes.numbers[1] - 1)
    _close(_run(_make(subject, sizes), sizes, (x, ids, *rest)), reference(x, ids, *rest), sizes)


def check_a_token_stands_alone(subject: Subject, sizes: Sizes) -> None:
    inputs = draw(sizes.numbers, sizes.dtype)
    got = _run(_make(subject, sizes), sizes, inputs, poison=slice(1, None))
    _close(got[:1], reference(*inputs)[:1], sizes)


def check_parts_add_up(subject: Subject, sizes: Sizes) -> None:
    inputs = draw(sizes.numbers, sizes.dtype)
    x, ids, weights, gate_up, down = (part.to(sizes.device) for part in inputs)
    out = _make(subject, sizes).run_parts(DispatchOutput(x, ids, weights), PlainExperts(gate_up, down, hidden_first=False))
    assert out.dim() in (2, 3), f"`run_parts` returns {list(out.shape)}, neither [tokens, hidden] nor [tokens, parts, hidden]"
    _close((out.double().sum(1) if out.dim() == 3 else out.double()).cpu(), reference(*inputs), sizes)


def check_weights_replaced_in_place(subject: Subject, sizes: Sizes) -> None:
    """An update writes new weights to the memory of the old ones."""
    runner, first, second = _make(subject, sizes), draw(sizes.numbers, sizes.dtype), draw(sizes.numbers, sizes.dtype, seed=3)
    experts = PlainExperts(first[3].to(sizes.device), first[4].to(sizes.device), hidden_first=False)
    _run(runner, sizes, first, experts)
    experts.gate_up.copy_(second[3])
    experts.down.copy_(second[4])
    _close(_run(runner, sizes, first, experts), reference(*first[:3], *second[3:]), sizes)


def check_results_are_kept(subject: Subject, sizes: Sizes) -> None:
    """Tokens at one address have each their result, which the next step does not change."""
    runner, (x, ids, weights, gate_up, down) = _make(subject, sizes), (part.to(sizes.device) for part in draw(sizes.numbers, sizes.dtype))
    experts = PlainExperts(gate_up, down, hidden_first=False)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        return runner.run(DispatchOutput(tokens, ids, weights), experts)

    inputs = [x, x.flip(0), -x]
    for one, result in zip(inputs, call_at_one_address(run, inputs), strict=True):
        _close(result.double().cpu(), reference(one.cpu(), ids.cpu(), weights.cpu(), gate_up.cpu(), down.cpu()), sizes)
    require_kept(run, x, x.flip(0), "run")


def check_inputs_that_are_not_contiguous(subject: Subject, sizes: Sizes) -> None:
    """Tokens, ids and weights are parts of wider tensors."""
    inputs = draw(sizes.numbers, sizes.dtype)
    wide = [torch.cat((part, part.flip(0)), 1).to(sizes.device)[:, : part.shape[1]] for part in inputs[:3]]
    experts = PlainExperts(inputs[3].to(sizes.device), inputs[4].to(sizes.device), hidden_first=False)
    out = _make(subject, sizes).run(DispatchOutput(*wide), experts)
    _close(out.double().cpu(), reference(*inputs), sizes)


def check_steps_leave_nothing(subject: Subject, sizes: Sizes) -> None:
    """Steps of one size leave no tensor behind."""
    runner, inputs = _make(subject, sizes), tuple(part.to(sizes.device) for part in draw(sizes.numbers, sizes.dtype))
    experts = PlainExperts(inputs[3], inputs[4], hidden_first=False)
    require_bounded(runner, lambda number: runner.run(DispatchOutput(*inputs[:3]), experts), 40, "steps of one size", slack=5)


def check_process_is_left_as_it_is(subject: Subject, sizes: Sizes) -> None:
    with unchanged_torch("the runner changes"):
        _run(_make(subject, sizes), sizes, draw(sizes.numbers, sizes.dtype))


def check_no_tokens(subject: Subject, sizes: Sizes) -> None:
    x, ids, weights, gate_up, down = draw(sizes.numbers, sizes.dtype)
    assert _run(_make(subject, sizes), sizes, (x[:0], ids[:0], weights[:0], gate_up, down)).shape == (0, x.shape[1])


def check_a_step_is_fast(subject: Subject, sizes: Sizes) -> None:
    """Seven tokens take at most a few times as long as the definition in float64."""
    runner, inputs = _make(subject, sizes), tuple(part.to(sizes.device) for part in draw(sizes.numbers, sizes.dtype))
    tokens, experts = DispatchOutput(*inputs[:3]), PlainExperts(inputs[3], inputs[4], hidden_first=False)
    require_near_reference(lambda: runner.run(tokens, experts), lambda: reference(*inputs), f"{sizes.numbers[0]} tokens", 2.5, 1e-3)


def check_products_of_pairs(subject: Subject, sizes: Sizes) -> None:
    runner = _make(subject, sizes)
    if not isinstance(runner, SupportsPairMatmul):
        return
    inputs = draw(sizes.numbers, sizes.dtype)
    x, ids, _, gate_up, down = (part.to(sizes.device) for part in inputs)
    module = PlainExperts(gate_up, down, hidden_first=False)
    module.gate_up_bias = nn.Parameter(torch.ones(gate_up.shape[:2]).to(gate_up), requires_grad=False)  # the caller adds it
    for name, chosen in (("gate_up", ids), ("down", ids[:, :1])):
        weights: torch.Tensor = getattr(module, name)
        rows = x if name == "gate_up" else x[:, : weights.shape[2]].contiguous()
        expected = torch.einsum("ti,tkoi->tko", rows.double().cpu(), weights.double().cpu()[chosen.cpu()]).flatten(0, 1)
        _close(runner.multiply_pairs(rows, chosen, module, name).double().cpu(), expected, sizes)  # type: ignore[arg-type]


def _biased(subject: Subject, sizes: Sizes) -> None:
    inputs = draw(sizes.numbers, sizes.dtype)
    _, experts, _, hidden, inner = sizes.numbers
    generator = torch.Generator().manual_seed(5)
    biases = tuple(torch.randn(experts, size, generator=generator).to(sizes.dtype) for size in (2 * inner, hidden))
    module = PlainExperts(inputs[3].to(sizes.device), inputs[4].to(sizes.device), hidden_first=False)
    module.gate_up_bias, module.down_bias = (nn.Parameter(bias.to(sizes.device), requires_grad=False) for bias in biases)
    module.activation = activate_by_halves
    _close(_run(_make(subject, sizes), sizes, inputs, module), reference(*inputs, biases=(biases[0], biases[1])), sizes)


def check_steps_of_two_layers(subject: Subject, sizes: Sizes) -> None:
    """Steps of changing tokens and sizes through two layers, by one runner."""
    _, experts, k, hidden, inner = sizes.numbers
    runner = _make(subject, sizes)
    layers = [draw((1, experts, k, hidden, inner), sizes.dtype, seed)[3:] for seed in (1, 2)]
    modules = [PlainExperts(gate_up.to(sizes.device), down.to(sizes.device), hidden_first=False) for gate_up, down in layers]
    for step, tokens in enumerate((9, 9, 1, 70, 9)):
        for layer, module in enumerate(modules):
            inputs = (*draw((tokens, experts, k, hidden, inner), sizes.dtype, 10 * step + layer)[:3], *layers[layer])
            _close(_run(runner, sizes, inputs, module), reference(*inputs), sizes)


def check_more_than_256_experts(subject: Subject, sizes: Sizes) -> None:
    """Each of 300 experts is chosen, in a large batch and by three tokens alone."""
    runner, experts = _make(subject, sizes), 300
    x, ids, *rest = draw((experts, experts, 2, 16, 8), sizes.dtype)
    ids = torch.stack((torch.arange(experts), (torch.arange(experts) + 256) % experts), 1)
    module = PlainExperts(rest[1].to(sizes.device), rest[2].to(sizes.device), hidden_first=False)
    expected = reference(x, ids, *rest)
    for some in (slice(None), slice(-3, None)):
        _close(_run(runner, sizes, (x[some], ids[some], rest[0][some], *rest[1:]), module), expected[some], sizes)


def check_more_than_65536_pairs(subject: Subject, sizes: Sizes) -> None:
    """8,200 tokens with eight experts each, as in a long prefill."""
    inputs = draw((8200, 9, 8, 16, 8), sizes.dtype)
    _close(_run(_make(subject, sizes), sizes, inputs), reference(*inputs), sizes)


def _can_be_captured(subject: Subject, sizes: Sizes) -> None:
    """No call waits for values of the step."""
    runner, inputs = _make(subject, sizes), tuple(part.to(sizes.device) for part in draw(sizes.numbers, sizes.dtype))
    tokens, experts = DispatchOutput(*inputs[:3]), PlainExperts(inputs[3], inputs[4], hidden_first=False)
    runner.run(tokens, experts)
    with TorchCalls() as calls:
        runner.run(tokens, experts)
    assert not calls.waits, f"the record says `graphs`, and the runner waits for values in {', '.join(sorted(calls.waits))}"


def _small_weights(subject: Subject, sizes: Sizes) -> None:
    """A token may have small weights alone."""
    x, ids, weights, *experts = draw(sizes.numbers, sizes.dtype)
    weights = weights * 2.0**-20
    _close(_run(_make(subject, sizes), sizes, (x, ids, weights, *experts)), reference(x, ids, weights, *experts), sizes)


def _fp8_experts(subject: Subject, sizes: Sizes, form: str) -> None:
    """Weights of e4m3 with scales that differ by expert and output, or by block."""
    x, ids, weights, *experts = draw(FP8_SIZES, sizes.dtype)
    scaled, exact = [], []
    for seed, weight in enumerate(experts):
        quantized, size = (weight * FP8_FACTOR).to(torch.float8_e4m3fn), 128 if form == "block" else 1
        shape = (len(weight), weight.shape[1] // size, *((weight.shape[2] // size,) if form == "block" else ()))
        scales = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5) / FP8_FACTOR
        whole = scales.repeat_interleave(size, 1)
        exact.append(quantized.float() * (whole.repeat_interleave(size, 2) if form == "block" else whole[..., None]))
        scaled.append((quantized.to(sizes.device), scales.to(sizes.device)))
    module: Any = PlainExperts(scaled[0][0], scaled[1][0], hidden_first=False)
    module.gate_up_fp8_scale, module.down_fp8_scale = scaled[0][1], scaled[1][1]
    out = _make(subject, sizes).run(DispatchOutput(*(part.to(sizes.device) for part in (x, ids, weights))), module)
    require_near(out.double().cpu(), reference(x, ids, weights, *exact), f"experts of e4m3, with one scale per {form}", FP8_TOLERANCE)


def _large_values(subject: Subject, sizes: Sizes) -> None:
    """Products of gates and values above 65504, the maximum of float16."""
    inputs = draw(sizes.numbers, sizes.dtype, scale=300.0)
    _close(_run(_make(subject, sizes), sizes, inputs), reference(*inputs), sizes)
