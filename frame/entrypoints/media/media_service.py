"""`MediaService`: turns the files of a request into items, ready for a prompt.

Used by the HTTP server and the offline engine. It fetches, and lets the media processes decode. It
must not know a route, a token id or a modality's plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from frame.config.resolved import Resolved
from frame.core.errors import ConfigurationError
from frame.core.interfaces.media import FeatureArray
from frame.entrypoints.engine_client.quotas import FairSemaphore
from frame.entrypoints.media.fetch import AllowedDomains, Fetcher, FetchError
from frame.entrypoints.media.media_pool import FatalFileError, MediaPool
from frame.entrypoints.media.media_process import Decoded, Job
from frame.interfaces.modality import MediaError, MediaLayout

DEFAULT_LIMITS = MappingProxyType({"image": 64, "video": 4, "audio": 16})  # items of a request, see `media.limits`
MAX_FETCHES = 64  # at once
MAX_PARTS = 1024  # that are fetched and decoded, or wait for it
MAX_OWNER_PARTS = 512  # those of one owner
MAX_FATAL = 256  # digests of files that ended two processes, which are refused at once


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One part of a client's request."""

    modality: str  # "image", "video", "audio"
    source: str | bytes  # a URL (data:, http(s):, file:), or the file's bytes
    param: str  # the field that the client sent: "messages[1].content[2].image_url"
    options: Mapping[str, Any] = field(default_factory=dict)  # "detail", "fps"


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """An item without its place in a prompt."""

    modality: str
    digest: bytes
    layout: MediaLayout
    placeholder: str
    row_token: str
    path: str  # of the file of features
    arrays: list[FeatureArray]
    owner: str = ""


class MediaInputError(Exception):
    """A part of a request cannot be used. `is_busy`: the server has no room for it now."""

    def __init__(self, sentence: str, param: str, *, is_busy: bool = False) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.param = param
        self.is_busy = is_busy


@dataclass(slots=True)
class MediaCounters:
    """Totals since the start, for metrics."""

    items: Counter[str] = field(default_factory=Counter)  # by modality, that were prepared
    shared: int = 0  # items that another request held already
    bytes: int = 0  # of the files
    fetch_seconds: float = 0.0
    decode_seconds: float = 0.0  # of the CPU, in the media processes
    refusals: Counter[str] = field(default_factory=Counter)  # by modality


@dataclass(eq=False, slots=True)
class _Held:
    """A file that requests hold, or wait for."""

    key: tuple[str, bytes]  # owner and digest
    task: asyncio.Task[PreparedMedia]
    count: int = 0


