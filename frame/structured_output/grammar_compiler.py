"""Compiles requests' grammars in threads; a request waits here until its grammar is ready.

A grammar that does not compile within its limits ends its own request only. Tenants take turns and
share no compiled grammar, so the time of a request reveals nothing about another tenant's grammars.
Used by the engine. Must not know the scheduler.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from frame.core.interfaces.sampling import GRAMMAR_KINDS
from frame.core.messages import Finish, FinishReason, Generate, StepTokens
from frame.core.scheduling.request import queue_full, timed_out
from frame.fair_queue import FairQueue
from frame.host.host_memory import return_freed_memory
from frame.structured_output.grammar_calls import GrammarMeter, MeteredGrammar, grammar_error

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import CompiledGrammar, Grammar, GrammarBackend

Key = tuple[str, str, str]  # tenant, kind, source
PREPARED: Key = ("", "regex", "a")  # compiled before there is a request
REREAD = 1.0  # seconds between two readings of all sizes in the cache, which take 0.5 us for each grammar
TRIM_BYTES = 32 << 20  # of evicted grammars, after which freed memory is returned to the system


class CompilerProcess(Protocol):
    """A process that compiles one grammar at a time. `cpu_seconds`: CPU time of the last one."""

    cpu_seconds: float

    def start(self) -> None:
        """Start the process, or start it again where it has ended. Raises RuntimeError."""
        ...

    def compile(self, kind: str, source: str) -> bytes:
        """Return what `GrammarBackend.dump` made of the compiled grammar. Raises ValueError, one
        sentence, for an invalid grammar and when a limit ended the process; CompileTimeoutError
        when it was the time limit."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GrammarSettings:
    """Limits and sizes of the compiler."""

    kinds: tuple[str, ...] = GRAMMAR_KINDS  # that the backend compiles
    workers: int = 1  # threads that compile
    queue_timeout: float = 10.0  # seconds that a grammar waits behind others that ran into their time limit
    cache_bytes: int = 256 * 1024 * 1024  # of compiled grammars
    budget: float = math.inf  # CPU seconds of one request's grammar: compilation, masks and accepted tokens
    request_timeout: float = 600.0  # seconds; the deadline of a request that sets none


class GrammarUnavailableError(RuntimeError):
    """A grammar cannot be taken now, and may be sent again later."""


class QueueTimeoutError(GrammarUnavailableError):
    """A grammar waited too long in the queue of the compilers."""


class CompileTimeoutError(ValueError):
    """A grammar exceeded the time limit of one compilation."""


class GrammarCache:
    """Cache of compiled grammars, and of the errors of invalid ones, by tenant, kind and source.
    Beyond `limit` bytes, the tenant with the largest size loses what it has not used for longest.
    Grammars may grow while requests use them: `reread_sizes` evicts what exceeds the limit then.
    One that has grown beyond an eighth of the limit is compiled again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_evicted = 0  # bytes
        self.reread_at = 0.0  # when the compiler reads the sizes again, seconds of its clock
        self._sizes: Counter[str] = Counter()  # bytes, by tenant
        self._entries: dict[str, OrderedDict[Key, tuple[CompiledGrammar | ValueError, int]]] = {}  # by tenant

    def get(self, key: Key) -> CompiledGrammar | ValueError | None:
        entries = self._entries.get(key[0])
        if entries is None or key not in entries:
            return None
        value, size = entries[key]
        if size < _size_of(key, value) > self._limit // 8:
            self._remove(key)
            return None
        entries.move_to_end(key)
        return value

    def put(self, key: Key, value: CompiledGrammar | ValueError) -> None:
        size = _size_of(key, value)
        if size > self._limit:
            return
        self._remove(key)
        self._set(key, value, size)
        self._evict()

    def reread_sizes(self) -> None:
        """Read the sizes again, and evict what exceeds the limit."""
        for key, (value, old) in [each for entries in self._entries.values() for each in entries.items()]:
            size = _size_of(key, value)
            if size != old and size > self._limit // 8:
                self._remove(key)
                self.num_evicted += size
            elif size != old:
                self._sizes[key[0]] += size - old
                self._entries[key[0]][key] = value, size  # its place stays
        self._evict()

    def _set(self, key: Key, value: CompiledGrammar | ValueError, size: int) -> None:
        self._entries.setdefault(key[0], OrderedDict())[key] = value, size
        self._sizes[key[0]] += size

    def _remove(self, key: Key) -> int:
        """Returns the size; 0: there is no such entry."""
        tenant = key[0]
        entries = self._entries.get(tenant)
        size = 0 if entries is None or key not in entries else entries.pop(key)[1]
        self._sizes[tenant] -= size
        if not entries:
            self._entries.pop(tenant, None)
            del self._sizes[tenant]
        return size

    def _evict(self) -> None:
        while self._sizes.total() > self._limit:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.num_evicted += self._remove(next(iter(self._entries[largest])))


def _size_of(key: Key, value: CompiledGrammar | ValueError) -> int:
    return 4 * len(key[2]) + 1024 + (0 if isinstance(value, ValueError) else value.num_bytes)


@dataclass(slots=True, eq=False)
class _Compilation:
    """One grammar being compiled, and the requests that wait for it. `since`: monotonic seconds."""

    key: Key
    future: Future[tuple[CompiledGrammar, float]] = field(default_factory=Future)  # and its CPU seconds
    rids: set[str] = field(default_factory=set)
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A waiting request and the source of its grammar. `arrival`: seconds of the clock."""

    message: Generate
    source: _Compilation | CompiledGrammar | ValueError
    arrival: float


