"""Grammar calls of a scheduler's steps, made by processes: each has a share of the requests, and
writes its masks into memory that it shares with the engine.

`RemoteCalls` implements `StepGrammars`. A process that ends, or does not reply, is replaced; its
requests move to the others with the tokens that they have accepted. Must not know how a process is
started or what a grammar is.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np

from frame.core.interfaces.drafter import Drafts
from frame.core.messages import Finish
from frame.core.scheduling.request import Request, queue_full
from frame.core.scheduling.request_slots import GRAMMAR
from frame.core.scheduling.step_features import StepGrammars
from frame.structured_output import call_messages as messages
from frame.structured_output.call_messages import Call, pack
from frame.structured_output.call_processes import NUM_BUFFERS, Member, ProcessPool, RemoteGrammar
from frame.structured_output.grammar_calls import MeteredGrammar

if TYPE_CHECKING:
    from frame.core.scheduling.request_slots import RequestTable

T = TypeVar("T")

REPLY_SECONDS = 10.0  # after which a process is replaced; slow calls of grammars do not delay its replies
MAX_MOVES = 3  # of a request, whose grammar may be what ends the processes
LOST = Finish("error", error="the processes of grammars ended several times with this request; simplify its grammar")
NO_PROCESS = queue_full("the processes of grammars cannot be started")


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
        return None if self._place(grammar) else NO_PROCESS

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
            shares: dict[Member | None, list[int]] = {member: [] for member in (*self._pool.members, None)}
            for i in waiting:
                shares.setdefault(rows[i].member, []).append(i)  # one that a load has found ended is in the pool no more
            if lost := shares.pop(None):
                yield None, lost
            asked = [(member, places) for member, places in shares.items() if places and member is not None]
            for member, places in asked:
                member.send(make([rows[i].number for i in places], places))
            again: list[int] = []
            deadline = time.monotonic() + REPLY_SECONDS
            for member, places in asked:
                reply = member.process.receive(max(0.0, deadline - time.monotonic()))
                if reply is None:
                    self._move(member)
                    again += places
                else:
                    yield msgspec.msgpack.decode(reply, type=kind), places
            waiting = again

    def _move(self, member: Member) -> None:
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
                    ends[i] = _explain_loss(rows[i])
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
                    ends[i] = _explain_loss(_of(held[i]))
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


def _explain_loss(grammar: RemoteGrammar) -> Finish:
    """How a request ends that no process takes."""
    return LOST if grammar.num_moves > MAX_MOVES else NO_PROCESS
