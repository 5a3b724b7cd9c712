"""Grammar calls of a scheduler's steps, made by processes: each has a share of the requests, and
writes its masks into memory that it shares with the engine.

`RemoteCalls` implements `StepGrammars`. `RemoteBackend` stands for the grammar backend of the
processes, where the engine's compiler loads compiled grammars. A process that ends, or does not
reply, is replaced; its requests move to the others with the tokens that they have accepted. Must
not know how a process is started or what a grammar is.
"""

from __future__ import annotations

import itertools
import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

import msgspec
import numpy as np

from frame.core.interfaces.drafter import Drafts
from frame.core.interfaces.sampling import CompiledGrammar, GrammarBackend
from frame.core.messages import Finish
from frame.core.scheduling.request import Request, queue_full
from frame.core.scheduling.request_slots import GRAMMAR
from frame.core.scheduling.step_features import StepGrammars
from frame.structured_output import call_messages as messages
from frame.structured_output.call_messages import Call, pack
from frame.structured_output.grammar_calls import MeteredGrammar

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import Grammar
    from frame.core.scheduling.request_slots import RequestTable

T = TypeVar("T")
log = logging.getLogger(__name__)

NUM_BUFFERS = 4  # masks of steps: the device may read those of the last one, and the engine has the next
REPLY_SECONDS = 10.0  # after which a process is replaced; slow calls of grammars do not delay its replies
LOAD_SECONDS = 60.0  # to load one compiled grammar
QUICK_LOAD = 0.02  # CPU seconds; what takes longer is loaded in all processes before a request begins, so that no step waits for it
MAX_UNEVEN = 4  # requests more in a process that has loaded a grammar than in the one with the fewest
START_SECONDS = 120.0  # to replace a process, where there is no other
MAX_MOVES = 3  # of a request, whose grammar may be what ends the processes
LOST = Finish("error", error="the processes of grammars ended several times with this request; simplify its grammar")
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
class _Member:
    """A process, and what the engine keeps of it. pending: calls that the next message brings;
    loaded: numbers of compiled grammars."""

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
        self.member: _Member | None = None
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
        self.members: list[_Member] = []
        self._start_process, self._count = start, count
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="grammar-processes")
        self._compiled: WeakSet[RemoteCompiled] = WeakSet()
        self._numbers = itertools.count()
        self._turns = itertools.count()  # of processes that load a grammar first
        self._ready: list[_Member] = []  # replacements, until the engine's thread takes them
        self._num_starting = 0  # replacements before they are ready
        # Guards the three above: what is added to `_compiled` is read with `_ready`.
        self._changed = threading.Condition()
        self._is_closed = False

    def start_backend(self) -> RemoteBackend:
        """Start all processes. -> their grammar backend. Raises RuntimeError."""
        starts = [self._threads.submit(self._start_process) for _ in range(self._count - len(self.members))]
        self.members += [_Member(start.result()) for start in starts]
        return RemoteBackend(self)

    def load(self, kind: str, source: str, data: bytes) -> RemoteCompiled:
        """Load a compiled grammar in one process, and in all where it takes long. Raises ValueError
        for one that is invalid."""
        compiled = RemoteCompiled(self, messages.LoadGrammar(next(self._numbers), kind, source, data))
        members, turn = self._list_members(), next(self._turns)
        reply: messages.Loaded | None = None
        for i in range(len(members)):
            if (reply := _load(members[(turn + i) % len(members)], compiled.load)) is not None:
                break
        if reply is None:
            raise RuntimeError("the processes of grammars have ended; the cause is in the log")
        if reply.error:
            raise (ValueError if reply.is_invalid else RuntimeError)(reply.error)
        compiled.num_bytes, compiled.is_slow = reply.num_bytes, reply.seconds > QUICK_LOAD
        with self._changed:
            self._compiled.add(compiled)  # replacements load it from now on
        if compiled.is_slow:
            list(self._threads.map(_load, self._list_members(), itertools.repeat(compiled.load)))
        return compiled

    def drop_grammar(self, compiled: int) -> None:
        for member in [*self.members, *self._ready]:
            if compiled in member.loaded:
                member.dropped.append(compiled)

    def choose(self, compiled: RemoteCompiled) -> _Member | None:
        """The process for a request: one that has loaded its grammar, whose requests then share
        masks; otherwise the one with the fewest requests, which loads it with its next call. Where
        all have ended, it waits for a replacement. None: there is none."""
        self._take_ready()
        if not self.members:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or not self._num_starting, START_SECONDS)
            self._take_ready()
        if not self.members:
            return None
        emptiest = min(self.members, key=_count_requests)
        loaded = [member for member in self.members if compiled.load.compiled in member.loaded]
        chosen = min(loaded, key=_count_requests, default=None)
        if chosen is not None and _count_requests(chosen) <= _count_requests(emptiest) + MAX_UNEVEN:
            return chosen
        if emptiest not in loaded:
            emptiest.loaded.add(compiled.load.compiled)
            emptiest.pending.append(compiled.load)
        return emptiest

    def replace(self, member: _Member) -> list[RemoteGrammar]:
        """Take an ended process out. -> its requests, which are in none now."""
        if member not in self.members:
            return []
        log.warning("a grammar process ended or did not reply; its requests move to the others")
        self.members.remove(member)
        member.process.close()
        lost = list(member.grammars.values())
        for grammar in lost:
            grammar.member = None
        with self._changed:
            self._num_starting += 1
        self._threads.submit(self._restart)
        return lost

    def close(self) -> None:
        self._is_closed = True
        self._take_ready()
        for member in self.members:
            member.process.close()
        self._threads.shutdown(wait=False)

    def set_sizes(self, sizes: dict[int, int]) -> None:
        """Note what compiled grammars have grown to."""
        for compiled in self._list_compiled() if sizes else ():
            compiled.num_bytes = max(compiled.num_bytes, sizes.get(compiled.load.compiled, 0))

    def _list_compiled(self) -> list[RemoteCompiled]:
        with self._changed:
            return list(self._compiled)

    def _list_members(self) -> list[_Member]:
        with self._changed:
            return [*self.members, *self._ready]

    def _take_ready(self) -> None:
        if self._ready:
            with self._changed:
                self.members += self._ready
                self._ready = []

    def _restart(self) -> None:
        """Replace a process; in a thread."""
        member = None
        try:
            member = _Member(self._start_process())
            while not self._is_closed and self._load_missing(member):
                pass
        except RuntimeError as error:
            log.error("a grammar process cannot be replaced: %s", error)
        finally:
            with self._changed:
                self._num_starting -= 1
                self._changed.notify_all()
        if self._is_closed and member is not None:
            member.process.close()

    def _load_missing(self, member: _Member) -> bool:
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


