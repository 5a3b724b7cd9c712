"""Selects the folder of Triton's kernel cache, and counts the kernels that a start compiles.

Triton names each cache entry by a hash of the source, the options and the device. This module
selects the folder and records which configurations a start has completed, so that the next start
can report whether it is warm. Importing this module does not import Triton.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CACHE_DIR_VARIABLE = "TRITON_CACHE_DIR"  # Triton's own variable: a value that the user has set is kept
_NOTES = "frame-complete"  # subfolder of the cache with one file for each completed start


@dataclass(slots=True)
class KernelCounts:
    """The kernels of one start. `compiled`: kernels that were compiled; `loaded`: kernels that the
    cache had; `seconds`: compile time, summed over threads."""

    compiled: int = 0
    loaded: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelCache:
    """A folder of compiled kernels.

    `folder` is Triton's cache folder. `key` identifies what a start compiles for: GPU, plugins with
    their versions, and the shape of the model.
    """

    folder: Path
    key: str

    @property
    def is_warm(self) -> bool:
        """Whether a start with this key has completed before."""
        return self._note.is_file()

    def mark_complete(self, counts: KernelCounts) -> None:
        """Record that a start has completed. A folder that cannot be written to is ignored; the
        next start then reports a cold cache again."""
        with contextlib.suppress(OSError):
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.write_text(json.dumps(asdict(counts)))

    @property
    def _note(self) -> Path:
        return self.folder / _NOTES / self.key


def select_cache_folder(chip: str, environ: MutableMapping[str, str] | None = None) -> Path:
    """Return Triton's cache folder. If the user has not set it, set it in the environment to one
    folder per GPU model and Triton version."""
    environ = os.environ if environ is None else environ
    if not environ.get(CACHE_DIR_VARIABLE):
        root = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".cache")
        name = re.sub(r"[^a-z0-9.]+", "-", f"{_triton_version()} {chip}".lower()).strip("-")
        environ[CACHE_DIR_VARIABLE] = str(Path(root) / "frame" / "triton" / name)
    return Path(environ[CACHE_DIR_VARIABLE])


def start_key() -> None:
    """Hash the Triton installation in a thread. The hash is a part of each kernel's key, and Triton
    otherwise computes it, in 0.7 to 1.5 s, when the first kernel is launched."""
    with contextlib.suppress(ImportError):  # Triton is not installed, or has another name for it
        from triton.runtime.cache import triton_key

        threading.Thread(target=triton_key, name="triton-key", daemon=True).start()


@contextlib.contextmanager
def count_compilations() -> Iterator[KernelCounts]:
    """Count the kernels that Triton compiles or loads inside the block. A listener that was
    installed before is not called meanwhile."""
    counts = KernelCounts()
    try:
        from triton import knobs
    except ImportError:  # Triton is not installed
        yield counts
        return

    lock = threading.Lock()

    def heard(*, times: Any, cache_hit: bool, **_: Any) -> None:
        with lock:
            if cache_hit:
                counts.loaded += 1
            else:
                counts.compiled += 1
                counts.seconds += times.total / 1e6

    before, knobs.compilation.listener = knobs.compilation.listener, heard
    try:
        yield counts
    finally:
        knobs.compilation.listener = before
        counts.seconds = round(counts.seconds, 2)


def _triton_version() -> str:
    try:
        return f"triton {version('triton')}"
    except PackageNotFoundError:
        return "triton"
