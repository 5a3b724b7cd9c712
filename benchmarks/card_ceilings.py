"""What this card reaches at best, as one line of JSON: memory read and copied, large products, and
one layer's gate and up at five batches.

`h200_table.py` runs it before the models, in a process of its own; `peers_h200.json` holds what the
peers' card gave.

    python benchmarks/card_ceilings.py
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from frame.entrypoints.tools.bench.clock import Clock, measured_ceilings

ROWS = (1, 8, 64, 256, 8192)
INPUTS, OUTPUTS = 4096, 28672  # of Llama-3.1-8B's gate and up
WEIGHTS = 6  # read in turn, so that no cache holds them


def products(clock: Clock) -> dict[str, Any]:
    """Seconds of one product by number of rows."""
    weights = [torch.randn(OUTPUTS, INPUTS, device=clock.device, dtype=torch.bfloat16) for _ in range(WEIGHTS)]
    found = {}
    for rows in ROWS:
        x = torch.randn(rows, INPUTS, device=clock.device, dtype=torch.bfloat16)
        seconds = clock.time([partial(F.linear, x, weight) for weight in weights]).seconds
        found[str(rows)] = {
            "us": round(seconds * 1e6, 1),
            "tb_per_s": round(2 * INPUTS * OUTPUTS / seconds / 1e12, 2),
            "tflop_per_s": round(2 * rows * INPUTS * OUTPUTS / seconds / 1e12, 1),
        }
    return found


def main() -> None:
    device = torch.device("cuda")
    ceilings = measured_ceilings(device, torch.bfloat16)
    with torch.inference_mode():
        print(json.dumps({"card": torch.cuda.get_device_name(device), **asdict(ceilings), "gate_up": products(Clock(device))}))


if __name__ == "__main__":
    main()
