"""Rosters: which requests a process is at work on, in a file that can be read after the process was killed.

One 64-bit mark of a request's name for each slot: the engine's for those on the device, written when a request enters or leaves, so that
a decode costs nothing; the detokenizer's for the one whose text is being made. After the marks, the tokens whose prefill was begun, by
slot. Knows no request.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np

INFLIGHT = "inflight"  # the engine's file in a deployment's directory
INFLIGHT_TEXT = "text-roster"  # the detokenizer's


def hash_request(rid: str) -> int:
    """What stands for a request's name: 64 bits, never 0."""
    return int.from_bytes(blake2b(rid.encode(errors="surrogatepass"), digest_size=8).digest(), "little") or 1


def open_inflight(path: Path, num_slots: int) -> np.ndarray:
    """A new roster, uint64 [2, num_slots], marks and prefilled tokens, all zero. Raises OSError. Its bytes are the file's, whatever
    becomes of this process."""
    path.write_bytes(bytes(16 * num_slots))  # now, as a full disk found later would be a signal instead of an error
    return np.memmap(path, np.uint64, "r+", shape=(2, num_slots))


def read_inflight(path: Path) -> dict[int, int]:
    """Prefilled tokens by the marks of the requests that were in work last; empty when there is no roster, or no descriptor to read it
    with."""
    try:
        marks, prefilled = np.fromfile(path, np.uint64).reshape(2, -1)
    except (OSError, ValueError):
        return {}
    return {mark: count for mark, count in zip(marks.tolist(), prefilled.tolist(), strict=True) if mark}
