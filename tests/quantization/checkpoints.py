"""Tiny checkpoints in the layouts of several libraries, with random quantized values, and
unquantized twins that hold the numbers that they stand for by each library's
definition.

The packing here is written value by value, independently of the package's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from frame.testing.checkpoints import make_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32, "num_key_value_heads": 2}
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of the nibbles of a word, lowest first

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors after the layer's name, numbers [outputs, inputs]


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, m] -> int32 [n, m * bits / 32]: a stream of bits, the lowest first."""
    rows = []
    for row in values.tolist():
        number = sum(int(value) << bits * place for place, value in enumerate(row))
        words = [number >> 32 * word & 0xFFFFFFFF for word in range(len(row) * bits // 32)]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def draw(outputs: int, inputs: int, bits: int, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantized values [outputs, inputs], zero points and scales [outputs, groups]."""
    quantized = torch.randint(0, 1 << bits, (outputs, inputs))
    zeros = torch.randint(1, 1 << bits, (outputs, inputs // group))
    return quantized, zeros, (torch.rand(outputs, inputs // group) * 0.3 / (1 << bits)).half()


def gptq(bits: int, ordered: bool, version: int = 1) -> Callable[[int, int], Stored]:
    def store(outputs: int, inputs: int) -> Stored:
        quantized, zeros, scales = draw(outputs, inputs, bits)
        owners = torch.arange(inputs) // GROUP
        if ordered:  # of one order for all layers with these inputs, as a calibration gives
            owners = owners[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        dense = (quantized - zeros[:, owners]) * scales.float()[:, owners]
        stored_zeros = (zeros - (2 - version)).remainder(1 << bits)
        return {
            "qweight": pack(quantized, bits).t().contiguous(),
            "qzeros": pack(stored_zeros.t(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": owners.to(torch.int32),
        }, dense

    return store


def awq(outputs: int, inputs: int) -> Stored:
    quantized, zeros, scales = draw(outputs, inputs, 4)

    def words(values: torch.Tensor) -> torch.Tensor:
        return pack(values.t().unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1), 4)

    dense = (quantized - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)
    return {"qweight": words(quantized), "qzeros": words(zeros), "scales": scales.t().contiguous()}, dense


def packed(outputs: int, inputs: int) -> Stored:
    quantized, zeros, scales = draw(outputs, inputs, 4)
    dense = (quantized - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)
    return {
        "weight_packed": pack(quantized, 4),
        "weight_scale": scales,
        "weight_zero_point": pack(zeros.t(), 4).t().contiguous(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }, dense


def int8(outputs: int, inputs: int) -> Stored:
    quantized, scales = torch.randint(-128, 128, (outputs, inputs)), torch.rand(outputs, 1) * 0.002
    return {"weight": quantized.to(torch.int8), "weight_scale": scales}, quantized * scales


def int4_in_bytes(outputs: int, inputs: int) -> Stored:
    quantized, zeros, scales = draw(outputs, inputs, 4)
    dense = (quantized - zeros.repeat_interleave(GROUP, 1)) * scales.float().repeat_interleave(GROUP, 1)
    return {"weight": (quantized - 8).to(torch.int8), "weight_scale": scales, "weight_zero_point": (zeros - 8).to(torch.int8)}, dense


def fp8(outputs: int, inputs: int) -> Stored:
    quantized, scales = (torch.randn(outputs, inputs) * 50).to(torch.float8_e4m3fn), torch.rand(outputs, 1) * 0.002
    return {"weight": quantized, "weight_scale": scales}, quantized.float() * scales


def torchao(bits: int) -> Callable[[int, int], Stored]:
    def store(outputs: int, inputs: int) -> Stored:
        group = GROUP if bits == 4 else inputs
        quantized, zeros = torch.randint(-(1 << bits - 1), 1 << bits - 1, (2, outputs, inputs))
        zeros, scales = zeros[:, ::group], torch.rand(outputs, inputs // group) * 0.3 / (1 << bits)
        dense = (quantized - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)
        stored = {"_weight_qdata": quantized.to(torch.int8), "_weight_scale": scales}
        stored["_weight_zero_point"] = zeros.to(torch.int8).contiguous()
        return stored, dense

    return store


def torchao_fp8(outputs: int, inputs: int) -> Stored:
    quantized, scale = (torch.randn(outputs, inputs) * 50).to(torch.float8_e4m3fn), torch.rand(1, 1) * 0.002
    return {"_weight_qdata": quantized, "_weight_scale": scale}, quantized.float() * scale


def mxfp8(outputs: int, inputs: int) -> Stored:
    quantized, exponents = (torch.randn(outputs, inputs) * 50).to(torch.float8_e4m3fn), torch.randint(-12, -8, (outputs, inputs // 32))
    dense = quantized.float() * torch.exp2(exponents.float()).repeat_interleave(32, 1)
    return {"weight": quantized, "weight_scale": (exponents + 127).to(torch.uint8)}, dense


def modelopt_fp8(outputs: int, inputs: int) -> Stored:
    quantized, scale = (torch.randn(outputs, inputs) * 50).to(torch.float8_e4m3fn), torch.tensor(0.001)
    return {"weight": quantized, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, quantized.float() * scale


def w4_experts(outputs: int, inputs: int) -> Stored:
    quantized, scales = torch.randint(-8, 8, (outputs, inputs)), torch.rand(outputs, -(-inputs // 128)) * 0.02
    stored = {"weight": (quantized[:, ::2] & 15 | quantized[:, 1::2] << 4).to(torch.int8), "weight_scale_inv": scales}
    return stored | {"input_scale": torch.tensor(0.5)}, quantized * scales.repeat_interleave(128, 1)[:, :inputs]


def fp8_blocks(outputs: int, inputs: int) -> Stored:
    quantized, scales = (torch.randn(outputs, inputs) * 50).to(torch.float8_e4m3fn), torch.rand(-(-outputs // 32), -(-inputs // 32)) * 0.002
    spread = scales.repeat_interleave(32, 0)[:outputs].repeat_interleave(32, 1)[:, :inputs]
    return {"weight": quantized, "weight_scale_inv": scales}, quantized.float() * spread


def modelopt(outputs: int, inputs: int) -> Stored:
    stored, _ = nvfp4(outputs, inputs)
    quantized, scales, outer = stored["weight_packed"].int(), stored["weight_scale"], torch.tensor(0.01)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    numbers = table[torch.stack((quantized & 15, quantized >> 4), -1).flatten(1)]
    dense = numbers * (scales.float() * outer).repeat_interleave(16, 1)
    return {"weight": stored["weight_packed"], "weight_scale": scales, "weight_scale_2": outer, "input_scale": torch.tensor(1.0)}, dense


def nvfp4(outputs: int, inputs: int) -> Stored:
    quantized = torch.randint(0, 16, (outputs, inputs))
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = table[quantized % 8] * torch.where(quantized > 7, -1.0, 1.0)
    scales, outer = (torch.rand(outputs, inputs // 16) * 4).to(torch.float8_e4m3fn), torch.tensor([100.0])
    stored = {"weight_packed": (quantized[:, ::2] | quantized[:, 1::2] << 4).to(torch.uint8), "weight_scale": scales}
    return stored | {"weight_global_scale": outer}, numbers * (scales.float() / outer).repeat_interleave(16, 1)


def _groups(**weights: Any) -> dict[str, Any]:
    stored = weights.pop("format")
    return {
        "quant_method": "compressed-tensors", "format": stored, "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def _torchao(name: str, granularity: dict[str, Any], **data: Any) -> dict[str, Any]:
    chosen = {"_type": name, "_version": 2, "_data": {"granularity": granularity, **data}}
    return {"quant_method": "torchao", "quant_type": {"default": chosen}}


EXPERTS = {"w4afp8": w4_experts}  # of dialects that store experts in another way than dense layers
DIALECTS: dict[str, tuple[dict[str, Any], Callable[[int, int], Stored]]] = {
    **{
        f"gptq {bits}{' ordered' * ordered}": (
            {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": False}, gptq(bits, ordered)
        )
        for bits, ordered in ((2, False), (3, False), (4, False), (4, True), (8, True))
    },
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq_v2"}, gptq(4, False, 2)
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "packed": (_groups(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False, format="pack-quantized"), packed),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, modelopt),
    "mxfp8": (_groups(num_bits=8, type="float", strategy="group", group_size=32, format="mxfp8-quantized"), mxfp8),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]}, fp8_blocks),
    "w4afp8": ({"quant_method": "w4afp8", "weight_block_size": [32, 32]}, fp8_blocks),
    "torchao int8": (_torchao("Int8WeightOnlyConfig", {"_type": "PerRow", "_data": {"dim": -1}}), torchao(8)),
    "torchao int4": (
        _torchao("IntxWeightOnlyConfig", {"_type": "PerGroup", "_data": {"group_size": GROUP}}, weight_dtype={"_data": "int4"}), torchao(4)
    ),
    "torchao fp8": (_torchao("Float8DynamicActivationFloat8WeightConfig", {"_type": "PerTensor"}), torchao_fp8),
    "w8a8_int8": ({"quant_method": "w8a8_int8"}, int8),
    "w8a8_fp8": ({"quant_method": "w8a8_fp8"}, fp8),
    "int8": (_groups(num_bits=8, type="int", strategy="channel", format="int-quantized"), int8),
    "int4 in bytes": (
        _groups(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False, format="int-quantized"), int4_in_bytes
    ),
    "nvfp4": (_groups(num_bits=4, type="float", strategy="tensor_group", group_size=16, format="nvfp4-pack-quantized"), nvfp4),
}  # fmt: skip


def make_pair(architecture: str, dialect: str, folder: Path, other: Callable[[int, int], Stored] | None = None) -> tuple[Path, Path]:
    """(a quantized checkpoint, an unquantized one with the same numbers). `other`: stores weights
    in place of the dialect's function."""
    config, store = DIALECTS[dialect]
    store = other or store
    torch.manual_seed(0)
    stored, plain = folder / "stored", folder / "plain"
    make_checkpoint(architecture, stored, **SIZES)
    shutil.copytree(stored, plain)
    tensors, numbers = load_file(stored / "model.safetensors"), load_file(plain / "model.safetensors")
    for name, weight in list(tensors.items()):
        if weight.dim() == 2 and "_proj" in name:
            parts, dense = (EXPERTS.get(dialect, store) if "experts" in name else store)(*weight.shape)
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{key}": tensor for key, tensor in parts.items()}
            numbers[name] = dense.to(weight.dtype)
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    raw = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return stored, plain
