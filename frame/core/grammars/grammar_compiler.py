"""`GrammarCompiler`: compiles requests' grammars off the engine's loop; a request waits here until its grammar is ready.

A grammar that does not compile, or not within the limits, ends its own request and nothing else. Knows no scheduler; masks are
filled there.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from frame.core.grammars.grammar_masks import GrammarMeter, MeteredGrammar, grammar_error
from frame.core.interfaces.sampling import GRAMMAR_KINDS
from frame.core.messages import Finish, FinishReason, Generate, StepTokens
from frame.core.scheduling.request import queue_full, timed_out

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import CompiledGrammar, Grammar, GrammarBackend

Key = tuple[str, str]  # kind, source


class CompilerProcess(Protocol):
    """A process that compiles, one grammar at a time. `cpu_seconds`: CPU that the last one took."""

    cpu_seconds: float

    def compile(self, kind: str, source: str) -> bytes:
        """What `GrammarBackend.dump` made of it. Raises ValueError, one sentence, also when a limit ended the process, TooLongError when
        that of time did."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GrammarSettings:
    """`kinds` that the backend compiles; `patience`: most seconds that a grammar waits behind others that
    took all the time they may; `cache_bytes` of compiled grammars are kept; `workers` compile at a time; `budget`: CPU seconds of one
    request's grammar, compiled and at work; `request_timeout`: the deadline in seconds of a request without one of its own."""

    kinds: tuple[str, ...] = GRAMMAR_KINDS
    workers: int = 1
    patience: float = 10.0
    cache_bytes: int = 256 * 1024 * 1024
    budget: float = math.inf
    request_timeout: float = 600.0


class TooBusyError(RuntimeError):
    """A grammar waited too long for its turn."""


class TooLongError(ValueError):
    """A grammar took longer than it may."""


class GrammarCache:
    """Compiled grammars, and the reasons why others are none, by kind and source: the most recently used, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._entries: OrderedDict[Key, tuple[CompiledGrammar | ValueError, int]] = OrderedDict()

    def get(self, key: Key) -> CompiledGrammar | ValueError | None:
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: Key, value: CompiledGrammar | ValueError) -> None:
        size = 4 * len(key[1]) + 1024 + (0 if isinstance(value, ValueError) else value.num_bytes)
        if size > self._limit:
            return
        self._size += size - self._entries.pop(key, (None, 0))[1]
        self._entries[key] = value, size
        while self._size > self._limit:
            self._size -= self._entries.popitem(last=False)[1][1]


@dataclass(slots=True)
class _Compilation:
    """One grammar under way, for all requests that want it."""

    key: Key
    future: Future[tuple[CompiledGrammar, float]]  # and the CPU seconds that it took
    rids: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request and where its grammar comes from. `arrival` in seconds of the clock."""

    message: Generate
    source: _Compilation | CompiledGrammar | ValueError
    arrival: float


