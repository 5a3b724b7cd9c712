"""Capabilities of the backends that call installed libraries. Plain data: imports no torch and no
library.

A library whose kernels are neither prebuilt nor compilable on this machine is reported as
unsupported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from frame.attention_backends.measured import MEASURED
from frame.core.interfaces.attention import AttentionCapabilities, AttentionRequirements
from frame.core.interfaces.plugin import Reason


class FlashInferOptions(BaseModel):
    """Settings of the `flashinfer` backend."""

    model_config = ConfigDict(extra="forbid")

    workspace_mib: int = Field(384, ge=16, le=8192, description="Device memory for partial results of split-KV attention, in MiB.")


@dataclass(frozen=True, slots=True)
class LatentCapabilities(AttentionCapabilities):
    """Capabilities of a library whose latent attention has no sliding window and no soft cap, even
    if its multi-head attention has them. `widths`: supported (query width, value width) of the
    prefill kernels for expanded latents."""

    widths: tuple[tuple[int, int], ...] | None = None

    def unsupported(self, requirements: AttentionRequirements) -> list[Reason]:
        reasons = AttentionCapabilities.unsupported(self, requirements)
        if requirements.kind != "mla":
            return reasons
        if (requirements.sliding_window and self.sliding_window) or (requirements.soft_cap and self.soft_cap):
            reasons.append(Reason("its latent attention has no sliding window and no soft cap"))
        if self.widths is not None and (requirements.head_dim, requirements.v_head_dim) not in self.widths:
            reasons.append(
                Reason(f"widths {(requirements.head_dim, requirements.v_head_dim)} of queries and values are not among {list(self.widths)}")
            )
        return reasons


@dataclass(frozen=True, slots=True)
class FlashInferCapabilities(LatentCapabilities):
    """The limits of FlashInfer's wrappers, and the requirement that its kernels are prebuilt or can
    be compiled."""

    def unsupported(self, requirements: AttentionRequirements) -> list[Reason]:
        reasons = LatentCapabilities.unsupported(self, requirements)
        if requirements.kind == "mha" and requirements.head_dim != requirements.v_head_dim:
            reasons.append(
                Reason(f"needs keys and values of one width; the model has {requirements.head_dim} and {requirements.v_head_dim}")
            )
        if requirements.kind == "mla" and requirements.kv_dtype != requirements.dtype:
            reasons.append(Reason(f"cannot read a {requirements.kv_dtype} cache of latents", f"cache.kv_dtype: {requirements.dtype}"))
        if not reasons and requirements.device == "cuda" and not _has_kernels():
            reasons.append(Reason("compiles its kernels at start-up and found no nvcc or no ninja; set CUDA_HOME and install ninja"))
        return reasons


FLASHINFER = FlashInferCapabilities(
    devices=("cuda",),
    compute_capability=((8, 0), (12, 1)),
    kinds=("mha", "mla"),
    head_dims=(64, 128, 256),
    latent_heads=True,
    latents=((512, 64),),
    dtypes=("bfloat16", "float16"),
    kv_dtypes=("fp8_e4m3",),
    sliding_window=True,
    soft_cap=True,
    graphs="decode",
    expanded_bytes=2 << 30,
    compiles_at_start=True,
    measured=MEASURED["flashinfer"],
)


class WorkspaceOptions(BaseModel):
    """Settings of the `trtllm_mha` and `trtllm_mla` backends."""

    model_config = ConfigDict(extra="forbid")

    workspace_mib: int = Field(256, ge=128, le=8192, description="Device memory for partial results of split-KV attention, in MiB.")


BLACKWELL = ((10, 0), (10, 3))

TRTLLM_MHA = AttentionCapabilities(
    devices=("cuda",),
    compute_capability=BLACKWELL,
    head_dims=(64, 128, 256),
    page_sizes=(16, 32, 64),
    dtypes=("bfloat16", "float16"),
    sliding_window=True,
    sinks=True,
    graphs="decode",
)


TRTLLM_MLA = LatentCapabilities(
    devices=("cuda",),
    compute_capability=BLACKWELL,
    kinds=("mla",),
    latents=((512, 64), (256, 64)),
    widths=((192, 128), (128, 128)),
    page_sizes=(32, 64),
    dtypes=("bfloat16",),
    graphs="decode",
)

FLASHMLA = LatentCapabilities(
    devices=("cuda",),
    compute_capability=((9, 0), (9, 0)),
    kinds=("mla",),
    phases=("decode",),
    latent_heads=True,
    latents=((512, 64),),
    page_sizes=(64,),
    dtypes=("bfloat16",),
    graphs="decode",
)


FA3 = LatentCapabilities(
    devices=("cuda",),
    compute_capability=((9, 0), (9, 0)),
    kinds=("mha", "mla"),
    max_head_dim=256,
    head_dim_multiple=8,
    latent_heads=True,
    latents=((512, 64),),
    dtypes=("bfloat16", "float16"),
    sliding_window=True,
    soft_cap=True,
    graphs="decode",
)


def _has_kernels() -> bool:
    """Whether FlashInfer has prebuilt kernels or can compile them."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    spec = importlib.util.find_spec("flashinfer")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        if any(Path(folder, "data", "aot").glob("*/*.so")):
            return True
    has_compiler = bool(os.environ.get("CUDA_HOME") or shutil.which("nvcc")) or Path("/usr/local/cuda/bin/nvcc").exists()
    return has_compiler and shutil.which("ninja") is not None
