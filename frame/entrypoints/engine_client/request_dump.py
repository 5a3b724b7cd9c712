"""`RequestDump`: writes the sequences that have ended to JSON lines, for `frame replay` and `frame
bench serve --dump`. `RecordedSequence`: one line.

Filled by `ClientStats` and, at a crash of the engine, by `EngineClient`. A thread encodes and
writes. Must not know HTTP, hence no API key and no header; a tenant's name is not written either.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import stat
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from frame.config.server_sections import LogSection
from frame.core.errors import ConfigurationError
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish
from frame.entrypoints.engine_client.response_state import SequenceState

log = logging.getLogger(__name__)

VERSION = 1
BLOCK = 64  # prompt tokens for each entry of `RecordedSequence.blocks`
PATTERNS = ("requests-*.jsonl", "crash-*.jsonl")
MAX_WAITING = 8 << 20  # tokens of sequences that wait for the thread; more are not recorded
CRASH_SECONDS = 300.0  # age of what a crash writes although `log.request_dump_share` left it out
CRASH_BYTES = 64 << 20  # size of it
PARTS = 8  # files of a dump at its limits of size and age
CHECK = 5.0  # seconds between two looks at the age of the files
# What shapes have of the sampling parameters: no text, no token id, and no seed.
SHAPE_PARAMS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "ignore_eos", "logprobs", "prompt_logprobs", "num_speculative_tokens", "stream_interval",
)  # fmt: skip

Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class DumpHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file."""

    format: Literal["frame-request-dump"] = "frame-request-dump"
    version: int = VERSION
    model: str = ""
    content: Literal["full", "shapes"] = "full"
    block: Annotated[int, Meta(ge=1, le=1 << 20)] = BLOCK


