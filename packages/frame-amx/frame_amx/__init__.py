"""The records of frame-amx. Must not import the plugins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from frame.core.interfaces.attention import AttentionCapabilities, AttentionRequirements
from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmRequirements, Speed
from frame.core.interfaces.plugin import Reason
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry

# Relative to oneDNN's product with a bfloat16 weight in its own layout, in the layers of Qwen3-0.6B
# on one core of a Xeon (benchmarks/cpu_products.py, 2026-11-23-cpu-products-amx.json).
_SPEEDS = (
    *(Speed("plain", 32, 1.2), Speed("plain", 0, 1.04)),
    *(Speed("int8", 16, 1.8), Speed("int8", 64, 1.3), Speed("int8", 0, 0.8)),
    *(Speed("int4", 16, 2.2), Speed("int4", 32, 1.5), Speed("int4", 0, 0.87)),
)


@cache
def has_tiles() -> bool:
    """Whether the CPU has AMX tiles with bfloat16, as Linux tells it."""
    path = Path("/proc/cpuinfo")
    return path.exists() and "amx_bf16" in path.read_text().split()


def list_cpu_obstacles() -> list[Reason]:
    """Why this CPU cannot run the library; empty: it can."""
    return [] if has_tiles() else [Reason("needs a CPU with AMX tiles of bfloat16")]


@dataclass(frozen=True, slots=True)
class AmxAttentionCapabilities(AttentionCapabilities):
    """Those of the library, which is compiled for CPUs with AMX."""

    def unsupported(self, requirements: AttentionRequirements) -> list[Reason]:
        return [*AttentionCapabilities.unsupported(self, requirements), *list_cpu_obstacles()]


@dataclass(frozen=True, slots=True)
class AmxGemmCapabilities(GemmCapabilities):
    """Those of the library, which is compiled for CPUs with AMX."""

    def unsupported(self, requirements: GemmRequirements) -> list[Reason]:
        return [*GemmCapabilities.unsupported(self, requirements), *list_cpu_obstacles()]


ATTENTION = AmxAttentionCapabilities(
    devices=("cpu",), phases=("decode",), dtypes=("bfloat16",), head_dim_multiple=32, max_head_dim=256, sliding_window=True, graphs="decode"
)

GEMM = AmxGemmCapabilities(devices=("cpu",), speeds=_SPEEDS, dtypes=("bfloat16",))


@hookimpl
def register_attention_backends(registry: KindRegistry) -> None:
    """Add the attention of decodes."""
    registry.add(
        "amx",
        "frame_amx.attention:AmxAttention",
        capabilities=ATTENTION,
        rank=25,
        summary="Attention of decodes on Intel CPUs with AMX: bfloat16, over the pages in place.",
    )


@hookimpl
def register_gemm_kernels(registry: KindRegistry) -> None:
    """Add the kernel of AMX tiles."""
    registry.add(
        "amx",
        "frame_amx.kernel:AmxKernel",
        capabilities=GEMM,
        rank=110,
        summary="bfloat16, int8 and int4 weights by AMX tiles of Intel CPUs, read once from where they are.",
    )
