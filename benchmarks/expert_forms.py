"""Times the experts of gpt-oss (biases, clamped activation) and Nemotron 3 (no gates) with each MoE
runner, in bfloat16, and compares their results.

python benchmarks/expert_forms.py --out benchmarks/results/expert-forms.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frame.core.interfaces.moe import DispatchOutput
from frame.entrypoints.tools.bench.clock import Clock
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.models.layers.weights.expert_activation import ClampedSwiGLU, squared_relu
from frame.plugins.loader import load_registry

MODELS: dict[str, tuple[int, int, int, int, Callable[..., torch.Tensor], bool]] = {  # experts, k, hidden, inner, activation, gated
    "gpt-oss-20b": (32, 4, 2880, 2880, ClampedSwiGLU(1.702, 7.0), True),
    "nemotron-3-nano": (128, 6, 2688, 1856, squared_relu, False),
}
RUNNERS = ("triton", "torch_grouped")
TOKENS = (1, 8, 64, 256, 4096)
ROUTINGS = 4


def made_layer(name: str, device: torch.device) -> nn.Module:
    experts, _, hidden, inner, activation, gated = MODELS[name]
    layer = nn.Module()
    for product, shape in (("gate_up", (experts, inner * (2 if gated else 1), hidden)), ("down", (experts, hidden, inner))):
        layer.register_buffer(product, torch.randn(shape, device=device, dtype=torch.bfloat16) * shape[2] ** -0.5)
        if gated:
            layer.register_buffer(f"{product}_bias", torch.randn(shape[:2], device=device, dtype=torch.bfloat16))
    layer.activation, layer.gated = activation, gated  # type: ignore[assignment]
    return layer


@torch.inference_mode()
def measure(name: str, device: torch.device) -> dict[str, Any]:
    experts, top, hidden, *_ = MODELS[name]
    registry, layer, found = load_registry(installed=False), made_layer(name, device), {}
    runners = {each: registry.load(registry.get("moe_runner", each))(build_context(device, torch.bfloat16, 16), None) for each in RUNNERS}
    for count in TOKENS:
        x = torch.randn(count, hidden, device=device, dtype=torch.bfloat16)
        weights = torch.softmax(torch.rand(count, top, device=device), -1)
        batches = [DispatchOutput(x, torch.rand(count, experts, device=device).topk(top).indices, weights) for _ in range(ROUTINGS)]
        results = {each: runner.run(batches[0], layer).float() for each, runner in runners.items()}
        scale = results[RUNNERS[1]].abs().max()
        row: dict[str, Any] = {"difference": float((results[RUNNERS[0]] - results[RUNNERS[1]]).abs().max() / scale)}
        for each, runner in runners.items():
            timed = Clock(device, 0.2).time([partial(runner.run, batch, layer) for batch in batches])
            row[f"{each}_us"] = round(timed.seconds * 1e6, 1)
        found[str(count)] = row
        print(name, count, row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    report = {name: measure(name, torch.device("cuda")) for name in MODELS}
    if out is not None:
        out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "microseconds": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
