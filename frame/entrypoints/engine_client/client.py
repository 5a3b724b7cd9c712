"""`EngineClient`: the asyncio client of the engine process; the counterpart of vLLM's `AsyncLLM`
and its core client.

It submits sequences, routes each step's tokens to their `RequestState`, aborts cancelled requests
and, after a crash of the engine, admits all requests again from their last token. A step's message
costs one pass over its requests and wakes each waiting handler once. Used by the HTTP and gRPC
servers and by the supervisor. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.transport import Transport
from frame.core.messages import (
    Abort,
    AbortAll,
    AnyMessage,
    ControlReply,
    Fatal,
    Finish,
    Generate,
    Heartbeat,
    NewWeights,
    Ready,
    StartDetokenize,
    StepText,
    StepTokens,
    Tokenized,
)
from frame.core.scheduling.request import timed_out
from frame.entrypoints.engine_client.adapter_spool import AdapterRecovery, AdapterVersion
from frame.entrypoints.engine_client.commands import EngineCommands
from frame.entrypoints.engine_client.limits import ClientLimits, EngineDeadError, InvalidRequestError, QueueFullError, get_child_params
from frame.entrypoints.engine_client.request_recovery import RequestRecovery, build_generate, build_start_detokenize
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.engine_client.stats import ClientStats, Outstanding
from frame.entrypoints.engine_client.token_router import TokenRouter
from frame.entrypoints.logs import TRACE
from frame.text.detokenizer import Detokenizer
from frame.text.incremental_decoder import PROMPT_TAIL

log = logging.getLogger(__name__)

CRASHED_ENGINE = "this request crashed the engine {} times at the same position, the last time alone; it is refused: send a different one"
CRASHED_DETOKENIZER = "the text of this request crashed the detokenizer {} times at the same position; it is refused: send a different one"
NO_ADAPTER = "the engine does not have this request's adapter; send the request again"
LOST = "the server failed to process a step's tokens of this request and ended it; the cause is in the server's log"
EXPIRY_GRACE = 10.0  # seconds after its deadline in which the engine itself ends a request


class EngineClient:
    """Not thread-safe: every method runs in the event loop's thread. `outstanding`: shared with the
    clients of other replicas."""

    # Gives an engine that is back the weights of the other replicas, then calls `restore_adapters`;
    # None: there are no others
    recover_weights: Callable[[EngineClient], None] | None = None

    def __init__(
        self,
        link: Transport,
        limits: ClientLimits,
        detokenizer: Detokenizer | None = None,
        remote_text: bool = False,
        outstanding: Outstanding | None = None,
    ) -> None:
        self.link = link
        self.limits = limits
        self.load: Heartbeat | None = None
        self.dead_reason: str | None = None  # None: the engine runs or is being restarted
        self.on_notice: Callable[[Ready | Heartbeat | Fatal], None] | None = None  # the supervisor; without one, Fatal fails all requests
        self.on_tokenized: Callable[[Tokenized], None] | None = None
        self.adapters: AdapterRecovery | None = None  # None: requests have no adapters
        self._detokenizer = detokenizer  # None: another process sends StepText, or the engine has no tokenizer
        self._remote_text = remote_text
        self._sequences: dict[str, SequenceState] = {}  # by engine_rid
        self._outstanding = outstanding or Outstanding()
        self._router = TokenRouter(self._sequences, self._outstanding.stats, self._finish)
        self._recovery = RequestRecovery(self._admit, self._withdraw, limits.grammar_processes)
        self._random = random.Random(limits.seed)
        self.commands = EngineCommands(link.send)

    @property
    def stats(self) -> ClientStats:
        return self._router.stats

    # submit ---------------------------------------------------------------------------------------

    def reserve_sequences(self, count: int) -> None:
        """Reserve room for `count` sequences, before a request costs any work. Raises
        QueueFullError, EngineDeadError, and InvalidRequestError for more than the server's
        maximum."""
        if (reason := self.dead_reason or self.commands.lost_weights) is not None:
            raise EngineDeadError(reason)
        if count > self.limits.max_outstanding:
            maximum, remedy = self.limits.max_outstanding, "send fewer at once, or serve with a larger --max-queued-requests"
            raise InvalidRequestError(f"the request asks for {count} sequences, and this server holds {maximum}; {remedy}")
        if self._outstanding.count + count > self.limits.max_outstanding:
            self.stats.rejected += count
            allowed = "all that scheduler.max_queued_requests allows"
            raise QueueFullError(f"{self._outstanding.count} requests are running or waiting, which is {allowed}; try again later")
        self._outstanding.reserved += count

    def release_sequences(self, count: int) -> None:
        """Give back reserved room that no sequence was started in."""
        self._outstanding.reserved -= count

    def prepare_request(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        rid: str | None,
        owner: str = "",
        second_text_starts: Sequence[int] = (),
    ) -> RequestState:
        """The state of a request with `params.n` sequences for each prompt, none of them started.
        All must have passed `limits.check_request`.

        `owner` is the tenant; `rid` is unique among its requests. `second_text_starts`: of pairs,
        by prompt. Raises EngineDeadError, and InvalidRequestError for a `rid` in use.
        """
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        request = RequestState(rid or uuid.uuid4().hex, owner)
        is_single = len(prompts) == 1 and params[0].n == 1
        for prompt_index, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            for number in range(prompt_params.n):
                sequence_params = prompt_params if prompt_params.n == 1 else get_child_params(prompt_params, number)
                if sequence_params.seed is None:  # a recovered sequence must draw the same tokens
                    sequence_params = msgspec.structs.replace(sequence_params, seed=self._random.getrandbits(63))
                index = len(request.sequences)
                name = request.rid if is_single else f"{request.rid}-{index}"
                sequence = SequenceState(request, index, prompt_index, name, prompt, sequence_params)
                self._check_name(sequence)
                request.sequences.append(sequence)
        request.second_text_starts = second_text_starts
        request.num_unfinished = len(request.sequences)
        return request

    def _check_name(self, sequence: SequenceState) -> None:
        if sequence.rid in self._outstanding.rids or sequence.rid in self._sequences:
            raise InvalidRequestError(f"a request with the rid {sequence.name!r} is running; choose another", "rid")

    def abort_start(self, request: RequestState) -> None:
        """Abort a request that could not be started completely. The room of all its sequences is
        reserved again: the caller gives it back with `release_sequences`."""
        started = sum(sequence.recovery.generate is not None for sequence in request.sequences)
        self.abort_request(request)
        self._outstanding.reserved += started

    def start_sequence(self, sequence: SequenceState, priority: int = 0, namespace: str = "", deadline: float | None = None) -> None:
        """Start a prepared sequence, in room that the caller has reserved. `deadline`: seconds from
        now. Raises EngineDeadError, and InvalidRequestError where its name was taken meanwhile."""
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        self._check_name(sequence)
        rid, prompt = sequence.recovery.engine_rid, sequence.prompt  # another name where it continues a stream that was here
        self._sequences[rid] = sequence
        sequence.change_version(self._router.weight_version)
        self._outstanding.rids.add(sequence.rid)
        self.stats.prompt_tokens += len(prompt)
        sequence.recovery.generate = Generate(
            rid=rid,
            token_ids=prompt,
            params=sequence.params,
            priority=priority,
            namespace=namespace,
            deadline=deadline,
            second_text_start=starts[sequence.prompt_index] if (starts := sequence.request.second_text_starts) else 0,
            adapter=use.version.digest if (use := sequence.recovery.adapter) is not None else "",
            media=sequence.recovery.media,
            transfer=sequence.recovery.transfer,
            pin=sequence.recovery.pin,
            trace=TRACE.get(),
            is_further=sequence.index > 0,
        )
        if use is not None:
            use.start()
        self._outstanding.reserved -= 1
        sequence.recovery.expires_at = time.monotonic() + (self.limits.request_timeout if deadline is None else deadline)
        self._recovery.add_sequence(sequence)

    def abort_request(self, request: RequestState) -> None:
        """Abort a request whose output is no longer needed; a second call does nothing."""
        started = [s for s in request.sequences if s.finish is None and s.recovery.generate is not None]
        running = [s for s in started if self._sequences.pop(s.recovery.engine_rid, None) is not None]
        for sequence in running:
            self.stats.record_finish(sequence, Finish("abort"), time.perf_counter(), is_abandoned=True)
        self._abort_admitted(running)
        for sequence in running:
            self._leave(sequence)
            self._recovery.remove_sequence(sequence)

    def abort_requests(self, names: list[str], owner: str | None = None) -> int:
        """End requests by name (all, when empty), of one tenant only where `owner` is given; they
        finish with reason "abort". A request's name stands for all its sequences. Returns the
        number of sequences that end."""
        named, is_all = set(names), not names
        owned = [s for s in self._sequences.values() if owner is None or s.request.owner == owner]
        sequences = owned if is_all else [s for s in owned if s.name in named or s.request.rid in named]
        for sequence in sequences:
            sequence.recovery.is_aborted = True
        if is_all and owner is None:
            self.link.send(AbortAll())  # also ends requests that this client does not know
        else:
            self._abort_admitted(sequences)
        self._finish_here([s for s in sequences if self._recovery.is_held(s)], Finish("abort"))
        return len(sequences)

    def abort_unanswered(self, finish: Finish) -> None:
        """End the sequences of requests of whose response nothing was sent."""
        self._abort_lost([s for s in self._sequences.values() if not s.request.is_answered], finish)

    @property
    def unavailable_reason(self) -> str | None:
        """Why the engine takes no requests now; submitted ones wait. None while it takes them."""
        return self._recovery.unavailable_reason or self.commands.lost_weights

    @property
    def num_sequences(self) -> int:
        """Sequences running or waiting in this client's engine."""
        return len(self._sequences)

    @property
    def num_outstanding(self) -> int:
        """Sequences running, waiting or reserved."""
        return self._outstanding.count

    # commands -------------------------------------------------------------------------------------

    def watch_weights(self, call: Callable[[str | None, str], None]) -> None:
        """Call this with folder and version whenever the engine has other weights."""
        self.commands.on_weights = call

    async def send_command(self, action: Any, **arguments: Any) -> ControlReply:
        """The reply to a command. Raises EngineDeadError, TimeoutError."""
        if (reason := self.dead_reason or self._recovery.unavailable_reason) is not None:
            raise EngineDeadError(reason)
        return await self.commands.send_command(action, arguments)

    async def send_order(self, action: Any, **arguments: Any) -> ControlReply:
        """`send_command`, also to an engine that is back and has no requests yet."""
        return await self.commands.send_command(action, arguments)

    # receive --------------------------------------------------------------------------------------

    def receive_messages(self) -> None:
        """Handle all messages that have arrived."""
        while messages := self.link.receive(0.0):
            self.handle_messages(messages)

    def receive_in_turns(self) -> None:
        """Handle messages that have arrived; called when the link is readable. Large ones are
        handled in several passes of the event loop."""
        if messages := self.link.receive(0.0):
            asyncio.get_running_loop().call_soon(self.receive_in_turns)  # the link reports changes only
            self.handle_messages(messages)

    def handle_messages(self, messages: Iterable[AnyMessage]) -> None:
        """Handle messages. An error in one is logged and ends its requests only."""
        touched: list[RequestState] = []
        for message in messages:
            try:
                self._handle_message(message, touched)
            except Exception:  # the other messages of this batch must still be handled
                log.exception("the client failed on a message of type %s", type(message).__name__)
                self._fail_step(message)
        for request in touched:
            try:
                if request.changed:
                    request.notify()
            except Exception:  # the other requests must still be notified
                log.exception("the handler of request %s failed on new output", request.rid)
        if self._recovery.isolated is not None:
            self._recovery.check_isolated()

    def _handle_message(self, message: AnyMessage, touched: list[RequestState]) -> None:
        if isinstance(message, StepTokens) and self._detokenizer is not None:
            message = self._detokenizer.process_step(message)
        if isinstance(message, StepText):
            self._router.route_step(message, message.texts, touched)
            if message.stopped:
                self.link.send(Abort(rids=[message.rids[place] for place in message.stopped], reason="stop"))
        elif isinstance(message, StepTokens):
            self._router.route_step(message, None, touched)
        elif isinstance(message, NewWeights):
            self._router.change_version(message.version)
        else:
            self._handle_other(message)

    def _handle_other(self, message: AnyMessage) -> None:
        if isinstance(message, Heartbeat) and message.process == "engine":
            self.load = message
        if isinstance(message, ControlReply):
            self.commands.receive_reply(message)
        elif isinstance(message, Ready | Heartbeat | Fatal):
            if self.on_notice is not None:
                self.on_notice(message)
            elif isinstance(message, Fatal):
                self.fail_requests(f"{message.process} failed: {message.error}")
        elif isinstance(message, Tokenized):
            if self.on_tokenized is not None:
                self.on_tokenized(message)
        else:
            raise TypeError(f"the client handles no {type(message).__name__}")

    def _finish(self, sequence: SequenceState, finish: Finish, now: float) -> None:
        sequence.finish = finish
        self._leave(sequence)
        sequence.request.num_unfinished -= 1
        self.stats.record_finish(sequence, finish, now)

    def _leave(self, sequence: SequenceState) -> None:
        """The sequence was removed from `_sequences`: give back what it holds."""
        self._outstanding.rids.discard(sequence.rid)
        if (use := sequence.recovery.adapter) is not None:
            use.end(sequence.num_tokens)
        sequence.request.count_left()

    def _finish_here(self, sequences: Sequence[SequenceState], finish: Finish) -> None:
        """End sequences that the engine does not run, or no longer runs."""
        now = time.perf_counter()
        for sequence in sequences:
            self._sequences.pop(sequence.recovery.engine_rid, None)
            self._finish(sequence, finish, now)
            self._recovery.remove_sequence(sequence)
            if not sequence.has_update:
                sequence.has_update = True
                sequence.request.changed.append(sequence)
        for request in {id(s.request): s.request for s in sequences}.values():
            request.notify()

    def _fail_step(self, message: AnyMessage) -> None:
        """End the requests of a step that failed here: it may have held their last tokens."""
        if not isinstance(message, StepTokens | StepText):
            return
        try:
            self._abort_lost([s for rid in message.rids if (s := self._sequences.get(rid)) is not None], Finish("error", None, LOST))
        except Exception:
            log.exception("the client failed to end the requests of a message of type %s", type(message).__name__)

    def _abort_lost(self, sequences: Sequence[SequenceState], finish: Finish) -> None:
        """End sequences here and abort them in the engine."""
        admitted = self._abort_admitted(sequences)
        self._finish_here(sequences, finish)
        if admitted and self._detokenizer is not None:
            self._detokenizer.drop_requests(admitted)

    def _abort_admitted(self, sequences: Sequence[SequenceState]) -> list[str]:
        """Abort those of these sequences that the engine has; returns their names there."""
        admitted = [sequence.recovery.engine_rid for sequence in sequences if not self._recovery.is_held(sequence)]
        if admitted:
            self.link.send(Abort(rids=admitted))
        return admitted

    # crashes --------------------------------------------------------------------------------------

    def fail_requests(self, error: str) -> None:
        """The engine cannot be restarted: end every request with this error and refuse new ones."""
        if self.dead_reason is None:
            self.dead_reason = error
        self._recovery.hold_sequences((), error)
        self._finish_here(list(self._sequences.values()), Finish("error", None, error))
        self.commands.fail_pending(error)

    def begin_recovery(
        self, reason: str, inflight: Mapping[int, int] | None = None, inflight_text: frozenset[int] = frozenset(), is_killed: bool = False
    ) -> None:
        """The engine or the detokenizer has crashed and restarts: hold all until `resume_requests`.

        `inflight`: prefilled tokens by request hash of the sequences on the device, if the engine
        crashed; None if the detokenizer did. `inflight_text`: request hashes of the sequence whose
        text was in progress in the detokenizer. is_killed: SIGKILL ended the engine.
        """
        sequences = sorted(self._sequences.values(), key=lambda s: (s.request.created, s.index))
        is_engine = inflight is not None
        if is_engine and self.stats.dump is not None:
            self.stats.dump.record_crash(sequences)
        if self.adapters is not None and self.adapters.begin_recovery(self):
            cause = None
        elif inflight is None:
            cause = self._recovery.record_detokenizer_crash(sequences, inflight_text)
        else:
            cause = self._recovery.record_crash(sequences, inflight, is_killed=is_killed)
        self._rename_sequences([sequence for sequence in sequences if not self._recovery.is_held(sequence)], is_running=not is_engine)
        self._recovery.hold_sequences(sequences, reason)
        if self._detokenizer is not None:
            self._detokenizer.reset()
        self.commands.fail_pending(reason)
        if cause is not None:
            recovery = cause.recovery
            sentence = CRASHED_ENGINE.format(recovery.num_crashes) if is_engine else CRASHED_DETOKENIZER.format(recovery.num_text_crashes)
            self._finish_here([cause], Finish("error", None, sentence))
        self._finish_here([s for s in sequences if s.recovery.is_aborted and s.finish is None], Finish("abort"))

    def resume_requests(self) -> None:
        """The process is back: every sequence continues from its last token, once the engine has
        the adapters."""
        self.commands.restore_state()
        self._router.change_version(self.commands.weight_version)
        if self.recover_weights is None:
            self.restore_adapters()
        else:
            self.recover_weights(self)

    def restore_adapters(self) -> None:
        """The engine has its weights: load its adapters, then let it have its requests."""
        if self.adapters is None:
            self.resume_held()
        else:
            self.adapters.restore(self)

    def resume_held(self) -> None:
        """Let the engine have all sequences that are held."""
        self._recovery.resume_sequences()

    def record_loss(self) -> None:
        """The engine's process has ended, for whatever reason."""
        if self.adapters is not None:
            self.adapters.record_loss(self)

    def abort_adapter(self, version: AdapterVersion, finish: Finish, name: str | None = None) -> None:
        """End the sequences that use an adapter, or those that use it by this name."""
        uses = ((s, s.recovery.adapter) for s in self._sequences.values())
        self._abort_lost([s for s, use in uses if use is not None and use.version is version and name in (None, use.name)], finish)

    def expire_requests(self) -> None:
        """End held sequences that are past their deadline. The engine ends its own; those that it
        has not ended `EXPIRY_GRACE` seconds after their deadline are ended here too."""
        now = time.monotonic()
        late = [sequence for sequence in self._recovery.held if sequence.recovery.expires_at <= now]
        late += [s for s in self._sequences.values() if s.recovery.expires_at + EXPIRY_GRACE <= now and not self._recovery.is_held(s)]
        for sequence in late:
            asked = sequence.recovery.generate.deadline if sequence.recovery.generate is not None else None
            seconds = self.limits.request_timeout if asked is None else asked
            self._abort_lost([sequence], timed_out(seconds))

    def _admit(self, sequence: SequenceState) -> None:
        """Send a sequence to the engine, from its last token on."""
        if (use := sequence.recovery.adapter) is not None and self not in use.version.holders:  # never the base model instead
            self._finish_here([sequence], Finish("error", None, NO_ADAPTER))
            return
        is_started = sequence.recovery.first_ids and not sequence.recovery.num_admissions and self._insert_first(sequence)
        if sequence.finish is not None:
            return
        message = build_generate(sequence)
        self.stats.recovered += sequence.recovery.num_admissions > 0
        sequence.recovery.num_admissions += 1
        texts: list[StepText] = []
        if self._detokenizer is not None and not is_started:
            texts = self._detokenizer.start_request(build_start_detokenize(sequence, message))
        elif self._remote_text:
            self.link.send(build_start_detokenize(sequence, message))
        self.link.send(message)
        if texts:
            self.handle_messages(texts)

    def _insert_first(self, sequence: SequenceState) -> bool:
        """Begin a sequence with the tokens that a prefill server has generated, as if a step had
        yielded them. -> whether it was done: another process has the text, which starts without."""
        if self._remote_text:
            return False
        rid = sequence.recovery.engine_rid
        if self._detokenizer is not None:
            tail = sequence.prompt[-PROMPT_TAIL:]
            self._detokenizer.start_request(StartDetokenize(rid=rid, params=sequence.params, prompt_tail=tail, trace=TRACE.get()))
        self.handle_messages([StepTokens(rids=[rid], token_ids=[sequence.recovery.first_ids])])
        return True

    def _withdraw(self, sequence: SequenceState) -> None:
        """Take a sequence out of the engine; it keeps its output."""
        self._rename_sequences([sequence], is_running=True)

    def _rename_sequences(self, sequences: Sequence[SequenceState], is_running: bool) -> None:
        """Give sequences new names in the engine, so that late messages under the old ones are
        ignored. `is_running`: abort the old ones."""
        if is_running and sequences:
            self.link.send(Abort(rids=[sequence.recovery.engine_rid for sequence in sequences]))
        for sequence in sequences:
            del self._sequences[sequence.recovery.engine_rid]
            number = sequence.recovery.num_admissions + 1
            while (name := f"{sequence.rid}~{number}") in self._sequences or name in self._outstanding.rids:
                number += 1
            sequence.recovery.engine_rid = name
            self._sequences[name] = sequence
