"""Writes tests/quantization/data/torchao.safetensors: weights that the library torchao quantized
and flattened for safetensors, and digests of what it dequantizes them to.

    python -m tests.quantization.write_torchao

It needs `torchao` (made with 0.18.0), which the tests do not.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.quantization.write_compressed_tensors import DATA, INPUTS, OUTPUTS, digest

TORCHAO = DATA.with_name("torchao.safetensors")


def write() -> None:
    """Quantize a random weight with each configuration."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_
    from transformers import TorchAoConfig

    configs: dict[str, Any] = {
        "fp8": Float8WeightOnlyConfig(),
        "int8": Int8WeightOnlyConfig(version=2),
        "int4 by group": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        "int8 by axis": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
    }
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    digests, types = {}, {}
    for name, config in configs.items():
        model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False)).to(torch.bfloat16)
        quantize_(model, config)
        flat, _ = flatten_tensor_state_dict(model.state_dict())
        tensors |= {f"{name}.{key.removeprefix('0.')}": tensor.contiguous() for key, tensor in flat.items()}
        digests[name] = digest(model[0].weight.dequantize())
        types[name] = TorchAoConfig(config).to_dict()["quant_type"]
    save_file(tensors, TORCHAO, {"digests": json.dumps(digests), "types": json.dumps(types, default=str)})


if __name__ == "__main__":
    write()
