"""The parts of FlashInfer that the backend uses: its functions, the kernel family for a device and
shape, and compilation at start-up.

Follows flashinfer-python 0.6.12 and 0.7.2 (`prefill.py`, `decode.py`, `mla/`, `jit/`). Depends on
no batch and no plan.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from frame.core.errors import ConfigurationError

# FlashAttention-2 kernels (compute capability 8.0 or later), FlashAttention-3 kernels (9.0 only)
KernelFamily = Literal["fa2", "fa3"]

FA3_WIDTHS = (64, 128, 256)
# query heads per key head for which the CUDA-core decode kernel is used; more heads pay for tensor
# cores
CUDA_CORE_GROUPS = (1, 2, 3)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Library:
    """The library's classes and functions that the backend calls."""

    decode: Callable[..., Any]  # BatchDecodeWithPagedKVCacheWrapper
    prefill: Callable[..., Any]  # BatchPrefillWithPagedKVCacheWrapper
    ragged: Callable[..., Any]  # BatchPrefillWithRaggedKVCacheWrapper
    latent: Callable[..., Any]  # BatchMLAPagedAttentionWrapper
    plan_captured: Callable[..., None]  # fast_decode_plan: `decode.plan` without copies
    compile: Callable[[Iterable[Module], Callable[[str], None] | None], None]

    @classmethod
    def load(cls) -> Library:
        """Import the library. Raises ImportError if a name is missing."""
        home = find_cuda_home()
        # without it the library uses the parent folder of `nvcc`, which may be a wrapper elsewhere
        if home is not None:
            os.environ.setdefault("CUDA_HOME", str(home))
        import flashinfer
        from flashinfer.decode import fast_decode_plan
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        return cls(
            decode=flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            prefill=flashinfer.BatchPrefillWithPagedKVCacheWrapper,
            ragged=flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
            latent=BatchMLAPagedAttentionWrapper,
            plan_captured=fast_decode_plan,
            compile=compile_modules,
        )


@dataclass(frozen=True, slots=True)
class Module:
    """One compiled module of the library: the kernels for one set of dtypes and widths."""

    kind: Literal["decode", "prefill", "latent"]
    form: KernelFamily
    dtype: torch.dtype
    kv_dtype: torch.dtype
    width: int  # of queries and keys; for `latent`: the rank
    value_width: int  # for `latent`: the rope width
    window: bool = False
    soft_cap: bool = False

    def make_spec(self) -> Any:
        """The library's build specification (`JitSpec`) of the module."""
        from flashinfer.jit import attention as jit

        types = (self.dtype, self.kv_dtype, self.dtype, torch.int32, self.width, self.value_width)
        if self.kind == "latent":
            return jit.gen_batch_mla_module(self.form, *types, False)
        if self.kind == "decode":
            return jit.gen_batch_decode_module(*types, 0, self.window, self.soft_cap)
        return jit.gen_batch_prefill_module(self.form, *types, 0, self.window, self.soft_cap, False)


def compile_modules(modules: Iterable[Module], on_compile: Callable[[str], None] | None = None) -> None:
    """Compile the modules that are neither prebuilt nor cached, in parallel, and load all.
    `on_compile` gets their names first. Raises ConfigurationError.

    Each module is built as the library itself builds it on first use. Modules built by its
    `build_jit_specs` would be compiled again then, because ninja's log is in another folder.
    """
    specs = [module.make_spec() for module in modules]
    missing = [spec.name for spec in specs if not _is_built(spec)]
    if missing and on_compile is not None:
        on_compile(", ".join(missing))
    elif missing:
        _log.info("compiling %d FlashInfer modules, minutes the first time: %s", len(missing), ", ".join(missing))
    try:
        _build(specs)
    except (RuntimeError, OSError) as error:
        _log.error("FlashInfer's compiler said:\n%s", error)
        raise ConfigurationError(
            f"FlashInfer cannot compile its kernels {', '.join(missing)} ({_first_error_line(str(error))}); "
            "install their headers and compiler as its manual says, or set --attention-backend triton"
        ) from error


def _build(specs: Sequence[Any]) -> None:
    """Build and load each spec in its own thread, which runs compiler processes. Raises the first
    error. The threads are daemons, so that a program that ends does not wait for a compilation."""
    errors: list[Exception] = []

    def build(spec: Any) -> None:
        try:
            spec.build_and_load()
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread below
            errors.append(error)

    threads = [threading.Thread(target=build, args=(spec,), daemon=True) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _is_built(spec: Any) -> bool:
    """Whether the module needs no compiler: prebuilt, or compiled in a build that ninja has
    logged."""
    return bool(spec.is_aot) or (bool(spec.is_compiled) and (Path(spec.build_dir) / ".ninja_log").exists())


def _first_error_line(log: str) -> str:
    """The first error line of a compiler log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line.lower()), lines[0] if lines else "no reason given")


def choose_family(capability: tuple[int, int], dtype: torch.dtype, kv_dtype: torch.dtype, width: int, value_width: int) -> KernelFamily:
    """FlashAttention-3 kernels where they run: compute capability 9.0, equal dtypes, and a
    supported width; otherwise FlashAttention-2."""
    has_width = (width == value_width and width in FA3_WIDTHS) or (width, value_width) == (192, 128)
    return "fa3" if capability[0] == 9 and dtype == kv_dtype and has_width else "fa2"


def find_cuda_home() -> Path | None:
    """The folder of the CUDA toolkit: CUDA_HOME, or that of the `nvcc` on the path; None without a
    compiler."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    compiler = shutil.which("nvcc")
    for home in ([Path(compiler).resolve().parents[1]] if compiler else []) + [Path("/usr/local/cuda")]:
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda.h").exists():
            return home
    return None
