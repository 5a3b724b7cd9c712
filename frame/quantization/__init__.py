"""Manifest of the in-tree weight formats and GEMM kernels. Records only; nothing heavy is imported
here.

Each record names its target as "module:Class"; the registry imports it when it is selected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmRequirements, Speed
from frame.core.interfaces.plugin import Reason
from frame.core.interfaces.weight_format import FormatCapabilities
from frame.registration import KindRegistry, PluginOptions, count_interpreter, hookimpl

_LOW = ("bfloat16", "float16")


def _check_expression(expression: str) -> str:
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"{error}; a regular expression is expected") from None
    return expression


class IgnoreOptions(PluginOptions):
    """Settings of formats that quantize unquantized checkpoints while loading."""

    ignore: tuple[Annotated[str, AfterValidator(_check_expression)], ...] = Field(
        ("kv_b_proj$",),
        description="Regular expressions of layers that stay unquantized; for unquantized checkpoints. kv_b_proj is dequantized anyway.",
    )


class OnlineOptions(IgnoreOptions):
    """Settings of `int8`."""

    head: bool = Field(False, description="Quantize the output head too, to int8 with one scale per output.")


class Int4Options(OnlineOptions):
    """Settings of `int4`."""

    group_size: Literal[32, 64, 128, 256] = Field(64, description="Inputs that share a scale and a zero point.")


class HummingOptions(PluginOptions):
    """Settings of `humming`."""

    few_rows: bool = Field(
        False, description="Keep the quantized values a second time for the Triton kernel, which multiplies few rows and few pairs faster."
    )


@hookimpl
def register_weight_formats(registry: KindRegistry) -> None:
    """Add the in-tree weight formats."""
    registry.add(
        "none",
        "frame.quantization.plain:Plain",
        capabilities=FormatCapabilities(checkpoints=(None,)),
        rank=10,
        summary="Unquantized weights in the model's own type.",
    )
    registry.add(
        "fp8",
        "frame.quantization.fp8:Fp8",
        capabilities=FormatCapabilities(checkpoints=("fp8", None), quant_types=("plain", "e4m3")),
        options=IgnoreOptions,
        rank=20,
        summary="fp8 (e4m3) weights, scaled per block, output or tensor, stored so or quantized while loading.",
    )
    registry.add(
        "compressed-tensors",
        "frame.quantization.compressed_tensors:CompressedTensors",
        capabilities=FormatCapabilities(checkpoints=("compressed-tensors",), quant_types=("plain", "int4", "int8", "e2m1", "e4m3")),
        rank=20,
        summary="llm-compressor: packed integers, int8, fp8, MXFP8, NVFP4 and MXFP4, by layer.",
    )
    for name, target, quantized, summary in (
        ("modelopt", "modelopt:ModelOpt", ("plain", "e4m3", "e2m1"), "NVIDIA ModelOpt: FP8 by tensor, MXFP8 and NVFP4."),
        ("w8a8_int8", "w8a8_int8:W8A8Int8", ("plain", "int8"), "int8 weights with one scale per output."),
        ("w8a8_fp8", "w8a8_fp8:W8A8Fp8", ("plain", "e4m3"), "e4m3 weights with one scale per output."),
        ("w4afp8", "w4afp8:W4AFp8", ("plain", "int4", "e4m3"), "DeepSeek W4AFP8: experts in int4, other layers in e4m3 by blocks."),
        ("torchao", "torchao:TorchAo", ("plain", "int4", "int8", "e4m3"), "torchao: e4m3 and integers, in safetensors files."),
        ("gptq", "gptq:Gptq", ("plain", "int4", "int8"), "GPTQ: integers of 2, 3, 4 or 8 bits per group, also in act-order."),
        ("awq", "awq:Awq", ("plain", "int4"), "AWQ: 4-bit integers with zero points per group."),
        ("mxfp4", "mxfp4:Mxfp4", ("plain", "e2m1"), "gpt-oss: the experts in MXFP4, e2m1 per 32 inputs."),
    ):
        capabilities = FormatCapabilities(checkpoints=(name,), quant_types=quantized)  # type: ignore[arg-type]
        registry.add(name, f"frame.quantization.{target}", capabilities=capabilities, rank=20, summary=summary)
    for name, yields, options, summary in (
        ("int8", "int8", OnlineOptions, "Int8 weights with one scale per output, quantized while loading."),
        ("int4", "int4", Int4Options, "Int4 weights with a scale and a zero point per group, quantized while loading (round-to-nearest)."),
    ):
        registry.add(
            name,
            f"frame.quantization.{name}:{name.capitalize()}",
            capabilities=FormatCapabilities(checkpoints=(None,), quant_types=("plain", yields)),  # type: ignore[arg-type]
            options=options,
            summary=summary,
        )

    for name in ("bitsandbytes", "gguf"):
        registry.suggest_distribution(name, f"frame-{name}")


@dataclass(frozen=True, slots=True)
class TritonCapabilities(GemmCapabilities):
    """Capabilities of Triton kernels, which run on a GPU or in Triton's interpreter."""

    def unsupported(self, requirements: GemmRequirements) -> list[Reason]:
        return GemmCapabilities.unsupported(self, count_interpreter(requirements, dtype="bfloat16"))


