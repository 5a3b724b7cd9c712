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
OUTPUTS, INPUTS = 16, 128


def write() -> None:
    """One weight with plain and one with quantized scales."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    torch.manual_seed(0)
    tensors = {}
    for name, nested in (("plain", False), ("nested", True)):
        weight = (torch.randn(OUTPUTS, INPUTS) * 0.05).float()
        codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
        tensors |= {f"{name}.weight.{key}": part for key, part in state.as_dict(packed=True).items()}
        tensors |= {f"{name}.weight": codes, f"{name}.wanted": dequantize_4bit(codes, state)}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, DATA)


if __name__ == "__main__":
    write()
