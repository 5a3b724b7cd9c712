"""The compiled libraries, one for each level of instructions: their files, the types of functions.

Used by the kernel, the row operations and the attention backend. Must not know a plugin.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - before the library, which shares the threads of torch's libgomp

from frame.core.errors import ConfigurationError
from frame_x86 import find_level, has_tiles

_INT, _LONG, _FLOAT, _ADDRESS = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_PRODUCT = (  # the weight; x and the result
    *(_INT, _LONG, _LONG, _LONG, _ADDRESS, _ADDRESS, _ADDRESS), *(_ADDRESS, _LONG, _LONG, _ADDRESS, _INT, _INT)
)  # fmt: skip
_FUNCTIONS: dict[str, tuple[type[ctypes._SimpleCData[Any]], ...]] = {
    "frame_x86_multiply": _PRODUCT,
    "frame_x86_multiply_few": _PRODUCT,
    "frame_x86_multiply_panels": _PRODUCT,
    # x; the stream; the weight; the result
    "frame_x86_add_rms_norm": (_ADDRESS, _LONG, _LONG, _LONG, _ADDRESS, _LONG, _ADDRESS, _FLOAT, _ADDRESS, _INT),
    # qkv; the rotation; the norm; the cache; queries
    "frame_x86_norm_rope_store": (
        *(_ADDRESS, _LONG, _LONG, _INT, _INT, _INT, _INT), *(_ADDRESS, _ADDRESS, _ADDRESS, _FLOAT),
        *(_ADDRESS, _ADDRESS, _ADDRESS), *(_ADDRESS, _INT)
    ),
    # queries; the cache; the rows; the scores and the result
    "frame_x86_attend": (
        *(_ADDRESS, _LONG, _INT, _INT, _INT), *(_ADDRESS, _ADDRESS, _LONG), *(_ADDRESS, _LONG, _ADDRESS, _ADDRESS),
        *(_LONG, _FLOAT, _ADDRESS, _INT)
    ),
    # calls that are kept; what `frame_x86_end` returned
    "frame_x86_begin": (),
    "frame_x86_end": (),
    "frame_x86_replay": (_ADDRESS,),
    "frame_x86_free": (_ADDRESS,),
}  # fmt: skip


def find_library(level: str) -> Path | None:
    """The file of the library that was compiled for `level`."""
    paths = [Path(__file__).parent / f"_{level}{suffix}" for suffix in EXTENSION_SUFFIXES]
    return next((path for path in paths if path.exists()), None)


def load_library(name: str) -> ctypes.CDLL | None:
    """The library of plugin `name`; None where the CPU cannot run it. Raises ConfigurationError if
    it was not compiled."""
    if (level := find_level(name)) is None:
        return None
    if (path := find_library(level)) is None:
        raise ConfigurationError("frame-x86 has no compiled library: install it with a C++ compiler, or uninstall it.")
    return _open(path)


def request_tiles(library: ctypes.CDLL) -> bool:
    """Whether the operating system lets this process use the tiles of AMX."""
    return has_tiles() and not library.frame_x86_request_tiles()


@cache
def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in _FUNCTIONS.items():
        if (function := getattr(library, name, None)) is not None:  # only one level has tiles
            function.argtypes, function.restype = arguments, _ADDRESS if name == "frame_x86_end" else None
    return library