@dataclass(frozen=True, slots=True)
class HopperCapabilities(GemmCapabilities):
    """Capabilities of kernels that are compiled for compute capability 9.0 only."""

    def unsupported(self, requirements: GemmRequirements) -> list[Reason]:
        reasons, chip = GemmCapabilities.unsupported(self, requirements), requirements.compute_capability
        if chip is not None and chip[0] > 9:
            reasons.append(Reason(f"is compiled for compute capability 9.0, not for {chip[0]}.{chip[1]}"))
        return reasons


# Measured on an H200 with the layers of Llama-3.1-8B and Qwen3-14B by benchmarks/quantized_gemm.py;
# e4m3 is an estimate.
_WEIGHT_ONLY_SPEEDS = (
    *(Speed("int4", 4, 2.1), Speed("int4", 16, 1.4), Speed("int4", 64, 0.8), Speed("int4", 0, 0.7)),
    *(Speed("int8", 16, 1.1), Speed("int8", 64, 0.8), Speed("int8", 0, 0.8)),
    *(Speed("e2m1", 2, 1.8), Speed("e2m1", 16, 0.8), Speed("e2m1", 64, 0.5), Speed("e2m1", 0, 0.7)),
    Speed("e4m3", 0, 0.9),
)
# As above. int4: geometric means over the layers of Qwen3-14B, small ones included
# (2026-11-23-int4-kernels-h200.json). Above 64 rows the two are equally fast; the figures differ so
# that `auto` keeps one copy of a weight.
_HUMMING_SPEEDS = (
    *(Speed("int4", 16, 1.5), Speed("int4", 64, 1.28), Speed("int4", 0, 0.91)),
    *(Speed("e2m1", 16, 1.9), Speed("e2m1", 64, 1.5), Speed("e2m1", 0, 0.93)),
)
# Experts of gpt-oss-20b beside bfloat16 (2026-11-22-quantized-experts-gpt-oss-20b-h200.json,
# 2026-11-28-mxfp4-experts-h200.json and its note).
_CUDA_MXFP4_SPEEDS = (Speed("e2m1", 64, 2.0), Speed("e2m1", 512, 1.4), Speed("e2m1", 0, 1.0))
_CUDA_INT4_SPEEDS = (Speed("int4", 8, 2.5), Speed("int4", 16, 2.0), Speed("int4", 64, 1.31), Speed("int4", 0, 0.92))


