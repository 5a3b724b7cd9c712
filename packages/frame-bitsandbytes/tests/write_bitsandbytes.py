"""Writes data/bitsandbytes.safetensors: weights that the library bitsandbytes quantized, and what
it dequantizes them to.

    python packages/frame-bitsandbytes/tests/write_bitsandbytes.py

It needs `bitsandbytes` (made with 0.50.2), which the tests do not.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

DATA = Path(__file__).parent / "data" / "bitsandbytes.safetensors"
OUTPUTS = 16
CASES = {  # inputs, weights of a block, whether scales are quantized
    "plain": (128, 64, False),
    "nested": (128, 64, True),
    "plain 128": (128, 128, False),
    "nested 128": (128, 128, True),
    "plain 4096": (192, 4096, False),  # one block, which is not full
}


def write() -> None:
    """Weights in blocks of several sizes, with plain and with quantized scales."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    torch.manual_seed(0)
    tensors = {}
    for name, (inputs, block, nested) in CASES.items():
        weight = (torch.randn(OUTPUTS, inputs) * 0.05).float()
        quantized, state = quantize_4bit(weight, blocksize=block, compress_statistics=nested, quant_type="nf4")
        tensors |= {f"{name}.weight.{key}": part for key, part in state.as_dict(packed=True).items()}
        tensors |= {f"{name}.weight": quantized, f"{name}.wanted": dequantize_4bit(quantized, state)}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, DATA)


if __name__ == "__main__":
    write()