def _load(member: _Member, load: messages.LoadGrammar) -> messages.Loaded | None:
    if load.compiled in member.loaded:
        return None
    if (reply := member.process.load(_encode(load), LOAD_SECONDS)) is None:
        return None
    loaded = msgspec.msgpack.decode(reply, type=messages.Loaded)
    if not loaded.error:
        member.loaded.add(load.compiled)
    return loaded


def _count_requests(member: _Member) -> int:
    return len(member.grammars)


class RemoteBackend(GrammarBackend):
    """The grammar backend of a pool's processes."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        return self.load(kind, source, b"")

    def load(self, kind: str, source: str, data: bytes) -> CompiledGrammar:
        return self._pool.load(kind, source, data)


class RemoteCalls(StepGrammars):
    """Makes the grammar calls of a scheduler's steps in the processes of a pool. There are no
    drafts. extend_request: appends forced tokens to a request."""

    def __init__(self, pool: ProcessPool, extend_request: Callable[[Request, list[int]], None]) -> None:
        self._pool, self._extend_request = pool, extend_request
        self._num_jumped = self._buffer = 0
        self._held: dict[str, Request] = {}
        self._moved: set[str] = set()  # held requests that no process holds any more
        self._stopped: list[Request] = []

    @property
    def num_jumped(self) -> int:
        return self._num_jumped

    def __len__(self) -> int:
        return len(self._held)

    def start_request(self, request: Request) -> Finish | None:
        metered = request.grammar
        assert isinstance(metered, MeteredGrammar)
        meter, grammar = metered.meter, cast("RemoteGrammar", metered.wrapped)
        request.grammar = metered.wrapped
        grammar.tokens = array("i", request.output)
        length = request.max_num_tokens - request.prompt_len
        stops = tuple(request.stop_ids)
        grammar.first = messages.StartRequest(
            -1, grammar.compiled.load.compiled, request.params, b"", length, stops, meter.budget, meter.spent
        )
        return None if self._place(grammar) else queue_full("the processes of grammars cannot be started")

    def _place(self, grammar: RemoteGrammar) -> bool:
        """Begin a request in a process. False: there is none."""
        member = self._pool.choose(grammar.compiled)
        if member is None or grammar.first is None:
            return False
        grammar.member, grammar.number = member, member.take_number()
        member.grammars[grammar.number] = grammar
        member.pending.append(msgspec.structs.replace(grammar.first, request=grammar.number, output=grammar.tokens.tobytes()))
        return True

    def _exchange(
        self, rows: Sequence[RemoteGrammar], make: Callable[[list[int], list[int]], Call], kind: type[T]
    ) -> Iterator[tuple[T | None, list[int]]]:
        """Make a call for requests in their processes. make: of the requests' numbers and their
        places in `rows`; kind: of the replies. Yields each reply with the places of its requests;
        None: no process takes these. A process that has replied may end before the next one: what
        its requests have accepted must be noted at once."""
        waiting: Sequence[int] = range(len(rows))
        while waiting:
            shares: dict[_Member | None, list[int]] = {member: [] for member in (*self._pool.members, None)}
            for i in waiting:
                shares[rows[i].member].append(i)
            if lost := shares.pop(None):
                yield None, lost
            asked = [(member, places) for member, places in shares.items() if places and member is not None]
            for member, places in asked:
                member.send(make([rows[i].number for i in places], places))
            again: list[int] = []
            for member, places in asked:
                reply = member.process.receive(REPLY_SECONDS)
                if reply is None:
                    self._move(member)
                    again += places
                else:
                    yield msgspec.msgpack.decode(reply, type=kind), places
            waiting = again

    def _move(self, member: _Member) -> None:
        """Move the requests of an ended process to the others."""
        lost = self._pool.replace(member)
        self._moved |= {rid for rid, request in self._held.items() if _of(request) in lost}
        for grammar in lost:
            grammar.num_moves += 1
            if grammar.num_moves <= MAX_MOVES:
                self._place(grammar)

    def accept_tokens(self, drawn: Sequence[tuple[Request, Sequence[int]]], num_rows: int) -> list[Finish | None]:
        if not drawn:
            return []
        rows: list[Any] = [request.grammar for request, _ in drawn]  # a call for each takes as long as the rest
        tokens = [each[0] for _, each in drawn]

        def make(numbers: list[int], places: list[int]) -> Call:
            return messages.AcceptTokens(pack(numbers), pack([tokens[i] for i in places]), num_rows)

        ends: list[Finish | None] = [None] * len(drawn)
        for reply, places in self._exchange(rows, make, messages.Accepted):
            for i in places:
                rows[i].tokens.append(tokens[i])
            if reply is None:
                for i in places:
                    ends[i] = LOST
                continue
            for i, end in reply.ends.items():
                ends[places[i]] = end
            self._pool.set_sizes(reply.sizes)
        return ends

    def wait_for_masks(self) -> None:
        """The processes wait; `fill_masks` asks them."""

    def fill_masks(self, table: RequestTable, slots: np.ndarray) -> np.ndarray | None:
        constrained = np.flatnonzero(table.arrays.special[slots] & GRAMMAR)
        if not constrained.size:
            return None
        self._buffer = (self._buffer + 1) % NUM_BUFFERS
        masks = self._pool.masks[self._buffer][: len(slots)]
        requests = [table.requests[slot] for slot in slots[constrained].tolist()]
        rows = [row for row, request in zip(constrained.tolist(), requests, strict=True) if request is not None]
        asked = [request for request in requests if request is not None]  # None: it has finished
        grammars: list[Any] = [request.grammar for request in asked]
        if len(asked) < len(slots):
            masks[:] = -1
        buffer, num_samples = self._buffer, len(slots)

        def make(numbers: list[int], places: list[int]) -> Call:
            return messages.FillMasks(pack(numbers), pack([rows[i] for i in places]), buffer, num_samples)

        for reply, places in self._exchange(grammars, make, messages.Filled):
            if reply is None:  # `accept_tokens` ends the requests
                masks[[rows[i] for i in places]] = -1
            if reply is None or not (reply.runs or reply.stopped):
                continue
            by_number = {grammars[i].number: asked[i] for i in places}
            for number, run in reply.runs.items():
                _of(by_number[number]).tokens.extend(run)
                self._extend_request(by_number[number], run)
                self._num_jumped += len(run) - 1
            self._stopped += [by_number[number] for number in reply.stopped if number in by_number]
        return masks

    def trim_drafts(self, table: RequestTable, slots: np.ndarray, drafts: Drafts, *, is_late: bool = False) -> Drafts:
        raise NotImplementedError("grammar processes take no drafts")

    def stop_request(self, request: Request) -> None:
        raise NotImplementedError("grammar processes take no drafts")

    def take_stopped(self) -> list[Request]:
        stopped, self._stopped = self._stopped, []
        return stopped

    def hold_request(self, request: Request) -> None:
        self._held[request.rid] = request
        if (member := _of(request).member) is not None:
            member.pending.append(messages.HoldRequest(_of(request).number))

    def take_resolved(self) -> list[tuple[Request, Finish | None]]:
        if not self._held:
            return []
        held = list(self._held.values())
        ends: dict[int, Finish | None] = {}
        for reply, places in self._exchange(
            [_of(request) for request in held], lambda numbers, places: messages.PollHeld(), messages.Resolved
        ):
            for i in places:
                if reply is None:
                    ends[i] = LOST
                elif (number := _of(held[i]).number) in reply.requests:
                    ends[i] = reply.requests[number]
                elif held[i].rid in self._moved:
                    ends[i] = None  # its mask is filled anew
        for i in ends:
            self.release_request(held[i])
        return [(held[i], end) for i, end in ends.items()]

    def release_request(self, request: Request) -> bool:
        if self._held.pop(request.rid, None) is None:
            return False
        self._moved.discard(request.rid)
        if (member := _of(request).member) is not None:
            member.pending.append(messages.ReleaseRequest(_of(request).number))
        return True

    def close(self) -> None:
        self._pool.close()


def _of(request: Request) -> RemoteGrammar:
    return cast("RemoteGrammar", request.grammar)
