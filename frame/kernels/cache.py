"""Where compiled kernels are kept between starts, and how many a start had to compile.

Triton keeps what it compiled by a hash of everything that the code depends on; here is only decided in which folder, and noted for which
configurations a start has gone through, so that the next can tell whether it will be quick. Importing this module loads no Triton.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CACHE_DIR_VARIABLE = "TRITON_CACHE_DIR"  # the user's word, if he says one
_NOTES = "frame-complete"  # folder of notes in the cache


@dataclass(slots=True)
class KernelCounts:
    """Kernels of a start: those compiled, with the seconds that this took (in all threads together), and those that the cache had."""

    compiled: int = 0
    loaded: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelCache:
    """A folder of compiled kernels. `key` names what a start compiles for: chip, plugins and their versions, the model's shape."""

    folder: Path
    key: str

    @property
    def is_warm(self) -> bool:
        """Whether a start of this key has finished before."""
        return self._note.is_file()

    def complete(self, counts: KernelCounts) -> None:
        """A start has finished. A folder that cannot be written to is no reason to fail: the next start says `cold` once more."""
        with contextlib.suppress(OSError):
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.write_text(json.dumps(asdict(counts)))

    @property
    def _note(self) -> Path:
        return self.folder / _NOTES / self.key


def select_cache_folder(chip: str, environ: MutableMapping[str, str] | None = None) -> Path:
    """The folder that Triton is to use, which is set in the environment unless the user has: one for each chip and version of Triton."""
    environ = os.environ if environ is None else environ
    if not environ.get(CACHE_DIR_VARIABLE):
        root = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".cache")
        name = re.sub(r"[^a-z0-9.]+", "-", f"{_triton_version()} {chip}".lower()).strip("-")
        environ[CACHE_DIR_VARIABLE] = str(Path(root) / "frame" / "triton" / name)
    return Path(environ[CACHE_DIR_VARIABLE])


@contextlib.contextmanager
def count_compilations() -> Iterator[KernelCounts]:
    """Counts what Triton compiles, or loads, until the end of the block. What listened before hears nothing meanwhile."""
    counts = KernelCounts()
    try:
        from triton import knobs
    except ImportError:  # nothing to count
        yield counts
        return

    def heard(*, times: Any, cache_hit: bool, **_: Any) -> None:
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
