"""The compiled library `_products`: its file, and the types of its functions.

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

_INT, _LONG, _FLOAT, _ADDRESS = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[type[ctypes._SimpleCData[Any]], ...]] = {
    # the weight; x and the result
    "frame_amx_multiply": (
        *(_INT, _LONG, _LONG, _LONG, _ADDRESS, _ADDRESS, _ADDRESS), *(_ADDRESS, _LONG, _LONG, _ADDRESS, _INT, _INT)
    ),
    # x; the stream; the weight; the result
    "frame_amx_add_rms_norm": (_ADDRESS, _LONG, _LONG, _LONG, _ADDRESS, _LONG, _ADDRESS, _FLOAT, _ADDRESS, _INT),
    # qkv; the rotation; the norm; the cache; queries
    "frame_amx_norm_rope_store": (
        *(_ADDRESS, _LONG, _LONG, _INT, _INT, _INT, _INT), *(_ADDRESS, _ADDRESS, _ADDRESS, _FLOAT),
        *(_ADDRESS, _ADDRESS, _ADDRESS), *(_ADDRESS, _INT)
    ),
    # queries; the cache; the rows; the scores and the result
    "frame_amx_attend": (
        *(_ADDRESS, _LONG, _INT, _INT, _INT), *(_ADDRESS, _ADDRESS, _LONG), *(_ADDRESS, _LONG, _ADDRESS, _ADDRESS),
        *(_LONG, _FLOAT, _ADDRESS, _INT)
    ),
    # calls that are kept; what `frame_amx_end` returned
    "frame_amx_begin": (),
    "frame_amx_end": (),
    "frame_amx_replay": (_ADDRESS,),
    "frame_amx_free": (_ADDRESS,),
}  # fmt: skip


def find_library() -> Path | None:
    """The file of the compiled library."""
    paths = [Path(__file__).parent / f"_products{suffix}" for suffix in EXTENSION_SUFFIXES]
    return next((path for path in paths if path.exists()), None)


def load_library() -> ctypes.CDLL | None:
    """The library; None where the CPU or the operating system has no AMX tiles with bfloat16.
    Raises ConfigurationError if it was not compiled."""
    path = find_library()
    if path is None:
        raise ConfigurationError("frame-amx has no compiled library: install it with a C++ compiler, or uninstall it.")
    return _open(path)


@cache
def _open(path: Path) -> ctypes.CDLL | None:
    library = ctypes.CDLL(str(path))
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _ADDRESS if name == "frame_amx_end" else None
    return None if library.frame_amx_open() else library
