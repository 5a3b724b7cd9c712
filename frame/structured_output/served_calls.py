"""Grammar calls of a share of an engine's requests, made in a process of their own.

`ServedCalls` carries out the messages of `remote_calls` with the `GrammarCalls` that an engine
without such processes has, over a table of this process's requests. Used by the process's main
module. Must not know how messages travel.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from frame.core.messages import Finish
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import GRAMMAR
from frame.structured_output import call_messages as messages
from frame.structured_output.call_messages import Call, unpack
from frame.structured_output.grammar_calls import GrammarMeter, MeteredGrammar, grammar_error
from frame.structured_output.grammar_masks import GrammarCalls
from frame.structured_output.jump_forward import JumpForward

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import CompiledGrammar, GrammarBackend
    from frame.core.scheduling.request_slots import RequestTable
    from frame.core.scheduling.running import RunningSet

log = logging.getLogger(__name__)

REREAD = 1.0  # seconds between two readings of the sizes of compiled grammars
_decode_calls = msgspec.msgpack.Decoder(list[Call]).decode
_decode_load = msgspec.msgpack.Decoder(messages.LoadGrammar).decode
_encode = msgspec.msgpack.encode


@dataclass
class _Table:
    """What `GrammarCalls` and `JumpForward` read of a `RequestTable`, by the number of a
    request."""

    requests: list[Request | None] = field(default_factory=list)
    arrays: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(special=np.empty(0, np.int32), num_committed_tokens=[]))

    def put(self, number: int, request: Request) -> None:
        if number >= len(self.requests):
            more = max(64, number + 1 - len(self.requests), len(self.requests))
            self.requests += [None] * more
            self.arrays.num_committed_tokens += [0] * more
            self.arrays.special = np.full(len(self.requests), GRAMMAR, np.int32)
        self.requests[number] = request
        self.arrays.num_committed_tokens[number] = len(request.output)


@dataclass
class _Runs:
    """Collects forced tokens, as `RunningSet.extend_request` appends them."""

    table: _Table
    runs: dict[int, list[int]] = field(default_factory=dict)

    def extend_request(self, request: Request, tokens: list[int]) -> None:
        self.runs[request.index] = tokens
        self.table.arrays.num_committed_tokens[request.index] += len(tokens)


@dataclass(frozen=True, slots=True)
class JumpSettings:
    """Of `JumpForward`, for the step of a whole engine; `parts`: processes that share it."""

    fewest: int
    rows: int
    tokens: int
    parts: int


class ServedCalls:
    """masks: int32 [buffers, rows, words], shared with the engine. jumps: None: all tokens are
    sampled. `load_grammar` may run in another thread than the other methods."""

    def __init__(self, backend: GrammarBackend, masks: np.ndarray, vocab_size: int, threads: int, jumps: JumpSettings | None) -> None:
        self._backend, self._masks, self._table = backend, masks, _Table()
        self._runs = _Runs(self._table)
        running = cast("RunningSet", self._runs)
        self._jumps = None if jumps is None else JumpForward(running, jumps.fewest, jumps.rows, jumps.tokens, jumps.parts)
        self._calls = GrammarCalls(vocab_size, threads, self._jumps, slices=1)  # the engine waits for the tokens, not for the masks
        self._compiled: dict[int, CompiledGrammar] = {}
        self._sizes: dict[int, int] = {}  # that the engine knows
        self._errors: dict[int, Finish] = {}  # of requests that could not begin
        self._reread_at = 0.0

    def load_grammar(self, message: bytes) -> bytes:
        """Carry out a `LoadGrammar`. -> the reply."""
        return _encode(self._load(_decode_load(message)))

    def answer(self, message: bytes, reply: Callable[[bytes], None]) -> None:
        """Carry out the calls of a message. `reply` sends what the last one returns."""
        for call in _decode_calls(message):
            if isinstance(call, messages.StartRequest):
                self._start(call)
            elif isinstance(call, messages.LoadGrammar):
                if (loaded := self._load(call)).error:
                    log.error("a grammar that another process has loaded cannot be loaded: %s", loaded.error)
            elif isinstance(call, messages.EndRequest):
                self._end(call.request)
            elif isinstance(call, messages.DropGrammar):
                self._compiled.pop(call.compiled, None)
                self._sizes.pop(call.compiled, None)
            elif isinstance(call, messages.HoldRequest):
                if (request := self._table.requests[call.request]) is not None:
                    self._calls.hold_request(request)
            elif isinstance(call, messages.ReleaseRequest):
                if (request := self._table.requests[call.request]) is not None:
                    self._calls.release_request(request)
            elif isinstance(call, messages.AcceptTokens):
                reply(_encode(self._accept(call)))
                self._calls.wait_for_masks()  # while the engine does other work
            elif isinstance(call, messages.FillMasks):
                reply(_encode(self._fill(call)))
            elif isinstance(call, messages.PollHeld):
                reply(_encode(messages.Resolved({request.index: end for request, end in self._calls.take_resolved()})))

    def close(self) -> None:
        self._calls.close()

    def _load(self, load: messages.LoadGrammar) -> messages.Loaded:
        began = time.thread_time()
        try:
            compiled = self._backend.load(load.kind, load.source, load.data)
        except Exception as error:  # noqa: BLE001 - a backend's fault is its grammar's error
            return messages.Loaded(error=str(error) or type(error).__name__, is_invalid=isinstance(error, ValueError))
        self._sizes[load.compiled] = compiled.num_bytes
        self._compiled[load.compiled] = compiled
        return messages.Loaded(compiled.num_bytes, seconds=time.thread_time() - began)

    def _start(self, call: messages.StartRequest) -> None:
        number = call.request
        request = Request(str(number), np.empty(0, np.int32), call.params, 0, number, 0.0, math.inf, call.max_tokens, call.stop_ids)
        request.output = array("i", call.output)
        self._errors.pop(number, None)
        self._table.put(number, request)
        try:
            request.grammar = MeteredGrammar(self._compiled[call.compiled].start(), GrammarMeter(call.budget, call.spent))
            end = self._calls.start_request(request)
        except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
            end = grammar_error(error, call.params)
        if end is not None:
            request.grammar = None
            self._errors[number] = end

    def _end(self, number: int) -> None:
        request = self._table.requests[number]
        if request is not None:
            self._calls.release_request(request)
        self._table.requests[number] = None
        self._errors.pop(number, None)

    def _accept(self, call: messages.AcceptTokens) -> messages.Accepted:
        numbers, ends = unpack(call.requests).tolist(), dict[int, Finish]()
        drawn, places = [], []
        committed = self._table.arrays.num_committed_tokens
        for i, (number, token) in enumerate(zip(numbers, unpack(call.tokens).tolist(), strict=True)):
            request = self._table.requests[number]
            if request is None or number in self._errors:
                ends[i] = self._errors.get(number) or Finish("error", error="the grammar process does not know this request")
            else:
                drawn.append((request, (token,)))
                places.append(i)
                committed[number] += 1
        self._calls.total_rows = call.num_rows
        for i, end in zip(places, self._calls.accept_tokens(drawn, len(drawn)) if drawn else (), strict=True):
            if end is not None:
                ends[i] = end
        return messages.Accepted(ends, self._read_sizes())

    def _read_sizes(self) -> dict[int, int]:
        now = time.monotonic()
        if now < self._reread_at:
            return {}
        self._reread_at = now + REREAD
        sizes = {number: compiled.num_bytes for number, compiled in list(self._compiled.items())}
        changed = {number: size for number, size in sizes.items() if size != self._sizes.get(number)}
        self._sizes.update(changed)
        return changed

    def _fill(self, call: messages.FillMasks) -> messages.Filled:
        numbers, rows = unpack(call.requests), unpack(call.rows)
        self._calls.total_rows = call.num_samples
        if self._jumps is not None:
            self._jumps.num_samples = call.num_samples
        masks = self._calls.fill_masks(cast("RequestTable", cast("Any", self._table)), numbers)
        self._masks[call.buffer][rows] = -1 if masks is None else masks
        runs, self._runs.runs = self._runs.runs, {}
        return messages.Filled(runs, [request.index for request in self._calls.take_stopped()])