@hookimpl
def register_gemm_kernels(registry: KindRegistry) -> None:
    """Add the in-tree GEMM kernels."""
    registry.add(
        "plain",
        "frame.quantization.gemm.plain:PlainKernel",
        capabilities=GemmCapabilities(devices=("cpu", "cuda"), speeds=(Speed("plain", 0, 1.0),), batch_invariant=True),
        rank=100,
        summary="Unquantized weights: skinny and fused Triton kernels, PyTorch, or oneDNN's packed weights on a CPU.",
    )
    registry.add(
        "fp8",
        "frame.quantization.gemm.fp8:Fp8Kernel",
        capabilities=TritonCapabilities(devices=("cuda",), speeds=(Speed("e4m3", 0, 1.5),), dtypes=_LOW, min_compute_capability=(8, 9)),
        requires=("triton>=3.4",),
        rank=90,
        summary="e4m3 weights and activations: skinny Triton kernels and PyTorch's scaled matmuls. Activations are quantized per token.",
    )
    registry.add(
        "weight_only",
        "frame.quantization.gemm.weight_only:WeightOnlyKernel",
        capabilities=TritonCapabilities(devices=("cuda",), speeds=_WEIGHT_ONLY_SPEEDS, dtypes=_LOW, min_compute_capability=(8, 0)),
        requires=("triton>=3.4",),
        rank=80,
        summary="4-bit and 8-bit weights, unquantized activations: Triton kernels that dequantize in registers, dense and for experts.",
    )
    registry.add(
        "humming",
        "frame.quantization.gemm.humming:HummingKernel",
        capabilities=GemmCapabilities(devices=("cuda",), speeds=_HUMMING_SPEEDS, dtypes=_LOW, min_compute_capability=(8, 0)),
        requires=("humming-kernels>=0.1.19",),
        options=HummingOptions,
        rank=85,
        summary="4-bit weights, unquantized activations: CUDA kernels of humming-kernels, compiled on first use.",
    )
    registry.add(
        "cuda_int4",
        "frame.quantization.gemm.cuda_int4:CudaInt4Kernel",
        capabilities=HopperCapabilities(devices=("cuda",), speeds=_CUDA_INT4_SPEEDS, dtypes=_LOW, min_compute_capability=(9, 0)),
        requires=("triton>=3.4",),
        rank=85,
        summary="int4 weights, unquantized activations: CUDA kernels for compute capability 9.0, compiled at the start by NVRTC.",
    )
    registry.add(
        "cuda_mxfp4",
        "frame.quantization.gemm.cuda_mxfp4:CudaMxfp4Kernel",
        capabilities=HopperCapabilities(devices=("cuda",), speeds=_CUDA_MXFP4_SPEEDS, dtypes=("bfloat16",), min_compute_capability=(9, 0)),
        requires=("triton>=3.4",),
        rank=85,
        summary="Experts in MXFP4, unquantized activations: CUDA kernels for compute capability 9.0, compiled at the start by NVRTC.",
    )
    registry.add(
        "int8",
        "frame.quantization.gemm.int8:Int8Kernel",
        capabilities=TritonCapabilities(
            devices=("cuda",), speeds=(Speed("int8", 64, 1.5), Speed("int8", 0, 1.2)), dtypes=_LOW, min_compute_capability=(8, 0)
        ),
        requires=("triton>=3.4",),
        rank=90,
        summary="int8 weights and activations (w8a8): skinny Triton kernels and PyTorch's matmuls. Activations are quantized per token.",
    )
    _register_for_all_devices(registry)


def _register_for_all_devices(registry: KindRegistry) -> None:
    """The kernels for CPUs, and those that run everywhere."""
    registry.add(
        "unpacked",
        "frame.quantization.gemm.unpacked:UnpackedKernel",
        capabilities=GemmCapabilities(
            devices=("cpu", "cuda"),
            batch_invariant=True,
            speeds=(Speed("e4m3", 0, 1.0), *(Speed(quantized, 0, 1.0, automatic=False) for quantized in ("int4", "int8", "e2m1", "nf4"))),
        ),
        rank=20,
        summary="Dequantizes after loading: the speed and the memory of unquantized weights.",
    )
    registry.add(
        "torch",
        "frame.quantization.gemm.reference:ReferenceKernel",
        capabilities=GemmCapabilities(
            devices=("cpu", "cuda"),
            batch_invariant=True,
            speeds=tuple(Speed(quantized, 0, 0.1) for quantized in ("int4", "int8", "e2m1", "nf4", "e4m3")),
        ),
        rank=10,
        summary="The reference: dequantizes the weight in every matmul, with PyTorch.",
    )
    int8 = GemmCapabilities(devices=("cpu",), speeds=(Speed("int8", 8, 1.5), Speed("int8", 32, 1.0), Speed("int8", 0, 0.6)))
    int4 = GemmCapabilities(devices=("cpu",), speeds=(Speed("int4", 8, 1.3), Speed("int4", 256, 0.3)), dtypes=("bfloat16",))
    for name, capabilities, summary in (
        ("int8", int8, "int8 weights with one scale per output, by oneDNN's integer products; faster than bfloat16 for up to eight rows."),
        ("int4", int4, "int4 weights in groups, by PyTorch's packed kernel; faster than bfloat16 for up to eight rows."),
    ):
        target = f"frame.quantization.gemm.cpu_{name}:{name.capitalize()}CpuKernel"
        registry.add(f"cpu_{name}", target, capabilities=capabilities, rank=70, summary=summary)
    for name in ("amx", "avx512"):
        registry.suggest_distribution(name, "frame-x86")
