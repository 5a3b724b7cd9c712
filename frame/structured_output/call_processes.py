"""Processes that call grammars: which of them has a request, and which has loaded its grammar.

`ProcessPool` starts and replaces the processes. `RemoteBackend` stands for their grammar backend,
where the engine's compiler loads compiled grammars. Used by `remote_calls`. Must not know how a
process is started, what a grammar is, or the scheduler.
"""

from __future__ import annotations

import itertools
import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast
from weakref import WeakSet, WeakValueDictionary

import msgspec
import numpy as np

from frame.core.interfaces.sampling import CompiledGrammar, GrammarBackend
from frame.structured_output import call_messages as messages
from frame.structured_output.call_messages import Call
from frame.structured_output.grammar_compiler import GrammarUnavailableError

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import Grammar

log = logging.getLogger(__name__)

NUM_BUFFERS = 4  # masks of steps: the device may read those of the last one, and the engine has the next
LOAD_SECONDS = 60.0  # to load one compiled grammar
QUICK_LOAD = 0.02  # CPU seconds; what takes longer is loaded in all processes before a request begins, so that no step waits for it
MAX_LOADS = 3  # processes that may end while they load one grammar, which may be the cause
MAX_UNEVEN = 4  # requests more in a process that has loaded a grammar than in the one with the fewest
START_SECONDS = 120.0  # to replace a process, where there is no other
RETRY_SECONDS = 5.0  # between attempts to replace a process
_encode = msgspec.msgpack.encode


