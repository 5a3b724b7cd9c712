"""What the backends can do that call kernels of installed libraries. Plain data: imports no torch and no library.

Knows how a library's kernels come to be (prebuilt, or compiled at the start), since one without them is not to be chosen.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from frame.core.interfaces.attention import AttentionCapabilities, AttentionNeeds
from frame.core.interfaces.plugin import Reason


class FlashInferOptions(BaseModel):
    """Settings of the `flashinfer` backend."""

    model_config = ConfigDict(extra="forbid")

    workspace_mib: int = Field(384, ge=16, le=8192, description="Device memory for the parts of rows that are split, in MiB.")


@dataclass(frozen=True, slots=True)
class FlashInferCapabilities(AttentionCapabilities):
    """The wrappers' own limits, and that there must be kernels: prebuilt ones or a compiler."""

    def unsupported(self, needs: AttentionNeeds) -> list[Reason]:
        reasons = AttentionCapabilities.unsupported(self, needs)
        if needs.kind == "mha" and needs.head_dim != needs.v_head_dim:
            reasons.append(Reason(f"keys and values are of one width, the model's are {needs.head_dim} and {needs.v_head_dim}"))
        if needs.kind == "mla":
            if needs.sliding_window or needs.soft_cap:
                reasons.append(Reason("its latent attention has no sliding window and no soft cap"))
            if needs.kv_dtype != needs.dtype:
                reasons.append(Reason(f"cannot read a {needs.kv_dtype} cache of latents", f"cache.kv_dtype: {needs.dtype}"))
        if not reasons and needs.device == "cuda" and not _has_kernels():
            reasons.append(Reason("compiles its kernels at the start and finds no nvcc or no ninja; set CUDA_HOME and install ninja"))
        return reasons


FLASHINFER = FlashInferCapabilities(
    devices=("cuda",),
    compute_capability=((8, 0), (12, 1)),
    kinds=("mha", "mla"),
    head_dims=(64, 128, 256),
    latents=((512, 64),),
    dtypes=("bfloat16", "float16"),
    kv_dtypes=("fp8_e4m3",),
    sliding_window=True,
    soft_cap=True,
    graphs="decode",
)


def _has_kernels() -> bool:
    """Whether FlashInfer brings compiled kernels, or can compile them."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    found = importlib.util.find_spec("flashinfer")
    for folder in found.submodule_search_locations or () if found is not None else ():
        if any(Path(folder, "data", "aot").glob("*/*.so")):
            return True
    has_compiler = bool(os.environ.get("CUDA_HOME") or shutil.which("nvcc")) or Path("/usr/local/cuda/bin/nvcc").exists()
    return has_compiler and shutil.which("ninja") is not None
