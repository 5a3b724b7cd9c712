"""Downloads files of one commit into the cache of huggingface_hub, which then links them into its
snapshot. Used by `pull`.

huggingface_hub speaks the protocol. It does not continue a file in another process, so this module
keeps the partial file, and checks the hash of the whole one. Must not know which files are wanted.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import queue
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Self

from frame.checkpoint.hub_cache import HubName, find_cache
from frame.entrypoints.hub.errors import DownloadError, get_endpoint
from frame.host.progress import Advance

MAX_CONNECTIONS = 4  # files that are downloaded at the same time
MAX_HTTP_BYTES = 50_000_000_000  # huggingface.co sends larger files by the Xet protocol alone, for which its library has no resumption
_ETAG = re.compile(r"[0-9A-Za-z._-]{1,128}")  # it names a file of the cache
_SHA256, _GIT_BLOB = 64, 40  # hexadecimal digits
_BLOCK = 1 << 20  # bytes that are hashed at once


class Download:
    """Downloads files of one commit into the cache, from several threads. `stop`: set to end them
    with the next chunk."""

    def __init__(self, name: HubName, commit: str, advance: Advance) -> None:
        self.stop = threading.Event()
        self._name, self._commit, self._advance = name, commit, advance
        self._blobs: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by ETag: equal files have one

    def fetch(self, file: str) -> None:
        """Download a file and link it into the snapshot."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        url = hf_hub_url(self._name.repository, file, revision=self._commit)
        metadata = get_hf_file_metadata(url)
        if metadata.commit_hash != self._commit:
            raise DownloadError(f"{get_endpoint()} sent {file} of commit {metadata.commit_hash}, not of {self._commit}; check HF_ENDPOINT.")
        if metadata.etag is None or not _ETAG.fullmatch(metadata.etag):
            raise DownloadError(f"{get_endpoint()} sent no usable ETag of {file}; check HF_ENDPOINT.")
        blob = self._name.folder / "blobs" / metadata.etag
        with self._blobs[metadata.etag]:
            by_http = not blob.exists() and (metadata.size or 0) <= MAX_HTTP_BYTES
            if by_http:
                self._download(url, blob, file, metadata.size)
        hf_hub_download(self._name.repository, file, revision=self._commit, cache_dir=find_cache())
        if not by_http:
            self._advance(blob.stat().st_size)

    def _download(self, url: str, blob: Path, file: str, size: int | None) -> None:
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        blob.parent.mkdir(parents=True, exist_ok=True)
        incomplete = blob.with_name(f"{blob.name}.incomplete")
        with incomplete.open("ab") as partial_file:
            _lock(partial_file, file)
            done = partial_file.tell()
            if size is not None and done > size:
                partial_file.truncate(0)
                done = 0
            if done and done == size:
                self._advance(done)
            else:
                bar = partial(_Bar, self._advance, self.stop)
                http_get(url, partial_file, resume_size=done, headers=build_hf_headers(), expected_size=size, tqdm_class=bar)  # type: ignore[arg-type]
            partial_file.flush()
            if not _has_hash(incomplete, blob.name):
                incomplete.unlink()
                raise DownloadError(f"{file} of {self._name} was damaged on its way from {get_endpoint()} and is deleted; start again.")
            incomplete.replace(blob)


class _Bar:
    """Takes the place of the class of tqdm whose objects huggingface_hub tells its progress."""

    def __init__(self, advance: Advance, stop: threading.Event, *_: object, initial: int = 0, **__: object) -> None:
        self._advance, self._stop = advance, stop
        advance(initial)

    def update(self, amount: float | None = 1) -> None:
        if self._stop.is_set():
            raise DownloadError("stopped")
        self._advance(int(amount or 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _lock(file: IO[bytes], name: str) -> None:
    """Keep other processes from appending to a partial file. Raises DownloadError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise DownloadError(f"another process is downloading {name}; start again when it has ended.") from None
        # the file system has no locks: the hash of the whole file is checked


def _has_hash(path: Path, etag: str) -> bool:
    """Whether a file has the content that the hub's ETag names: its SHA-256, or Git's hash of a
    small file. Mirrors may have others, which are not checked."""
    if len(etag) == _SHA256:
        digest = hashlib.sha256()
    elif len(etag) == _GIT_BLOB:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        return True
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest() == etag


def run_all(jobs: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Run jobs in a few threads, and raise the first error. The threads are daemons: a signal ends
    the process although a server sends nothing."""
    todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)

    def work() -> None:
        while not stop.is_set():
            try:
                todo.get_nowait()()
            except queue.Empty:
                return
            except Exception as error:  # noqa: BLE001 - raised by the caller's thread
                results.put(error)
            else:
                results.put(None)

    threads = [threading.Thread(target=work, name="download", daemon=True) for _ in range(min(MAX_CONNECTIONS, len(jobs)))]
    for thread in threads:
        thread.start()
    try:
        for _ in jobs:
            if (error := results.get()) is not None:
                raise error
    finally:
        stop.set()