class GrammarCompiler:
    """A few threads compile, in order of arrival, each by a process of its own where `start_process` is given, else by the backend
    itself. `len` is the number of requests that wait.

    `make` gives the backend; it is called in such a thread for the first grammar, because a backend may take seconds to load and most
    servers never need it. All but `_compile` and what it calls runs in the engine's thread.
    """

    def __init__(
        self,
        make: Callable[[], GrammarBackend],
        settings: GrammarSettings | None = None,
        start_process: Callable[[], CompilerProcess] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._settings = settings or GrammarSettings()
        self._start_process = start_process
        self._backend: GrammarBackend | None = None
        self._lock = threading.Lock()  # while the backend is made
        self._pool = ThreadPoolExecutor(self._settings.workers, thread_name_prefix="grammar")
        self._processes: list[CompilerProcess] = []
        self._cache = GrammarCache(self._settings.cache_bytes)
        self._compiling: dict[Key, _Compilation] = {}
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._own = threading.local()  # a thread's process
        self._held_up_at = 0.0  # when a grammar last took all the time that it may

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, message: Generate) -> bool:
        """Whether the request has a grammar; if so it comes back from `ready`, with its grammar or the reason why there is none."""
        key = message.params.grammar
        if key is None:
            return False
        self._waiting[message.rid] = _Waiting(message, self._find(key, message.rid), self._clock())
        return True

    def _find(self, key: Key, rid: str) -> _Compilation | CompiledGrammar | ValueError:
        if key[0] not in self._settings.kinds:
            kinds = ", ".join(self._settings.kinds)
            return ValueError(f"this server's grammar backend compiles no {key[0]}; use one of {kinds}")
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        if key not in self._compiling:
            self._compiling[key] = _Compilation(key, self._pool.submit(self._compile, key, time.monotonic()))
        self._compiling[key].rids.add(rid)
        return self._compiling[key]

    def ready(self) -> list[tuple[Generate, Grammar | Finish, float]]:
        """Requests whose grammar is there, or why it is not: also those whose deadline has passed meanwhile. The last is when each
        arrived, on the clock: their deadlines run from there."""
        for key in [key for key, compilation in self._compiling.items() if compilation.future.done()]:
            error = self._compiling[key].future.exception()
            if error is None or isinstance(error, ValueError):  # others may pass
                # the sentence alone: an error as it was raised keeps the frames that it went through
                self._cache.put(key, self._compiling[key].future.result()[0] if error is None else ValueError(str(error)))
            del self._compiling[key]
        now = self._clock()
        outcomes = [(each, self._outcome(each, now)) for each in self._waiting.values()]
        found = [(each.message, outcome, each.arrival) for each, outcome in outcomes if outcome is not None]
        for message, _, _ in found:
            self._forget(message.rid)
        return found

    def drop(self, rids: Sequence[str], reason: FinishReason) -> StepTokens | None:
        """End those of these requests that wait here; returns their ends."""
        gone = [rid for rid in rids if rid in self._waiting]
        for rid in gone:
            self._forget(rid)
        if not gone:
            return None
        return StepTokens(rids=gone, token_ids=[[] for _ in gone], finishes={i: Finish(reason) for i in range(len(gone))})

    def drop_all(self, reason: FinishReason) -> StepTokens | None:
        """End every request that waits here; returns their ends."""
        return self.drop(list(self._waiting), reason)

    def close(self) -> None:
        """Stop the processes; what is being compiled is given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _outcome(self, waiting: _Waiting, now: float) -> Grammar | Finish | None:
        deadline = self._settings.request_timeout if waiting.message.deadline is None else waiting.message.deadline
        return timed_out(deadline) if now - waiting.arrival > deadline else _outcome(waiting, self._settings.budget)

    def _forget(self, rid: str) -> None:
        """Let a request go; a compilation that has not begun and that no other request wants is cancelled."""
        source = self._waiting.pop(rid).source
        if isinstance(source, _Compilation):
            source.rids.discard(rid)
            if not source.rids and source.future.cancel():
                self._compiling.pop(source.key, None)

    # in the threads -----------------------------------------------------------------------------------------------------

    def _compile(self, key: Key, since: float) -> tuple[CompiledGrammar, float]:
        if time.monotonic() - since > self._settings.patience and self._held_up_at > since:  # a long queue alone is no fault
            raise TooBusyError("other grammars keep the compilers busy")
        backend = self._loaded()
        began = time.thread_time()
        if self._start_process is None:
            return backend.compile(*key), time.thread_time() - began
        if not hasattr(self._own, "process"):
            self._own.process = self._start_process()
            self._processes.append(self._own.process)
        try:
            loaded = backend.load(*key, self._own.process.compile(*key))
            return loaded, time.thread_time() - began + self._own.process.cpu_seconds
        except TooLongError:
            self._held_up_at = time.monotonic()
            raise

    def _loaded(self) -> GrammarBackend:
        with self._lock:
            if self._backend is None:
                self._backend = self._make()
            return self._backend


def _outcome(waiting: _Waiting, budget: float) -> Grammar | Finish | None:
    """A grammar to start with, or how the request ends without one; None: not yet."""
    source, params = waiting.source, waiting.message.params
    error: BaseException | None = source if isinstance(source, ValueError) else None
    if isinstance(source, _Compilation):
        if not source.future.done():
            return None
        error = source.future.exception()
    if isinstance(error, TooBusyError):
        return queue_full(str(error))
    if error is not None:
        return grammar_error(error, params)
    assert not isinstance(source, ValueError)
    compiled, seconds = source.future.result() if isinstance(source, _Compilation) else (source, 0.0)
    try:
        meter = GrammarMeter(budget, seconds)
        meter.check()
        return MeteredGrammar(compiled.start(), meter)
    except Exception as raised:  # noqa: BLE001 - the backend's fault, and this request's alone
        return grammar_error(raised, params)
