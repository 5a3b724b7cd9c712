"""Times one layer of experts with quantized weights beside bfloat16 ones: every kernel, over
numbers of tokens, in the sizes of Qwen3-30B-A3B, gpt-oss-20b and DeepSeek-V3.

Each variant is first compared with float64. A time is that of one layer's experts in a CUDA graph
of many, over routings that together read more weights than the L2 cache holds. `sorted` is the
path of kernels without `mix`: rows sorted by expert and an activation of their own.

    python benchmarks/quantized_experts.py --models qwen3-30b-a3b --json experts.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_clock import seconds
from quantized_gemm import load_kernel
from torch import nn

from frame.core.interfaces.moe import DispatchOutput
from frame.core.interfaces.weight_format import CanonicalWeight, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.kernels.moe.align import align_tokens
from frame.kernels.moe.grouped_gemm import Activation, Pairs
from frame.kernels.moe.quantized_experts import ExpertPlan, choose_expert_plan, multiply_pairs
from frame.models.layers.weights.expert_activation import ClampedSwiGLU, activate
from frame.models.layers.weights.expert_weights import ExpertWeights
from frame.plugins.loader import load_registry

MODELS = {  # experts, k, hidden, inner, biases and the clamped activation
    "qwen3-30b-a3b": (128, 8, 2048, 768, False),
    "gpt-oss-20b": (32, 4, 2880, 2880, True),
    "deepseek-v3": (256, 8, 7168, 2048, False),
}
FORMS = {"int4": WeightScheme("int4", (1, 128)), "mxfp4": WeightScheme("e2m1", (1, 32)), "fp8": WeightScheme("e4m3", (128, 128))}
VARIANTS = ("bf16", "fp8", "int4 weight_only", "mxfp4 weight_only", "int4 sorted", "int4 humming", "mxfp4 humming")
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
ROUTINGS = 8
ALLOWED = {"fp8": 0.08}  # error relative to the largest value; 0.03 for others
Run = Callable[[DispatchOutput, nn.Module], torch.Tensor]


def make_weight(form: str, experts: int, outputs: int, inputs: int) -> CanonicalWeight:
    """Random quantized values with scales that keep products of normal numbers normal."""
    quantized = torch.randint(0, 256, (experts, outputs, -(-inputs // 32) * 16), dtype=torch.uint8, device="cuda")
    if form not in FORMS:
        dense = torch.empty(experts, outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_(std=inputs**-0.5)
        return CanonicalWeight(WeightScheme("plain"), inputs, dense)
    scheme = FORMS[form]
    rows, columns = scheme.group
    if form == "fp8":
        dense = torch.empty(experts, outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_()
        scales = torch.rand(experts, outputs // rows, inputs // columns, device="cuda").add_(0.5).mul_(inputs**-0.5)
        return CanonicalWeight(scheme, inputs, dense.to(torch.float8_e4m3fn), scales)
    scales = torch.rand(experts, outputs, -(-inputs // columns), device="cuda").add_(0.5).mul_(inputs**-0.5 / 3)
    return CanonicalWeight(scheme, inputs, quantized, (2 ** scales.log2().round() if form == "mxfp4" else scales).bfloat16())


class Sorted:
    """A grouped product without `mix`."""

    def __init__(self, product: Any) -> None:
        self.product = product

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self.product(x, ends)  # type: ignore[no-any-return]


def make_run(variant: str, weights: dict[str, CanonicalWeight], layer: nn.Module) -> Run:
    """The experts of a variant, as MoE layers call them."""
    kernel = variant.partition(" ")[2]
    if not kernel:
        registry = load_registry(installed=False)
        runner = registry.load(registry.get("moe_runner", "triton"))(build_context("cuda", torch.bfloat16, 16), None)
        for name, weight in weights.items():
            setattr(layer, name, weight.quantized)
            setattr(layer, f"{name}_fp8_scale", weight.scales)
        return runner.run  # type: ignore[no-any-return]
    made = load_kernel("weight_only" if kernel == "sorted" else kernel)
    for weight in weights.values():
        if (obstacle := made.find_obstacle(weight)) is not None:
            raise ValueError(obstacle)
    products: dict[str, Any] = {name: made.prepare_experts(weight) for name, weight in weights.items()}
    if kernel == "sorted":
        products = {name: Sorted(product) for name, product in products.items()}
    stored = {"down": SimpleNamespace(experts=len(weights["down"].quantized))}
    holder: Any = SimpleNamespace(grouped=products, module=layer, stored=stored)
    return lambda tokens, _: ExpertWeights.run(holder, tokens)


def compute_reference(tokens: DispatchOutput, weights: dict[str, CanonicalWeight], layer: nn.Module) -> torch.Tensor:
    """The experts in float64, one pair after another."""
    out = torch.zeros_like(tokens.x, dtype=torch.float64)
    for (token, place), expert in zip(torch.cartesian_prod(*map(torch.arange, tokens.ids.shape)), tokens.ids.flatten(), strict=True):
        first, second = (weights[name].expert(int(expert)).dequantize(torch.float32).double() for name in ("gate_up", "down"))
        active = activate(layer, (first @ tokens.x[token].double())[None], expert[None])[0]
        found = second @ active + (layer.down_bias[expert].double() if hasattr(layer, "down_bias") else 0)
        out[token] += tokens.weights[token, place] * found
    return out


@torch.inference_mode()
def measure(model: str, variant: str, counts: list[int], until: float) -> dict[str, Any]:
    experts, top, hidden, inner, biased = MODELS[model]
    form = variant.partition(" ")[0]
    weights = {"gate_up": make_weight(form, experts, 2 * inner, hidden), "down": make_weight(form, experts, hidden, inner)}
    layer: Any = nn.Module()
    layer.activation = ClampedSwiGLU(1.702, 7.0) if biased else None
    if biased:
        layer.gate_up_bias = torch.randn(experts, 2 * inner, device="cuda", dtype=torch.bfloat16)
        layer.down_bias = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16)

    def draw(count: int) -> DispatchOutput:
        x = torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)
        return DispatchOutput(x, torch.rand(count, experts, device="cuda").topk(top).indices, torch.rand(count, top, device="cuda"))

    began = time.perf_counter()
    try:
        run = make_run(variant, weights, layer)
        few = draw(3)
        want = compute_reference(few, weights, layer)
        error = float((run(few, layer).double() - want).abs().max() / want.abs().max())
        found: dict[str, Any] = {"error": round(error, 5), "correct": error <= ALLOWED.get(form, 0.03), "us": {}}
        for count in counts:
            if time.monotonic() > until:
                break
            batches = [draw(count) for _ in range(ROUTINGS if count <= 512 else 2)]
            run(batches[0], layer)
            taken = seconds(lambda number, b=batches: run(b[number], layer), len(batches), ROUTINGS if count <= 512 else 2)
            found["us"][count] = round(taken * 1e6, 1)
    except Exception as error:  # noqa: BLE001 - one variant that fails must not end the others
        found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    found["seconds"] = round(time.perf_counter() - began, 1)
    print(f"{model:15}{variant:19}{json.dumps(found)}", flush=True)
    return found


@torch.inference_mode()
def tune(model: str, form: str, count: int, until: float) -> dict[str, Any]:
    """Microseconds of each launch of `weight_only`, and of its products with other tile sizes."""
    experts, top, hidden, inner, _ = MODELS[model]
    weights = make_weight(form, experts, 2 * inner, hidden), make_weight(form, experts, hidden, inner)
    x = torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)
    drawn = [torch.rand(count, experts, device="cuda").topk(top).indices for _ in range(ROUTINGS)]
    routed = [Pairs(ids, torch.rand(count, top, device="cuda")) for ids in drawn]
    found: dict[str, Any] = {}
    for number, (weight, activation) in enumerate(zip(weights, (Activation(), None), strict=True)):
        usual = choose_expert_plan(routed[0].count, weight, number == 0)
        rows = x if number == 0 else torch.randn(count * top, inner, device="cuda", dtype=torch.bfloat16)
        blocks = (16,) if usual.rows == 16 else (usual.rows // 2, usual.rows)
        sizes = itertools.product(blocks, (32, 64, 128), (64, 128, 256), (3, 5), (4, 8))
        others = [ExpertPlan(*each) for each in sizes if each[4] == 4 or each[1] == 128]
        best = dict[str, float]()
        for plan in [usual, *others]:
            if time.monotonic() > until:
                break
            orders = [align_tokens(pairs.ids, experts, plan.rows) for pairs in routed]

            def launch(index: int, plan: ExpertPlan = plan, orders: Any = orders) -> object:
                return multiply_pairs(rows, weight, None, routed[index], orders[index], plan, activation)  # noqa: B023

            try:
                best[str(plan)] = round(seconds(launch, ROUTINGS, ROUTINGS) * 1e6, 1)
            except Exception as error:  # noqa: BLE001 - tiles that do not fit the device
                print(f"{plan}: {type(error).__name__}", flush=True)
        name = ("gate_up", "down")[number]
        found[name] = {"usual": best.get(str(usual)), "best": dict(sorted(best.items(), key=lambda pair: pair[1])[:6])}
    found["align"] = round(seconds(lambda index: align_tokens(routed[index].ids, experts, 16), ROUTINGS, ROUTINGS) * 1e6, 1)
    print(f"{model} {form} {count} tokens: {json.dumps(found, indent=1)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--seconds", type=float, default=85, help="start nothing after so many")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", action="store_true", help="search tile sizes of weight_only, for the forms of the variants")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    until, report = time.monotonic() + arguments.seconds, dict[str, dict[str, Any]]()
    for model in arguments.models.split(","):
        report[model] = {}
        if arguments.tune:
            counts = [int(count) for count in arguments.tokens.split(",")]
            for number, count in enumerate(counts):
                share = time.monotonic() + (until - time.monotonic()) / (len(counts) - number)
                report[model][str(count)] = tune(model, arguments.variants.partition(" ")[0], count, share)
            arguments.variants = ""
        for variant in arguments.variants.split(","):
            if variant and time.monotonic() < until and not (variant == "fp8" and MODELS[model][2] % 128):
                report[model][variant] = measure(model, variant, [int(count) for count in arguments.tokens.split(",")], until)
            if arguments.json:
                arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "models": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
