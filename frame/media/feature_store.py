"""`FeatureStore`: the files of features of running requests, on the side of their owner.

A file is shared by the requests of one owner with equal digests, and removed when the last one has
ended: a while later, as a step may be about to read it. Used by front ends, in several threads.
Must not know a modality or an engine.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from frame.core.interfaces.media import FeatureArray
from frame.host.socket_directory import SocketDirectory
from frame.media.files import write_features

GRACE = 30.0  # seconds from the end of the last request to the removal: longer than a step in flight

_Name = tuple[str, bytes]  # owner, digest


@dataclass(slots=True, eq=False)
class StoredFeatures:
    """A file of features."""

    path: str
    arrays: list[FeatureArray]
    num_users: int = 0
    unused_at: float = 0.0  # seconds, monotonic


class FeatureStore:
    """folder: private; None: a new one, made with the first file and removed at the end. No lock is
    held while a file is written."""

    def __init__(self, folder: Path | None = None, grace: float = GRACE) -> None:
        self._folder = folder
        self._grace = grace
        self._lock = threading.Lock()
        self._files: dict[_Name, StoredFeatures] = {}
        self._unused: deque[tuple[float, _Name, StoredFeatures]] = deque()  # since when, ascending; perhaps used again

    def __len__(self) -> int:
        """The number of files."""
        with self._lock:
            return len(self._files)

    @property
    def folder(self) -> Path:
        """Where the files are. Raises OSError."""
        with self._lock:
            if self._folder is None:
                directory = SocketDirectory()
                weakref.finalize(self, directory.remove)
                self._folder = directory.path
            return self._folder

    def add(self, digest: bytes, arrays: Mapping[str, np.ndarray], owner: str = "") -> StoredFeatures:
        """Use the file of these arrays, which is written unless there is one. Raises OSError."""
        return self.acquire(digest, owner) or self.adopt(digest, *write_features(self.folder, arrays), owner)

    def adopt(self, digest: bytes, path: str, arrays: list[FeatureArray], owner: str = "") -> StoredFeatures:
        """Use a file that was written elsewhere, and belongs to the store from now on: it is
        removed at once if there is one already."""
        with self._lock:
            file = self._files.setdefault((owner, digest), StoredFeatures(path, arrays))
            file.num_users += 1
        if file.path != path:
            Path(path).unlink(missing_ok=True)
        return file

    def acquire(self, digest: bytes, owner: str = "") -> StoredFeatures | None:
        """Use the file of a digest; None: there is none."""
        with self._lock:
            file = self._files.get((owner, digest))
            if file is not None:
                file.num_users += 1
            return file

    def release(self, digest: bytes, owner: str = "") -> None:
        """One request less uses the file. Raises KeyError for a file that is not there."""
        with self._lock:
            file = self._files[owner, digest]
            file.num_users -= 1
            if not file.num_users:
                file.unused_at = time.monotonic()
                self._unused.append((file.unused_at, (owner, digest), file))
        self.sweep()

    def sweep(self, *, is_end: bool = False) -> None:
        """Remove the files that no request has used for a while; with `is_end` all without one."""
        paths, before = list[str](), time.monotonic() - (0.0 if is_end else self._grace)
        with self._lock:
            while self._unused and self._unused[0][0] <= before:
                since, name, file = self._unused.popleft()
                if not file.num_users and file.unused_at == since and self._files.get(name) is file:
                    del self._files[name]
                    paths.append(file.path)
        for path in paths:
            Path(path).unlink(missing_ok=True)

    def open_lease(self, owner: str = "") -> FeatureLease:
        """What one request uses."""
        return FeatureLease(self, owner)


class FeatureLease:
    """The files that one request uses, until `close`. Threads may add files meanwhile."""

    def __init__(self, store: FeatureStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._lock = threading.Lock()
        self._digests: list[bytes] | None = []  # None: closed

    def add(self, digest: bytes, arrays: Mapping[str, np.ndarray]) -> StoredFeatures:
        """See `FeatureStore.add`. Raises RuntimeError after `close`, and uses nothing."""
        file = self._store.add(digest, arrays, self._owner)
        with self._lock:
            if self._digests is not None:
                self._digests.append(digest)
                return file
        self._store.release(digest, self._owner)
        raise RuntimeError("the request has ended")

    def close(self) -> None:
        """The request has ended. A second call does nothing."""
        with self._lock:
            digests, self._digests = self._digests or [], None
        for digest in digests:
            self._store.release(digest, self._owner)
