"""In-flight files: the requests that a process works on, readable after the process was killed.

Request recovery uses them to find the request that crashed the engine or the detokenizer. The
engine writes its file when a request is added, removed or prefilled, so a decode costs nothing; the
detokenizer's file has one slot, for the request whose text is being made.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np

INFLIGHT = "inflight"  # the engine's file in a deployment's directory
INFLIGHT_TEXT = "inflight-text"  # the detokenizer's file


def hash_request(rid: str) -> int:
    """A 64-bit hash of a request's name, never 0."""
    return int.from_bytes(blake2b(rid.encode(errors="surrogatepass"), digest_size=8).digest(), "little") or 1


def open_inflight(path: Path, num_slots: int) -> np.ndarray:
    """Create the file and map it, zeroed, uint64 [2, num_slots]: row 0 has the hash of each slot's
    request (0: the slot is empty), row 1 the tokens scheduled for its prefill. Writes reach the
    file even if this process is killed. Raises OSError."""
    path.write_bytes(bytes(16 * num_slots))  # allocates the blocks: a full disk raises here, and would be a SIGBUS later
    return np.memmap(path, np.uint64, "r+", shape=(2, num_slots))


def read_inflight(path: Path) -> dict[int, int]:
    """Read the tokens scheduled for prefill, by request hash; empty if the file is missing or
    cannot be opened."""
    try:
        hashes, prefilled = np.fromfile(path, np.uint64).reshape(2, -1)
    except (OSError, ValueError):
        return {}
    return {name: count for name, count in zip(hashes.tolist(), prefilled.tolist(), strict=True) if name}