class GrammarCompiler:
    """Compiles in threads, in turn by tenant and then in order of arrival. With `start_process`
    each thread compiles in its own process, else with the backend. `len` is the number of waiting
    requests.

    `make` returns the backend. A thread calls it for the first grammar: a backend may take seconds
    to load, and most servers never need it. All methods below the line run in the
    compiling threads, all others in the engine's thread.
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
        self._lock = threading.Lock()  # guards `_backend` and `on_loaded`
        self._queue: FairQueue[_Compilation] = FairQueue(self._settings.workers)
        self._pool = ThreadPoolExecutor(self._settings.workers, thread_name_prefix="grammar")
        self._processes: list[CompilerProcess] = []
        self._cache = GrammarCache(self._settings.cache_bytes)
        self._compiling: dict[Key, _Compilation] = {}
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._thread = threading.local()  # `process` of each thread
        self._last_timeout_at = 0.0  # when a compilation last timed out, monotonic seconds
        self.on_loaded: Callable[[], None] | None = None  # called once a first grammar is compiled

    def __len__(self) -> int:
        return len(self._waiting)

    def prepare(self) -> Self:
        """Load the backend and start the processes, in threads, before there is a grammar: that
        takes seconds. An error is raised again by the first grammar."""
        for _ in range(self._settings.workers):
            self._pool.submit(self._compile, _Compilation(PREPARED))
        if self._start_process is not None:  # they start while the backend is loaded
            threading.Thread(target=self._load_early, name="load-grammar-backend", daemon=True).start()
        return self

    def hold_request(self, message: Generate) -> bool:
        """Return whether the request has a grammar. If so, `take_ready` returns it later with the
        grammar or an error."""
        grammar = message.params.grammar
        if grammar is None:
            return False
        key = (message.namespace.partition(":")[0], *grammar)
        self._waiting[message.rid] = _Waiting(message, self._find(key, message.rid), self._clock())
        return True

    def _find(self, key: Key, rid: str) -> _Compilation | CompiledGrammar | ValueError:
        if key[1] not in self._settings.kinds:
            kinds = ", ".join(self._settings.kinds)
            return ValueError(f"this server's grammar backend compiles no {key[1]}; use one of {kinds}")
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        if key not in self._compiling:
            self._compiling[key] = _Compilation(key)
            self._queue.put(key[0], self._compiling[key])
            self._pool.submit(self._compile_all)
        self._compiling[key].rids.add(rid)
        return self._compiling[key]

    def take_ready(self) -> list[tuple[Generate, Grammar | Finish, float]]:
        """Remove and return the requests whose grammar is compiled or failed, or whose deadline has
        passed. Each with its grammar, or how it ends, and with its arrival in seconds of the clock,
        from which its deadline counts."""
        for key in [key for key, compilation in self._compiling.items() if compilation.future.done()]:
            error = self._compiling[key].future.exception()
            if error is None or isinstance(error, ValueError):  # other errors may be temporary
                # only the sentence: a raised error keeps the frames of its traceback alive
                self._cache.put(key, self._compiling[key].future.result()[0] if error is None else ValueError(str(error)))
            del self._compiling[key]
        now = self._clock()
        if now >= self._cache.reread_at:
            self._cache.reread_at = now + REREAD
            if self._cache.num_evicted > TRIM_BYTES:  # at the last reading or before
                self._cache.num_evicted = 0
                self._pool.submit(return_freed_memory)
            self._cache.reread_sizes()
        outcomes = [(each, self._outcome(each, now)) for each in self._waiting.values()]
        resolved = [(each.message, outcome, each.arrival) for each, outcome in outcomes if outcome is not None]
        for message, _, _ in resolved:
            self._remove(message.rid)
        return resolved

    def abort_requests(self, rids: Sequence[str], reason: FinishReason) -> StepTokens | None:
        """End those of `rids` that wait here. None: none does."""
        gone = [rid for rid in rids if rid in self._waiting]
        for rid in gone:
            self._remove(rid)
        if not gone:
            return None
        return StepTokens(rids=gone, token_ids=[[] for _ in gone], finishes={i: Finish(reason) for i in range(len(gone))})

    def abort_all(self, reason: FinishReason) -> StepTokens | None:
        """End every request that waits here. None: none does."""
        return self.abort_requests(list(self._waiting), reason)

    def close(self) -> None:
        """Stop the processes. Compilations in progress are abandoned."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _outcome(self, waiting: _Waiting, now: float) -> Grammar | Finish | None:
        deadline = self._settings.request_timeout if waiting.message.deadline is None else waiting.message.deadline
        return timed_out(deadline) if now - waiting.arrival > deadline else _outcome(waiting, self._settings.budget)

    def _remove(self, rid: str) -> None:
        """Remove a request. Its compilation is cancelled if it has not started and no other request
        waits for it."""
        source = self._waiting.pop(rid).source
        if isinstance(source, _Compilation):
            source.rids.discard(rid)
            if not source.rids and source.future.cancel():
                self._compiling.pop(source.key, None)
                self._queue.discard(source.key[0], source)

    # ---- in the compiling threads ----

    def _compile_all(self) -> None:
        """Compile until no grammar is left that may run. One call is submitted for each grammar; a
        call that finds none ends."""
        while (turn := self._take()) is not None:
            tenant, compilation = turn
            if compilation.future.set_running_or_notify_cancel():
                try:
                    compilation.future.set_result(self._compile(compilation))
                except BaseException as error:  # noqa: BLE001 - raised where the future's result is read
                    compilation.future.set_exception(error)
            self._queue.release(tenant)

    def _take(self) -> tuple[str, _Compilation] | None:
        """The tenant and the grammar to compile now. The thread's process starts first: meanwhile
        the other threads compile."""
        if self._start_process is not None:
            with suppress(Exception):  # the compilation raises it
                self._get_process(self._start_process).start()
        return self._queue.take()

    def _get_process(self, make: Callable[[], CompilerProcess]) -> CompilerProcess:
        if not hasattr(self._thread, "process"):
            self._thread.process = make()
            self._processes.append(self._thread.process)
        process: CompilerProcess = self._thread.process
        return process

    def _compile(self, compilation: _Compilation) -> tuple[CompiledGrammar, float]:
        _, kind, source = compilation.key
        since = compilation.since
        if time.monotonic() - since > self._settings.queue_timeout and self._last_timeout_at > since:  # a long queue alone is not an error
            raise QueueTimeoutError("other grammars keep the compilers busy")
        if self._start_process is None:
            backend, began = self._load_backend(), time.thread_time()
            compiled = backend.compile(kind, source)
            self._note_loaded()
            return compiled, time.thread_time() - began
        process = self._get_process(self._start_process)
        try:
            data = process.compile(kind, source)
            backend, began = self._load_backend(), time.thread_time()  # which another thread loads while the process starts
            loaded = backend.load(kind, source, data)
            self._note_loaded()
            return loaded, time.thread_time() - began + process.cpu_seconds
        except CompileTimeoutError:
            self._last_timeout_at = time.monotonic()
            raise

    def _load_early(self) -> None:
        with suppress(Exception):
            self._load_backend()

    def _note_loaded(self) -> None:
        """Call `on_loaded`: backends load some of their tables with the first grammar."""
        with self._lock:
            call, self.on_loaded = self.on_loaded, None
        if call is not None:
            call()

    def _load_backend(self) -> GrammarBackend:
        with self._lock:
            if self._backend is None:
                self._backend = self._make()
            return self._backend


def _outcome(waiting: _Waiting, budget: float) -> Grammar | Finish | None:
    """The request's grammar, or how the request ends without one. None: not compiled yet."""
    source, params = waiting.source, waiting.message.params
    error: BaseException | None = source if isinstance(source, ValueError) else None
    if isinstance(source, _Compilation):
        if not source.future.done():
            return None
        error = source.future.exception()
    if isinstance(error, GrammarUnavailableError):
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
