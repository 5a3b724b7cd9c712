"""Files of features: the arrays of a media item, written once and mapped by every rank.

Used by the media processes and front ends, which write them, and by the ranks' encoder. The owner
of the folder unlinks a file; a rank that has mapped it keeps its content. Must not know a modality.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from frame.core.interfaces.media import FeatureArray, MediaItem

_ALIGNMENT = 64  # bytes
_UNFINISHED = ".unfinished"


def write_features(folder: Path, arrays: Mapping[str, np.ndarray]) -> tuple[str, list[FeatureArray]]:
    """Write arrays to a new file that only this user can read. -> its path, and where each array
    is. Raises OSError, and leaves no file, where the folder has no room."""
    described, offset = list[FeatureArray](), 0
    for name, array in arrays.items():
        described.append(FeatureArray(name, array.dtype.str, array.shape, offset))
        offset += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    handle, path = tempfile.mkstemp(dir=folder, prefix=f"{os.getpid()}-", suffix=_UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.truncate(max(offset, 1))
            for each, array in zip(described, arrays.values(), strict=True):
                file.seek(each.offset)
                file.write(np.ascontiguousarray(array).data)
        finished = path.removesuffix(_UNFINISHED) + ".features"
        Path(path).rename(finished)
    except BaseException:
        Path(path).unlink()
        raise
    return finished, described


def remove_unfinished(folder: Path, pid: int) -> None:
    """Remove what a process that has ended was writing."""
    for path in folder.glob(f"{pid}-*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def map_features(item: MediaItem) -> dict[str, np.ndarray]:
    """The item's arrays by name, read-only and backed by the file. Raises FileNotFoundError if its
    owner has removed it."""
    return map_arrays(item.path, item.arrays)


def map_arrays(path: str, arrays: Sequence[FeatureArray]) -> dict[str, np.ndarray]:
    """As `map_features`, of a file without an item."""
    data = np.memmap(path, mode="r")
    return {
        each.name: np.ndarray(each.shape, np.dtype(each.dtype), buffer=data, offset=each.offset) if 0 not in each.shape
        else np.empty(each.shape, np.dtype(each.dtype))
        for each in arrays
    }  # fmt: skip
