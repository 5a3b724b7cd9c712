"""The records of frame-x86. Must not import the plugins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from frame.core.interfaces.attention import AttentionCapabilities, AttentionRequirements
from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmRequirements, Speed
from frame.core.interfaces.plugin import Reason
from frame.core.interfaces.weight_format import QuantType
from frame.registration import KindRegistry, hookimpl

# Relative to oneDNN's product with a bfloat16 weight in its own layout, in the layers of Qwen3-0.6B
# on one core of a Xeon (benchmarks/cpu_products.py, 2026-11-23-cpu-products-amx.json).
_AMX_SPEEDS = (
    *(Speed("plain", 32, 1.2), Speed("plain", 0, 1.04)),
    *(Speed("int8", 16, 1.8), Speed("int8", 64, 1.3), Speed("int8", 0, 0.8)),
    *(Speed("int4", 16, 2.2), Speed("int4", 32, 1.5), Speed("int4", 0, 0.87)),
)
# Relative to oneDNN without AMX (2026-11-24-cpu-products-avx512.json), so `auto` compares them only
# on CPUs without it. Plain weights with more than 64 rows: 0.94 to 0.98, without a second copy.
# Without BF16 all of them are higher (2026-11-28-cpu-products-avx512-vnni.json).
_AVX512_FIGURES: tuple[tuple[QuantType, int, float], ...] = (
    *(("plain", 2, 1.4), ("plain", 8, 1.1), ("plain", 0, 1.0)),
    *(("int8", 2, 2.8), ("int8", 8, 2.5), ("int8", 0, 3.0)),
    *(("int4", 4, 4.1), ("int4", 16, 3.2), ("int4", 0, 2.8)),
)
# Relative to oneDNN with AVX2 (2026-11-28-cpu-products-avx2.json).
_AVX2_FIGURES: tuple[tuple[QuantType, int, float], ...] = (
    *(("plain", 2, 1.8), ("plain", 8, 3.0), ("plain", 0, 4.0)),
    *(("int8", 2, 2.5), ("int8", 8, 3.9), ("int8", 0, 5.0)),
    *(("int4", 4, 3.7), ("int4", 16, 4.5), ("int4", 0, 5.3)),
)
_AVX512_FLAGS = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni")
_TILE_FLAGS = ("amx_tile", "amx_bf16", "amx_int8")
# Level of the instructions that a library was compiled for -> the flags that it needs.
LEVELS = {
    "avx512_bf16": (*_AVX512_FLAGS, "avx512_bf16"),
    "avx512": _AVX512_FLAGS,
    "avx2": ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"),
}
NEEDS = {"amx": "AMX tiles of bfloat16", "avx512": "AVX-512 and its VNNI", "avx2": "AVX2 and FMA"}


@cache
def read_cpu_flags() -> frozenset[str]:
    """The features of the CPU, by the names that Linux gives them; empty on other systems."""
    path = Path("/proc/cpuinfo")
    return frozenset(path.read_text().split()) if path.exists() else frozenset()


def has_tiles() -> bool:
    """Whether the CPU has AMX tiles with bfloat16 and int8."""
    return read_cpu_flags().issuperset((*LEVELS["avx512_bf16"], *_TILE_FLAGS))


@cache
def list_built() -> frozenset[str]:
    """The levels that the installation compiled; all of them where it compiled none, of which
    `load_library` tells."""
    files = Path(__file__).parent.glob("_*.so")
    return frozenset(file.name[1:].partition(".")[0] for file in files) & LEVELS.keys() or frozenset(LEVELS)


def find_level(name: str) -> str | None:
    """The level of the library that runs the plugin `name` on this CPU; None: none of them."""
    return next((level for level in _list_levels(name) if level in list_built()), None)


def _list_levels(name: str) -> list[str]:
    """The levels for the plugin `name` that this CPU has, the best first."""
    if name == "amx":
        return ["avx512_bf16"] if has_tiles() else []
    levels = ("avx512_bf16", "avx512") if name == "avx512" else ("avx2",)
    return [level for level in levels if read_cpu_flags().issuperset(LEVELS[level])]


def list_cpu_obstacles(name: str) -> list[Reason]:
    """Why this CPU cannot run the plugin `name`; empty: it can."""
    if find_level(name) is not None:
        return []
    if _list_levels(name):
        return [Reason("was left out when frame-x86 was compiled (FRAME_X86_LEVELS)")]
    return [Reason(f"needs a CPU with {NEEDS[name]}")]


@dataclass(frozen=True, slots=True)
class X86AttentionCapabilities(AttentionCapabilities):
    """Those of the library for plugin `name`."""

    name: str = "avx512"

    def unsupported(self, requirements: AttentionRequirements) -> list[Reason]:
        return [*AttentionCapabilities.unsupported(self, requirements), *list_cpu_obstacles(self.name)]


@dataclass(frozen=True, slots=True)
class X86GemmCapabilities(GemmCapabilities):
    """Those of the library for plugin `name`."""

    name: str = "avx512"

    def unsupported(self, requirements: GemmRequirements) -> list[Reason]:
        return [*GemmCapabilities.unsupported(self, requirements), *list_cpu_obstacles(self.name)]


ATTENTION = X86AttentionCapabilities(
    devices=("cpu",), phases=("decode",), dtypes=("bfloat16",), head_dim_multiple=32, max_head_dim=256, sliding_window=True, graphs="decode"
)
AVX2_ATTENTION = replace(ATTENTION, name="avx2")
AVX512 = X86GemmCapabilities(
    devices=("cpu",), speeds=tuple(Speed(*figures, automatic=not has_tiles()) for figures in _AVX512_FIGURES), dtypes=("bfloat16",)
)
AVX2 = X86GemmCapabilities(
    devices=("cpu",), speeds=tuple(Speed(*figures, automatic=find_level("avx512") is None) for figures in _AVX2_FIGURES),
    dtypes=("bfloat16",), name="avx2",
)  # fmt: skip
AMX = X86GemmCapabilities(devices=("cpu",), speeds=_AMX_SPEEDS, dtypes=("bfloat16",), name="amx")


@hookimpl
def register_attention_backends(registry: KindRegistry) -> None:
    """Add the attention of decodes."""
    for name, instructions, capabilities, rank in (("avx512", "AVX-512", ATTENTION, 25), ("avx2", "AVX2", AVX2_ATTENTION, 24)):
        registry.add(
            name, f"frame_x86.attention:{name.capitalize()}Attention", capabilities=capabilities, rank=rank,
            summary=f"Attention of decodes on CPUs with {instructions}: bfloat16, over the pages in place.",
        )  # fmt: skip


@hookimpl
def register_gemm_kernels(registry: KindRegistry) -> None:
    """Add the kernels of AMX tiles, of AVX-512 and of AVX2."""
    registry.add(
        "amx", "frame_x86.kernel:AmxKernel", capabilities=AMX, rank=110,
        summary="bfloat16, int8 and int4 weights by AMX tiles of Intel CPUs, read once from where they are.",
    )  # fmt: skip
    registry.add(
        "avx512", "frame_x86.kernel:Avx512Kernel", capabilities=AVX512, rank=105,
        summary="int8 and int4 weights by AVX-512 VNNI, packed once, and few rows with bfloat16 weights.",
    )  # fmt: skip
    registry.add(
        "avx2", "frame_x86.kernel:Avx2Kernel", capabilities=AVX2, rank=104,
        summary="int8 and int4 weights by AVX2, packed once, and few rows with bfloat16 weights.",
    )  # fmt: skip