class RecordedSequence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sequence that has ended, or that a crash has interrupted. Times without `at` are seconds
    from the arrival; None: it had no token."""

    at: Annotated[float, Meta(ge=0, le=1e11)]  # arrival, in Unix time
    id: str = ""  # the name of the sequence; in shapes a number
    params: SamplingParams  # with the seed; in shapes those of `SHAPE_PARAMS`
    num_prompt: Count
    num_output: Count
    finish: Literal["stop", "length", "abort", "error", "running"]
    prompt: list[Token] | None = None  # None: shapes
    output: list[Token] | None = None
    # In shapes: for each whole block of the prompt, a keyed hash of the tokens up to its end. Equal
    # prefixes of one run of the server have equal entries. The key is never written.
    blocks: list[Annotated[int, Meta(ge=0)]] = []
    cached: Count = 0  # prompt tokens from the prefix cache
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    media: Count = 0  # images, videos and audio of the prompt
    is_transferred: bool = False  # its prompt's blocks came from or went to another server
    adapter: str = ""  # its name; in shapes "-"
    version: str = ""  # of the weights that made the last token
    grammar: str = ""  # kind of the constraint
    queued: Seconds = 0.0
    first: Seconds | None = None
    last: Seconds | None = None
    end: Seconds = 0.0


def make_folder(folder: Path) -> None:
    """Make the folder of `log.request_dump`. Raises ConfigurationError if others can read it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigurationError(f"log.request_dump {folder} cannot be made ({error.strerror}); choose another folder") from error
    if status.st_mode & 0o077:
        raise ConfigurationError(f"log.request_dump {folder} is open to other users; run chmod 700 {folder}, or choose another folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"log.request_dump {folder} cannot be written; choose another folder")


class RequestDump:
    """`settings.request_dump` is a folder that `make_folder` has made. Methods never wait and never
    raise: what cannot be written is counted, and the log says so once."""

    def __init__(self, settings: LogSection, model: str) -> None:
        folder = Path(settings.request_dump or "")
        self._share = settings.request_dump_share
        self._secret = secrets.token_bytes(16)
        self._lines = _Lines(settings.request_dump_content, self._secret)
        head = msgspec.json.encode(DumpHead(model=model, content=settings.request_dump_content)) + b"\n"
        self._files = DumpFiles(folder, head, settings.request_dump_max_bytes, settings.request_dump_max_age)
        self._kept: deque[tuple[float, bytes]] = deque()  # lines that the share left out, for a crash, with their times
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._waiting = 0  # tokens in the queue
        self.dropped = 0  # sequences that were not recorded
        self._queue: queue.SimpleQueue[list[_Ended] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="request-dump", daemon=True)
        self._thread.start()

    def record(self, sequence: SequenceState, finish: Finish, now: float) -> None:
        """Record a sequence that has ended (`now`: `time.perf_counter`)."""
        self._put([_Ended(sequence, finish.reason, now, is_chosen=self._is_chosen(sequence))])

    def record_crash(self, running: Sequence[SequenceState]) -> None:
        """The engine has crashed: write the last minutes, and the sequences that it had."""
        now = time.perf_counter()
        self._put([_Ended(sequence, "running", now, is_chosen=True) for sequence in running], is_crash=True)

    def close(self) -> None:
        """Write what waits."""
        self._queue.put(None)
        self._thread.join(10)

    def _is_chosen(self, sequence: SequenceState) -> bool:
        """All sequences of a request, or none."""
        if self._share >= 1:
            return True
        name = f"{sequence.request.owner}:{sequence.request.rid}".encode(errors="replace")
        return int.from_bytes(blake2b(name, digest_size=4, key=self._secret).digest()) < self._share * 2**32

    def _put(self, ended: list[_Ended], is_crash: bool = False) -> None:
        size = sum(each.size for each in ended)
        with self._lock:
            is_full = self._waiting + size > MAX_WAITING and not is_crash
            if not is_full:
                self._waiting += size
        if is_full:
            self._drop("sequences end faster than the thread writes them")
        else:
            self._queue.put([_CRASH, *ended] if is_crash else ended)

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:
            log.warning("log.request_dump: %s sequences are not recorded, because %s", self.dropped, why)

    # the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        checked = time.monotonic()
        while True:
            try:
                ended = self._queue.get(timeout=CHECK)
            except queue.Empty:
                ended = []
            if ended is None:
                self._files.close()
                return
            with self._lock:
                self._waiting -= sum(each.size for each in ended)
            try:
                if ended:
                    self._write(ended)
                if time.monotonic() - checked >= CHECK:
                    checked = time.monotonic()
                    self._forget(time.time())
                    self._files.check_age()
            except OSError as error:
                self._drop(f"{self._files.folder} cannot be written ({error.strerror})")
            except Exception:  # the thread must live on
                log.exception("log.request_dump failed on a sequence")

    def _write(self, ended: list[_Ended]) -> None:
        if is_crash := ended[0] is _CRASH:
            ended = ended[1:]
        lines = [self._lines.encode(each) for each in ended]
        if is_crash:
            self._files.write_crash([*(line for _, line in self._kept), *lines])
            self._kept.clear()
            self._kept_bytes = 0
            return
        for each, line in zip(ended, lines, strict=True):
            if each.is_chosen:
                self._files.write(line)
            else:
                self._kept.append((time.time(), line))
                self._kept_bytes += len(line)
        self._forget(time.time())

    def _forget(self, now: float) -> None:
        while self._kept and (self._kept_bytes > CRASH_BYTES or self._kept[0][0] < now - CRASH_SECONDS):
            self._kept_bytes -= len(self._kept.popleft()[1])


class _Ended:
    """A sequence for the thread. `output_ids` of one that goes on is copied."""

    __slots__ = ("at", "is_chosen", "now", "output_ids", "reason", "sequence", "size")

    def __init__(self, sequence: SequenceState | None, reason: str, now: float, is_chosen: bool) -> None:
        self.sequence, self.reason, self.now, self.is_chosen = sequence, reason, now, is_chosen
        self.output_ids: array[int] = array("i")
        self.size, self.at = 0, 0.0
        if sequence is not None:
            output = sequence.recovery.output_ids
            self.output_ids = output[:] if reason == "running" else output
            self.size = len(sequence.prompt) + len(output)
            self.at = time.time() - (now - sequence.request.created)


_CRASH = _Ended(None, "", 0.0, is_chosen=False)


class _Lines:
    """Encodes sequences as lines."""

    def __init__(self, content: Literal["full", "shapes"], secret: bytes) -> None:
        self._is_full = content == "full"
        self._secret = secret
        self._encoder = msgspec.json.Encoder()
        self._number = 0

    def encode(self, ended: _Ended) -> bytes:
        sequence = ended.sequence
        assert sequence is not None
        return self._encoder.encode(self._build(sequence, ended)) + b"\n"

    def _build(self, sequence: SequenceState, ended: _Ended) -> RecordedSequence:
        params, recovery, times = sequence.params, sequence.recovery, sequence.times
        created, use, generate = sequence.request.created, recovery.adapter, recovery.generate
        self._number += 1
        return RecordedSequence(
            at=ended.at,
            id=sequence.name if self._is_full else str(self._number),
            params=params if self._is_full else SamplingParams(**{name: getattr(params, name) for name in SHAPE_PARAMS}),
            num_prompt=len(sequence.prompt),
            num_output=len(ended.output_ids),
            finish=ended.reason,  # type: ignore[arg-type]
            prompt=sequence.prompt if self._is_full else None,
            output=ended.output_ids.tolist() if self._is_full else None,
            blocks=[] if self._is_full else list(self._hash_blocks(sequence.prompt, generate.namespace if generate is not None else "")),
            cached=sequence.cached,
            priority=generate.priority if generate is not None else 0,
            media=len(recovery.media),
            is_transferred=recovery.transfer is not None,
            adapter="" if use is None else use.name if self._is_full else "-",
            version=sequence.weight_version,
            grammar=params.grammar[0] if params.grammar is not None else "",
            queued=times.waited,
            first=max(0.0, times.first - created) if times.first else None,
            last=max(0.0, times.last - created) if times.last else None,
            end=max(0.0, ended.now - created),
        )

    def _hash_blocks(self, prompt: list[int], namespace: str) -> Iterator[int]:
        """A hash of each prefix of whole blocks, within the namespace of the prefix cache."""
        tokens = memoryview(array("q", prompt)).cast("B")
        chain = blake2b(namespace.encode(errors="replace"), digest_size=8, key=self._secret)
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            chain.update(tokens[(end - BLOCK) * 8 : end * 8])
            yield int.from_bytes(chain.digest()) >> 1


class DumpFiles:
    """The files of a folder, mode 0600: `requests-TIME-PID-NUMBER.jsonl`, and `crash-…` for
    crashes. All files together stay below `max_bytes`, and no line gets older than `max_age`
    seconds. Other files of the folder are left alone."""

    def __init__(self, folder: Path, head: bytes, max_bytes: int, max_age: float) -> None:
        self.folder = folder
        self._head = head
        self._max_bytes, self._max_age = max_bytes, max_age
        self._file: int | None = None
        self._size, self._opened, self._number = 0, 0.0, 0

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError."""
        if len(self._head) + len(line) > self._max_bytes // PARTS:
            raise OSError(0, "a sequence is longer than an eighth of log.request_dump_max_bytes")
        if self._file is not None and self._size + len(line) > self._max_bytes // PARTS:
            self.close()
        if self._file is None:
            self._remove_old()
            self._file, self._size, self._opened = self._open("requests"), len(self._head), time.time()
        try:
            _write_whole(self._file, line)
        except OSError:  # a part of the line may be there, as on a full disk
            file, size = self._file, self._size
            self._file = None
            try:
                os.ftruncate(file, size)
            finally:
                os.close(file)
            raise
        self._size += len(line)

    def write_crash(self, lines: Sequence[bytes]) -> None:
        """Write a file of its own, with the last lines that fit. Raises OSError."""
        room = self._max_bytes // PARTS - len(self._head)
        kept: list[bytes] = []
        for line in reversed(lines):
            if (room := room - len(line)) < 0:
                break
            kept.append(line)
        self._remove_old()
        os.close(self._open("crash", b"".join(reversed(kept))))
        log.warning("log.request_dump: %s sequences from before the engine's crash are in %s", len(kept), self.folder)

    def check_age(self) -> None:
        """End a file after its share of the age, or one that was deleted, and remove old files."""
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            log.warning("log.request_dump: the file in %s was deleted; the next sequences go into a new one", self.folder)
            self.close()
        if self._file is not None and time.time() - self._opened > self._max_age / PARTS:
            self.close()
        self._remove_old()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self, kind: str, lines: bytes = b"") -> int:
        """A new file with these lines, or none. Raises OSError."""
        self._number += 1
        name = f"{kind}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}-{self._number:05d}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(self.folder / name, flags, 0o600)
        except FileNotFoundError:  # the folder was deleted
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self.folder / name, flags, 0o600)
        try:
            _write_whole(file, self._head + lines)
        except OSError:
            os.close(file)
            (self.folder / name).unlink(missing_ok=True)
            raise
        return file

    def _remove_old(self) -> None:
        """Remove files that are too old, and the oldest ones until there is room for two more."""
        files = []
        for path in (path for pattern in PATTERNS for path in self.folder.glob(pattern)):
            try:
                status = path.lstat()
            except OSError:  # another server has removed it
                continue
            if stat.S_ISREG(status.st_mode):
                files.append((status.st_mtime, status.st_size, path))
        files.sort()
        total = sum(size for _, size, _ in files)
        oldest = time.time() - self._max_age * (PARTS - 1) / PARTS
        for modified, size, path in files:
            if modified >= oldest and total <= self._max_bytes * (PARTS - 2) // PARTS:
                return
            path.unlink(missing_ok=True)
            total -= size


def _write_whole(file: int, data: bytes) -> None:
    """Write all of it: a line that is cut off would end the readers of the dump."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