class MediaService:
    """Prepares the media of requests. folder: private, for the files of features. Equal files of
    one owner are prepared once while a request holds them. `counters` and `pool` are for
    metrics."""

    def __init__(self, resolved: Resolved, folder: Path) -> None:
        if resolved.media is None:
            raise ValueError("the configuration has no media")
        media = resolved.user.media
        self.pool = MediaPool(resolved, folder)
        self.counters = MediaCounters()
        self._limits = {name: media.limits.get(name, DEFAULT_LIMITS.get(name, 1)) for name in resolved.media.modalities}
        self._model = resolved.served_name
        self._max_bytes = media.max_bytes
        self._fixed = _canonical(media.processor_options)
        try:
            domains = AllowedDomains.parse(media.allowed_domains)
        except ValueError as error:
            raise ConfigurationError(f"media.allowed_domains: {error}.") from None
        self._fetcher = Fetcher(domains, media.allowed_local_path, media.max_bytes, media.timeout)
        self._fetches = FairSemaphore(MAX_FETCHES)
        self._decodes = FairSemaphore(self.pool.num_processes)
        self._held: dict[tuple[str, bytes], _Held] = {}
        self._in_preparation: Counter[str] = Counter()  # parts, by owner
        self._fatal: dict[bytes, None] = {}  # digests of files that ended two processes, the latest last

    async def start(self) -> None:
        """Start the media processes. Raises ConfigurationError for a checkpoint whose processor
        they cannot read, RuntimeError if they do not start."""
        await self.pool.start()
        self._limits = {name: limit for name, limit in self._limits.items() if name in self.pool.tokens}

    async def close(self) -> None:
        """End the media processes, and remove the files."""
        for held in list(self._held.values()):
            held.task.cancel()
        await self.pool.close()
        await asyncio.gather(*(held.task for held in list(self._held.values())), return_exceptions=True)
        for held in list(self._held.values()):
            self._drop(held)

    def placeholders(self) -> Mapping[str, str]:
        """By modality the text that stands for an item in a rendered chat template."""
        return {name: placeholder for name, (placeholder, _) in self.pool.tokens.items()}

    async def prepare(self, parts: Sequence[MediaPart], owner: str) -> list[PreparedMedia]:
        """The items of the parts, in order, which the caller releases. owner: whose request it is;
        nothing is shared between owners. Raises MediaInputError."""
        self._check(parts, owner)
        self._in_preparation[owner] += len(parts)
        tasks = [asyncio.ensure_future(self._prepare(part, owner)) for part in parts]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            self.release([each for each in done if isinstance(each, PreparedMedia)])
            raise
        finally:
            self._in_preparation[owner] -= len(parts)
            if not self._in_preparation[owner]:
                del self._in_preparation[owner]

    def release(self, items: Sequence[PreparedMedia]) -> None:
        """The request of these items has ended."""
        for item in items:
            if (held := self._held.get((item.owner, item.digest))) is not None:
                self._let_go(held)

    def _check(self, parts: Sequence[MediaPart], owner: str) -> None:
        """Raise MediaInputError for parts that the model does not read, or that are too many."""
        counts: Counter[str] = Counter()
        for part in parts:
            counts[part.modality] += 1
            if part.modality not in self._limits:
                known = " and ".join(self._limits) or "text alone"
                raise self._refuse(part, f"the model {self._model} does not read {part.modality} parts here; it reads {known}")
            if counts[part.modality] > (limit := self._limits[part.modality]):
                sentence = f"the request has more than {limit} {part.modality} parts; send fewer, or raise --limit-mm-per-prompt"
                raise self._refuse(part, sentence)
        if not parts:
            return
        busy = self._in_preparation[owner] + len(parts) > MAX_OWNER_PARTS or self._in_preparation.total() + len(parts) > MAX_PARTS
        if busy and self._in_preparation:
            raise self._refuse(parts[0], "the server prepares too many media files now; try again later", is_busy=True)

    def _refuse(self, part: MediaPart, sentence: str, *, is_busy: bool = False) -> MediaInputError:
        self.counters.refusals[part.modality if part.modality in self._limits else "other"] += 1
        return MediaInputError(sentence, part.param, is_busy=is_busy)

    async def _prepare(self, part: MediaPart, owner: str) -> PreparedMedia:
        options = {name: value for name, value in part.options.items() if value is not None}
        try:
            data = await self._fetch(part.source, owner)
            text = _canonical([part.modality, options])
            digest = await _run_unless_short(data, lambda: make_digest(data, self._fixed, text))
            if digest in self._fatal:
                raise MediaError("the file is damaged, or takes too much memory or time to decode; it was refused before")
            held = self._hold(owner, digest, Job(part.modality, data, options))
            try:
                return await asyncio.shield(held.task)
            except BaseException:
                self._let_go(held)
                raise
        except (FetchError, MediaError) as error:
            raise self._refuse(part, str(error)) from None

    async def _fetch(self, source: str | bytes, owner: str) -> bytes:
        if isinstance(source, bytes):
            if len(source) > self._max_bytes:
                raise self._fetcher.too_long(len(source))
            return source
        async with self._fetches.hold_slot(owner):
            began = time.monotonic()
            try:
                return await self._fetcher.fetch(source)
            finally:
                self.counters.fetch_seconds += time.monotonic() - began

    def _hold(self, owner: str, digest: bytes, job: Job) -> _Held:
        key = (owner, digest)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held(key, asyncio.create_task(self._decode(key, job)))
        else:
            self.counters.shared += 1
        held.count += 1
        return held

    async def _decode(self, key: tuple[str, bytes], job: Job) -> PreparedMedia:
        async with self._decodes.hold_slot(key[0]):
            try:
                # A process cannot be asked to stop, and one that is ended takes seconds to replace.
                decoded = await _finish(self.pool.decode(job))
            except FatalFileError:
                self._fatal[key[1]] = None
                if len(self._fatal) > MAX_FATAL:
                    del self._fatal[next(iter(self._fatal))]
                raise
        self.counters.items[job.modality] += 1
        self.counters.bytes += len(job.data)
        self.counters.decode_seconds += decoded.seconds
        placeholder, row_token = self.pool.tokens[job.modality]
        return PreparedMedia(job.modality, key[1], decoded.layout, placeholder, row_token, decoded.path, decoded.arrays, key[0])

    def _let_go(self, held: _Held) -> None:
        held.count -= 1
        if held.count == 0:
            del self._held[held.key]
            if not held.task.done():
                held.task.cancel()
            held.task.add_done_callback(_remove_file)

    def _drop(self, held: _Held) -> None:
        del self._held[held.key]
        _remove_file(held.task)


def _remove_file(task: asyncio.Task[PreparedMedia] | asyncio.Task[Decoded]) -> None:
    if not task.cancelled() and task.exception() is None:
        Path(task.result().path).unlink(missing_ok=True)


async def _finish(work: Coroutine[Any, Any, Decoded]) -> Decoded:
    """The result of `work`, which goes on if the caller is cancelled; then its file is removed."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():  # the process's place is taken until then
            with contextlib.suppress(asyncio.CancelledError, MediaError):
                await asyncio.shield(task)
        _remove_file(task)
        raise


def make_digest(data: bytes, *texts: bytes) -> bytes:
    """SHA-256 of a file and of all options that its features depend on."""
    digest = hashlib.sha256()
    for each in (*texts, data):
        digest.update(len(each).to_bytes(8, "little"))
        digest.update(each)
    return digest.digest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


async def _run_unless_short(data: bytes, call: Callable[[], bytes]) -> bytes:
    return call() if len(data) < 1 << 18 else await asyncio.to_thread(call)
