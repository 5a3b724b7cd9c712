"""Writes tests/quantization/data/gptq.safetensors: weights that the library auto-gptq packed, and
digests of what it multiplies by.

    python -m tests.quantization.write_gptq

It needs `auto-gptq` (made with 0.7.1), which the tests do not.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.quantization.write_compressed_tensors import DATA, INPUTS, digest

GPTQ = DATA.with_name("gptq.safetensors")
OUTPUTS, GROUP = 64, 32
SCHEMES = {f"{bits}{' ordered' * ordered}": (bits, ordered) for bits in (2, 3, 4, 8) for ordered in (False, True)}


def write() -> None:
    """Pack a random weight in each number of bits, in order and in act-order. The library does not
    bound quantized values, so the weights are numbers that quantized values stand for."""
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    digests: dict[str, str] = {}
    for name, (bits, ordered) in SCHEMES.items():
        linear = nn.Linear(INPUTS, OUTPUTS, bias=False).half()
        scales = (torch.rand(OUTPUTS, INPUTS // GROUP) * 0.1 + 0.1).half() / (1 << bits)
        zeros = torch.randint(1, 1 << bits, (OUTPUTS, INPUTS // GROUP)).half()
        owners = torch.arange(INPUTS) // GROUP
        owners = owners[torch.randperm(INPUTS)] if ordered else owners
        quantized = torch.randint(0, 1 << bits, (OUTPUTS, INPUTS))
        linear.weight.data = (quantized - zeros[:, owners]) * scales[:, owners]
        layer: Any = QuantLinear(bits, GROUP, INPUTS, OUTPUTS, bias=False)
        layer.pack(linear, scales, zeros.clone(), owners.int())
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in layer.state_dict().items()}
        digests[name] = digest(layer(torch.eye(INPUTS, dtype=torch.float16)).t())
    save_file(tensors, GPTQ, {"digests": json.dumps(digests)})


if __name__ == "__main__":
    write()