class CallProcess(Protocol):
    """A process that runs `ServedCalls`. Any thread calls `load`; the engine's thread calls the
    other methods."""

    def load(self, message: bytes, seconds: float) -> bytes | None:
        """Exchange a `LoadGrammar`. None: the process has ended, or the time has passed."""
        ...

    def send(self, message: bytes) -> None:
        """Send calls. An ended process takes no notice."""
        ...

    def receive(self, seconds: float) -> bytes | None:
        """The reply of the last call. None: as for `load`."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


@dataclass(eq=False)
class Member:
    """A process, and what the engine keeps of it (`ProcessPool`). pending: calls that the next
    message brings; loaded: numbers of compiled grammars."""

    process: CallProcess
    loaded: set[int] = field(default_factory=set)
    pending: list[Call] = field(default_factory=list)
    grammars: WeakValueDictionary[int, RemoteGrammar] = field(default_factory=WeakValueDictionary)  # by number
    ended: deque[int] = field(default_factory=deque)  # requests; appended where a request is freed
    dropped: deque[int] = field(default_factory=deque)  # compiled grammars, as above
    free: list[int] = field(default_factory=list)  # numbers of requests
    num_numbers: int = 0

    def take_number(self) -> int:
        if self.free:
            return self.free.pop()
        self.num_numbers += 1
        return self.num_numbers - 1

    def send(self, call: Call) -> None:
        """Send pending calls and one that has a reply."""
        while self.ended:
            number = self.ended.popleft()
            self.pending.append(messages.EndRequest(number))
            self.free.append(number)
        while self.dropped:
            self.pending.append(messages.DropGrammar(number := self.dropped.popleft()))
            self.loaded.discard(number)
        calls, self.pending = [*self.pending, call], []
        self.process.send(_encode(calls))


class RemoteCompiled:
    """A compiled grammar that one process or more has loaded (`CompiledGrammar`). is_slow: all
    have, because that takes long."""

    def __init__(self, pool: ProcessPool, load: messages.LoadGrammar) -> None:
        self.load, self.is_slow = load, False
        self.num_bytes = 0  # in the process where it has most
        self._pool = pool

    def start(self) -> Grammar:
        return cast("Grammar", RemoteGrammar(self))

    def __del__(self) -> None:
        self._pool.drop_grammar(self.load.compiled)


class RemoteGrammar:
    """One request's grammar, whose calls a process makes: the engine calls none of it. tokens:
    those that it has accepted; first: the call that begins it, without number and tokens; member:
    the process, None while there is none; number: of the request in this process."""

    def __init__(self, compiled: RemoteCompiled) -> None:
        self.compiled = compiled
        self.tokens = array("i")
        self.first: messages.StartRequest | None = None
        self.member: Member | None = None
        self.number = -1
        self.num_moves = 0

    def __del__(self) -> None:
        if self.member is not None:
            self.member.ended.append(self.number)


class ProcessPool:
    """The processes of an engine. start: starts one, and raises RuntimeError if it fails; it is
    called in threads that live as long as the pool. masks: int32 [NUM_BUFFERS, rows, words], which
    all processes share."""

    def __init__(self, start: Callable[[], CallProcess], count: int, masks: np.ndarray) -> None:
        self.masks = masks
        self.members: list[Member] = []
        self._start_process, self._count = start, count
        self._threads = ThreadPoolExecutor(2 * count, thread_name_prefix="grammar-processes")
        self._compiled: WeakSet[RemoteCompiled] = WeakSet()
        self._numbers = itertools.count()
        self._turns = itertools.count()  # of processes that load a grammar first
        self._ready: list[Member] = []  # replacements, until the engine's thread takes them
        self._num_starting = 0  # replacements in their first attempt
        self._ended: list[Member] = []  # until no request is in them
        # Guards `members` and the four above: what is added to `_compiled` is read with `_ready`.
        self._changed = threading.Condition()
        self._is_closed = False

    def start_backend(self) -> RemoteBackend:
        """Start all processes. -> their grammar backend. Raises RuntimeError if none starts."""
        starts = [self._threads.submit(self._start_process) for _ in range(self._count - len(self.members))]
        errors = [error for start in starts if (error := start.exception()) is not None]
        started = [Member(start.result()) for start in starts if start.exception() is None]
        with self._changed:
            self.members += started
        if errors and not self.members:
            raise errors[0]
        for _ in errors:
            self._threads.submit(self._restart)
        return RemoteBackend(self)

    def load(self, kind: str, source: str, data: bytes) -> RemoteCompiled:
        """Load a compiled grammar in one process, and in all where it takes long. Raises ValueError
        for one that is invalid, GrammarUnavailableError if there is no process."""
        compiled = RemoteCompiled(self, messages.LoadGrammar(next(self._numbers), kind, source, data))
        turn, reply = next(self._turns), None
        for i in range(MAX_LOADS):
            if not (members := self._wait_for_members()):
                break
            member = members[(turn + i) % len(members)]
            if (reply := _load(member, compiled.load)) is not None:
                break
            self._remove(member)
        if reply is None:
            raise GrammarUnavailableError("the processes of grammars have ended, and are started again")
        if reply.error:
            raise (ValueError if reply.is_invalid else RuntimeError)(reply.error)
        compiled.num_bytes, compiled.is_slow = reply.num_bytes, reply.seconds > QUICK_LOAD
        with self._changed:
            self._compiled.add(compiled)  # replacements load it from now on
            members = [*self.members, *self._ready]
        if compiled.is_slow:
            list(self._threads.map(_load, members, itertools.repeat(compiled.load)))
        return compiled

    def drop_grammar(self, compiled: int) -> None:
        for member in [*self.members, *self._ready]:
            if compiled in member.loaded:
                member.dropped.append(compiled)

    def choose(self, compiled: RemoteCompiled) -> Member | None:
        """The process for a request: one that has loaded its grammar, whose requests then share
        masks; otherwise the one with the fewest requests, which loads it with its next call. Where
        all have ended, it waits for a replacement. None: there is none."""
        self._take_ready()
        self._close_ended()
        if not (members := self._wait_for_members()):
            return None
        emptiest = min(members, key=_count_requests)
        loaded = [member for member in members if compiled.load.compiled in member.loaded]
        chosen = min(loaded, key=_count_requests, default=None)
        if chosen is not None and _count_requests(chosen) <= _count_requests(emptiest) + MAX_UNEVEN:
            return chosen
        if emptiest not in loaded:
            emptiest.loaded.add(compiled.load.compiled)
            emptiest.pending.append(compiled.load)
        return emptiest

    def replace(self, member: Member) -> list[RemoteGrammar]:
        """Take an ended process out. -> its requests, which are in none now."""
        self._remove(member)
        lost = list(member.grammars.values())
        for grammar in lost:
            grammar.member = None
        member.grammars.clear()
        self._close_ended()
        return lost

    def _remove(self, member: Member) -> None:
        """Take a process out, and replace it. Any thread calls this: the engine's thread moves the
        requests, which it notices at the next step."""
        with self._changed:
            holder = next((each for each in (self.members, self._ready) if member in each), None)
            if self._is_closed or holder is None:
                return
            holder.remove(member)
            self._ended.append(member)
            self._num_starting += 1
            self._threads.submit(self._restart, True)
        log.warning("a grammar process ended or did not reply; its requests move to the others")

    def _close_ended(self) -> None:
        """Close the processes that have ended; in the engine's thread, which sends messages."""
        with self._changed:
            ended = [member for member in self._ended if not member.grammars]
            self._ended = [member for member in self._ended if member not in ended]
        for member in ended:
            member.process.close()

    def close(self) -> None:
        self._is_closed = True
        self._take_ready()
        for member in (*self.members, *self._ended):
            member.process.close()
        self._threads.shutdown(wait=False)

    def set_sizes(self, sizes: dict[int, int]) -> None:
        """Note what compiled grammars have grown to."""
        for compiled in self._list_compiled() if sizes else ():
            compiled.num_bytes = max(compiled.num_bytes, sizes.get(compiled.load.compiled, 0))

    def _list_compiled(self) -> list[RemoteCompiled]:
        with self._changed:
            return list(self._compiled)

    def _wait_for_members(self) -> list[Member]:
        """All processes. Where all have ended, it waits for the first attempt to replace one."""
        with self._changed:
            self._changed.wait_for(lambda: self.members or self._ready or not self._num_starting, START_SECONDS)
            return [*self.members, *self._ready]

    def _take_ready(self) -> None:
        if self._ready:
            with self._changed:
                self.members += self._ready
                self._ready = []

    def _restart(self, is_counted: bool = False) -> None:
        """Replace a process, in as many attempts as it takes; in a thread. is_counted: in
        `_num_starting`."""
        member = None
        try:
            member = Member(self._start_process())
            while not self._is_closed and self._load_missing(member):
                pass
        except Exception as error:  # noqa: BLE001 - as long as there is memory for no process, say
            log.error("a grammar process cannot be replaced; the next attempt follows in %g s: %s", RETRY_SECONDS, error)
            timer = threading.Timer(RETRY_SECONDS, self._retry)
            timer.daemon = True
            timer.start()
        finally:
            with self._changed:
                self._num_starting -= is_counted
                self._changed.notify_all()
        if self._is_closed and member is not None:
            member.process.close()

    def _retry(self) -> None:
        with suppress(RuntimeError):  # this process ends
            self._threads.submit(self._restart)

    def _load_missing(self, member: Member) -> bool:
        """Load what is in use, takes long and is not loaded. -> whether there was something;
        otherwise the process is ready."""
        with self._changed:
            missing = [each.load for each in self._compiled if each.is_slow and each.load.compiled not in member.loaded]
            if not missing:
                member.dropped.extend(member.loaded - {each.load.compiled for each in self._compiled})
                self._ready.append(member)
        for load in missing:
            _load(member, load)
            member.loaded.add(load.compiled)
        return bool(missing)


def _load(member: Member, load: messages.LoadGrammar) -> messages.Loaded | None:
    if load.compiled in member.loaded:
        return None
    if (reply := member.process.load(_encode(load), LOAD_SECONDS)) is None:
        return None
    loaded = msgspec.msgpack.decode(reply, type=messages.Loaded)
    if not loaded.error:
        member.loaded.add(load.compiled)
    return loaded


def _count_requests(member: Member) -> int:
    return len(member.grammars)


class RemoteBackend(GrammarBackend):
    """The grammar backend of a pool's processes."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        return self.load(kind, source, b"")

    def load(self, kind: str, source: str, data: bytes) -> CompiledGrammar:
        return self._pool.load(kind, source, data)
