"""Writes tests/quantization/data/compressed_tensors.safetensors: weights that the library
compressed-tensors compressed, and digests of what it decompresses them to.

    python -m tests.quantization.write_compressed_tensors

It needs `compressed-tensors` (made with 0.20.0), which the tests do not.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DATA = Path(__file__).parent / "data" / "compressed_tensors.safetensors"
OUTPUTS, INPUTS = 16, 128
SCHEMES: dict[str, dict[str, Any]] = {
    "pack-4-group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "format": "pack-quantized"},
    "pack-4-zeros": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False, "format": "pack-quantized"},
    "pack-4-channel": {"num_bits": 4, "type": "int", "strategy": "channel", "format": "pack-quantized"},
    "pack-3-group": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 64, "format": "pack-quantized"},
    "pack-2-group": {"num_bits": 2, "type": "int", "strategy": "group", "group_size": 32, "format": "pack-quantized"},
    "pack-8-channel": {"num_bits": 8, "type": "int", "strategy": "channel", "format": "pack-quantized"},
    "pack-8-zeros": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False, "format": "pack-quantized"},
    "int-8-channel": {"num_bits": 8, "type": "int", "strategy": "channel", "format": "int-quantized"},
    "int-8-tensor": {"num_bits": 8, "type": "int", "strategy": "tensor", "format": "int-quantized"},
    "int-8-zeros": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False, "format": "int-quantized"},
    "float-8-channel": {"num_bits": 8, "type": "float", "strategy": "channel", "format": "float-quantized"},
    "float-8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor", "format": "float-quantized"},
    "float-8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 32], "format": "float-quantized"},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "format": "mxfp4-pack-quantized"},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "format": "nvfp4-pack-quantized"},
    "mxfp8": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "format": "mxfp8-quantized"},
}  # fmt: skip


def write() -> None:
    """Compress a random weight in each scheme."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    digests: dict[str, str] = {}
    for name, scheme in SCHEMES.items():
        values = dict(scheme)
        stored = values.pop("format")
        arguments = QuantizationArgs(**values)
        made = QuantizationScheme(targets=["Linear"], weights=arguments, format=stored)
        weight = (torch.randn(OUTPUTS, INPUTS) * 0.05).to(torch.bfloat16)
        state = {"weight": weight, **_observe(weight, values)}
        compressor = BaseCompressor.get_value_from_registry(stored)
        packed = compressor.compress(state, made)
        dense = compressor.decompress(packed, made)["weight"]
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in packed.items() if tensor is not None}
        digests[name] = digest(dense)
    awq, dense = _convert_awq()
    tensors |= awq
    digests["awq"] = digest(dense)
    DATA.parent.mkdir(exist_ok=True)
    save_file(tensors, DATA, {"schemes": json.dumps(SCHEMES), "digests": json.dumps(digests)})


def digest(dense: torch.Tensor) -> str:
    """The dtype and the SHA-256 of the values."""
    values = dense.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{str(dense.dtype).removeprefix('torch.')} {hashlib.sha256(values).hexdigest()}"


def _convert_awq() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random AWQ tensors, and their weights as the library converts AutoAWQ's checkpoints."""
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(1 << 31), 1 << 31, (INPUTS + INPUTS // 32, OUTPUTS // 8), generator=generator).to(torch.int32)
    qweight, qzeros = words[:INPUTS].contiguous(), words[INPUTS:].contiguous()
    scales = (torch.rand(INPUTS // 32, OUTPUTS, generator=generator) * 0.01).to(torch.float16)
    quantized, zeros = AutoAWQConverter.unpack_awq(qweight, qzeros, 4)
    quantized, zeros = AutoAWQConverter.reverse_awq_order(quantized, zeros, 4)
    quantized, zeros = (each.bitwise_and(15).to(torch.float16) for each in (quantized, zeros))
    dense = (quantized - zeros.repeat_interleave(32, 0)) * scales.repeat_interleave(32, 0)
    return {"awq.qweight": qweight, "awq.qzeros": qzeros, "awq.scales": scales}, dense.t()


def _observe(weight: torch.Tensor, values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Scales and zero points of round-to-nearest."""
    bits, strategy, group = values["num_bits"], values["strategy"], values.get("group_size")
    numbers = weight.float()
    if strategy == "tensor":
        parts = numbers.reshape(1, 1, -1)
    elif strategy == "channel":
        parts = numbers.unsqueeze(1)
    elif strategy == "block":
        rows, columns = values["block_structure"]
        parts = numbers.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    else:
        parts = numbers.unflatten(1, (-1, group))
    low, high = parts.amin(2), parts.amax(2)
    largest = torch.maximum(-low, high)
    if values["type"] == "float" and bits == 8 and group == 32:
        return {"weight_scale": torch.exp2(torch.ceil(torch.log2(largest / 448))).to(torch.bfloat16)}
    if values["type"] == "float" and bits == 8:
        return {"weight_scale": _flat(largest / 448, strategy)}
    if values["type"] == "float" and group == 16:
        outer = (448 * 6 / largest.max()).reshape(1)
        return {"weight_scale": (outer * largest / 6).to(torch.float8_e4m3fn).float(), "weight_global_scale": outer}
    if values["type"] == "float":
        return {"weight_scale": torch.exp2(torch.ceil(torch.log2(largest / 6))).to(torch.bfloat16)}
    if values.get("symmetric", True):
        return {"weight_scale": _flat(largest / ((1 << bits) - 1) * 2, strategy).to(torch.bfloat16)}
    scale = ((high.clamp_min(0) - low.clamp_max(0)) / ((1 << bits) - 1)).to(torch.bfloat16)
    zeros = (-low.clamp_max(0) / scale.float()).round() - (1 << bits - 1)
    return {"weight_scale": scale, "weight_zero_point": zeros.clamp(-(1 << bits - 1), (1 << bits - 1) - 1).to(torch.int8)}


def _flat(scale: torch.Tensor, strategy: str) -> torch.Tensor:
    return scale.reshape(1) if strategy == "tensor" else scale


if __name__ == "__main__":
    write()
