"""`EngineClient`: the asyncio side of the engine. Submits sequences, feeds the answers that wait for them, aborts what is cancelled.

One message of a step feeds all its requests in one pass and wakes each waiting answer once; no task or queue operation a token.
It keeps what a request needs to go on in another engine: after a death everything is admitted again from where it was. Knows no HTTP.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import (
    Abort,
    AbortAll,
    AnyMessage,
    ControlReply,
    Fatal,
    Finish,
    Generate,
    Heartbeat,
    Message,
    Ready,
    StepText,
    StepTokens,
    Tokenized,
)
from frame.core.scheduling.request import timed_out
from frame.core.text.detokenizer import Detokenizer
from frame.entrypoints.engine_client.commands import Controls
from frame.entrypoints.engine_client.limits import (
    ClientLimits,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    check_params,
    check_prompt,
    check_request,
    sibling,
)
from frame.entrypoints.engine_client.request_recovery import RequestRecovery
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.engine_client.resubmission import generate_of, watch_of
from frame.entrypoints.engine_client.stats import ClientStats
from frame.entrypoints.engine_client.token_router import TokenRouter
from frame.entrypoints.tracing import TRACE

log = logging.getLogger(__name__)

ENDED_IT = "this request ended the engine {} times at the same place, the last time alone; it is refused, send another one"
ENDED_TEXT = "the text of this request ended the detokenizer {} times at the same place; it is refused, send another one"
LOST = "the server failed to take in a step's tokens of this request, which ends with it; the server's log says why"
EXPIRY_GRACE = 10.0  # seconds that the engine may be late with the end of a request that is past its deadline


class Link(Protocol):
    """The client's end of a transport. `fd` is None when messages are pushed by another thread."""

    def receive(self, timeout: float | None = 0.0) -> list[AnyMessage]: ...

    def send(self, message: Message) -> None: ...

    def close(self) -> None: ...


class EngineClient:
    """One for a server or an offline engine. Every method belongs to the event loop's thread."""

    def __init__(self, link: Link, limits: ClientLimits, detokenizer: Detokenizer | None = None, remote_text: bool = False) -> None:
        self.link = link
        self.limits = limits
        self.load: Heartbeat | None = None
        self.dead: str | None = None  # why, for good
        self.on_notice: Callable[[Ready | Heartbeat | Fatal], None] | None = None  # else a Fatal is the end
        self.on_tokenized: Callable[[Tokenized], None] | None = None
        self._detokenizer = detokenizer  # None: another process sends Text, or there is no text at all
        self._remote_text = remote_text
        self._sequences: dict[str, SequenceState] = {}  # by their names in the engine
        self._rids: set[str] = set()
        self._feed = TokenRouter(self._sequences, ClientStats(), self._end)
        self._recovery = RequestRecovery(self._admit, self._withdraw, limits.grammar_processes)
        self._random = random.Random(limits.seed)
        self._controls = Controls(link.send)
        self._reserved = 0

    @property
    def stats(self) -> ClientStats:
        return self._feed.stats

    # submit --------------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> None:
        """Take `count` places before any work is spent on a request. Raises QueueFullError, EngineDeadError, and InvalidRequestError
        for more than there ever are."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if count > self.limits.max_outstanding:
            raise InvalidRequestError(
                f"the request asks for {count} sequences, and this server holds {self.limits.max_outstanding}; send fewer at once,"
                " or serve with a larger --max-queued-requests"
            )
        if self._reserved + len(self._sequences) + count > self.limits.max_outstanding:
            self.stats.rejected += count
            raise QueueFullError(
                f"{self._reserved + len(self._sequences)} requests are running or waiting, which is all that scheduler.max_queued_requests"
                " allows; try again later"
            )
        self._reserved += count

    def release(self, count: int) -> None:
        self._reserved -= count

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise InvalidRequestError when this cannot be served."""
        check_request(self.limits, prompt, params)

    def check_params(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError when no prompt can be served with these."""
        check_params(self.limits, params)

    def check_prompt(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise InvalidRequestError when the prompt does not fit."""
        check_prompt(self.limits, prompt, params)

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
        namespace: str = "",
        rid: str | None = None,
        owner: str = "",
        deadline: float | None = None,
        second_text_starts: Sequence[int] = (),
    ) -> RequestState:
        """Start every prompt `params.n` times, at once; see `prepare`, `start` and `cancel`."""
        answer = self.prepare(prompts, params, rid, owner, second_text_starts)
        try:
            for sequence in answer.sequences:
                self.start(sequence, priority, namespace, deadline)
        except BaseException:
            self.cancel(answer)
            raise
        return answer

    def prepare(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        rid: str | None,
        owner: str = "",
        second_text_starts: Sequence[int] = (),
    ) -> RequestState:
        """The sequences of every prompt `params.n` times, each to be started. All have passed `check`. `owner` is the tenant whose name
        `rid` is: tenants may use the same names. `second_text_starts` are for pairs of texts: where the second one begins."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        answer = RequestState(rid or uuid.uuid4().hex, owner)
        alone = len(prompts) == 1 and params[0].n == 1
        for prompt_index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            for number in range(wanted.n):
                own = self._seeded(wanted if wanted.n == 1 else sibling(wanted, number))
                index = len(answer.sequences)
                sequence = SequenceState(answer, index, prompt_index, answer.rid if alone else f"{answer.rid}-{index}", prompt, own)
                self._check_name(sequence)
                answer.sequences.append(sequence)
        answer.second_text_starts = second_text_starts
        answer.open = len(answer.sequences)
        return answer

    def _check_name(self, sequence: SequenceState) -> None:
        if sequence.rid in self._rids or sequence.rid in self._sequences:
            raise InvalidRequestError(f"a request with the rid {sequence.name!r} is running; choose another", "rid")

    def cancel(self, answer: RequestState) -> None:
        """Give up an answer of which not all sequences could be started; their places are the caller's again, who gives them back."""
        started = sum(sequence.standing.message is not None for sequence in answer.sequences)
        self.abandon(answer)
        self._reserved += started

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        """With a seed of its own, so that the request draws the same again wherever it is admitted again."""
        return params if params.seed is not None else msgspec.structs.replace(params, seed=self._random.getrandbits(63))

    def start(self, sequence: SequenceState, priority: int = 0, namespace: str = "", deadline: float | None = None) -> None:
        """Start a prepared sequence, in a place that its caller has `reserve`d. Raises EngineDeadError, and InvalidRequestError where its
        name was taken meanwhile."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        self._check_name(sequence)
        rid, prompt = sequence.rid, sequence.prompt
        self._sequences[rid] = sequence
        self._rids.add(rid)
        self.stats.prompt_tokens += len(prompt)
        sequence.standing.message = Generate(
            rid=rid,
            token_ids=prompt,
            params=sequence.params,
            priority=priority,
            namespace=namespace,
            deadline=deadline,
            second_text_start=sequence.answer.second_text_start_of(sequence),
            trace=TRACE.get(),
        )
        self._reserved -= 1
        sequence.standing.expires = time.monotonic() + (self.limits.request_timeout if deadline is None else deadline)
        self._recovery.offer(sequence)

    def abandon(self, answer: RequestState) -> None:
        """The answer is not wanted any more: stop what still runs. Safe to call at any time."""
        started = [s for s in answer.sequences if s.finish is None and s.standing.message is not None]
        gone = [s for s in started if self._sequences.pop(s.standing.name, None) is not None]
        if not gone:
            return
        self.stats.count_ends("abort", len(gone))
        admitted = [sequence.standing.name for sequence in gone if not self._recovery.is_held(sequence)]
        if admitted:
            self.link.send(Abort(rids=admitted))
        for sequence in gone:
            self._rids.discard(sequence.rid)
            self._recovery.drop(sequence)

    def abort(self, names: list[str], owner: str | None = None) -> int:
        """End requests by name (all, when empty), of one tenant alone where `owner` is given; they finish with reason "abort". A request's
        name stands for all its sequences. -> how many sequences end."""
        named, is_all = set(names), not names
        found = [
            s
            for s in self._sequences.values()
            if (owner is None or s.answer.owner == owner) and (is_all or s.name in named or s.answer.rid in named)
        ]
        admitted = [sequence.standing.name for sequence in found if not self._recovery.is_held(sequence)]
        for sequence in found:
            sequence.standing.is_aborted = True
        if is_all and owner is None:
            self.link.send(AbortAll())  # which also ends what this client does not know
        elif admitted:
            self.link.send(Abort(rids=admitted))
        self._end_here([s for s in found if self._recovery.is_held(s)], Finish("abort"))
        return len(found)

    @property
    def away(self) -> str | None:
        """Why the engine takes nothing now; what is submitted waits for it."""
        return self._recovery.away

    @property
    def num_outstanding(self) -> int:
        return len(self._sequences) + self._reserved

    # control -------------------------------------------------------------------------------------------------------

    async def control(self, action: Any, **arguments: Any) -> ControlReply:
        """One command and its answer. Raises EngineDeadError, TimeoutError."""
        if self.dead is not None or self.away is not None:
            raise EngineDeadError(self.dead or self.away)
        return await self._controls.ask(action, arguments)

    # receive -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take in everything that has arrived (the reader callback of the link's fd)."""
        self.take_in(self.link.receive(0.0))

    def take_in(self, messages: Iterable[AnyMessage]) -> None:
        touched: list[RequestState] = []
        for message in messages:
            try:
                self._take(message, touched)
            except Exception:  # the others of this batch are not to be lost with it
                log.exception("a %s could not be taken in", type(message).__name__)
                self._give_up(message)
        for answer in touched:
            try:
                if answer.changed:
                    answer.wake()
            except Exception:  # nor the others' news with one answer's
                log.exception("the news of request %s could not be handed on", answer.rid)
        if self._recovery.on_trial is not None:
            self._recovery.look()

    def _take(self, message: AnyMessage, touched: list[RequestState]) -> None:
        if isinstance(message, StepTokens) and self._detokenizer is not None:
            message = self._detokenizer.process_step(message)
        if isinstance(message, StepText):
            self._feed.take(message, message.texts, touched)
            if message.stopped:
                self.link.send(Abort(rids=[message.rids[place] for place in message.stopped], reason="stop"))
        elif isinstance(message, StepTokens):
            self._feed.take(message, None, touched)
        else:
            self._take_other(message)

    def _take_other(self, message: AnyMessage) -> None:
        if isinstance(message, Heartbeat) and message.process == "engine":
            self.load = message
        if isinstance(message, ControlReply):
            self._controls.take(message)
        elif isinstance(message, Ready | Heartbeat | Fatal):
            if self.on_notice is not None:
                self.on_notice(message)
            elif isinstance(message, Fatal):
                self.fail(f"{message.process} failed: {message.error}")
        elif isinstance(message, Tokenized):
            if self.on_tokenized is not None:
                self.on_tokenized(message)
        else:
            raise TypeError(f"the client does not take {type(message).__name__}")

    def _end(self, sequence: SequenceState, finish: Finish, now: float) -> None:
        sequence.finish = finish
        self._rids.discard(sequence.rid)
        sequence.answer.open -= 1
        self.stats.ended(sequence, finish, now)

    def _end_here(self, sequences: Sequence[SequenceState], finish: Finish) -> None:
        """End sequences that the engine does not have (any more)."""
        now = time.perf_counter()
        for sequence in sequences:
            self._sequences.pop(sequence.standing.name, None)
            self._end(sequence, finish, now)
            self._recovery.drop(sequence)
            if not sequence.changed:
                sequence.changed = True
                sequence.answer.changed.append(sequence)
        for answer in {id(s.answer): s.answer for s in sequences}.values():
            answer.wake()

    def _give_up(self, message: AnyMessage) -> None:
        """End the requests of a step that could not be taken in: it may have held their last tokens."""
        if not isinstance(message, StepTokens | StepText):
            return
        try:
            self._end_lost([s for rid in message.rids if (s := self._sequences.get(rid)) is not None], Finish("error", None, LOST))
        except Exception:
            log.exception("the requests of a %s that was lost could not all be ended", type(message).__name__)

    def _end_lost(self, sequences: Sequence[SequenceState], finish: Finish) -> None:
        """End sequences that the engine may go on with, which is told to stop."""
        admitted = [sequence.standing.name for sequence in sequences if not self._recovery.is_held(sequence)]
        self._end_here(sequences, finish)
        if admitted:
            self.link.send(Abort(rids=admitted))
            if self._detokenizer is not None:
                self._detokenizer.drop_requests(admitted)

    # deaths --------------------------------------------------------------------------------------------------------

    def fail(self, error: str) -> None:
        """It is over: every answer ends with this error, and no more are taken."""
        if self.dead is None:
            self.dead = error
        self._recovery.hold((), error)
        self._end_here(list(self._sequences.values()), Finish("error", None, error))
        self._controls.refuse(error)

    def suspend(self, reason: str, inflight: Mapping[int, int] | None = None, inflight_text: frozenset[int] = frozenset()) -> None:
        """The engine, or the detokenizer that it sends to, is gone and comes again: keep everything until `resume`. `inflight`: who was on
        the device, when it is the engine that died; `inflight_text`: whose text was being made, when it is the detokenizer."""
        sequences = sorted(self._sequences.values(), key=lambda s: (s.answer.created, s.index))
        is_engine = inflight is not None
        guilty = self._recovery.blame_text(sequences, inflight_text) if inflight is None else self._recovery.blame(sequences, inflight)
        self._void([sequence for sequence in sequences if not self._recovery.is_held(sequence)], is_running=not is_engine)
        self._recovery.hold(sequences, reason)
        if self._detokenizer is not None:
            self._detokenizer.reset()
        self._controls.refuse(reason)
        if guilty is not None:
            standing = guilty.standing
            sentence = ENDED_IT.format(standing.deaths) if is_engine else ENDED_TEXT.format(standing.text_deaths)
            self._end_here([guilty], Finish("error", None, sentence))
        self._end_here([s for s in sequences if s.standing.is_aborted and s.finish is None], Finish("abort"))

    def resume(self) -> None:
        """It is back: every sequence goes on from where it was."""
        self._controls.repeat()
        self._recovery.resume()

    def expire(self) -> None:
        """End what waits outside the engine and is past its time. The engine does so for its own; what it has not ended `EXPIRY_GRACE`
        seconds later is ended here as well, whatever became of it there."""
        now = time.monotonic()
        late = [sequence for sequence in self._recovery.held if sequence.standing.expires <= now]
        late += [s for s in self._sequences.values() if s.standing.expires + EXPIRY_GRACE <= now and not self._recovery.is_held(s)]
        for sequence in late:
            asked = sequence.standing.message.deadline if sequence.standing.message is not None else None
            seconds = self.limits.request_timeout if asked is None else asked
            self._end_lost([sequence], timed_out(seconds))

    def _admit(self, sequence: SequenceState) -> None:
        """Send a sequence to the engine, from where it stands."""
        message = generate_of(sequence)
        self.stats.recovered += sequence.standing.admissions > 0
        sequence.standing.admissions += 1
        texts: list[StepText] = []
        if self._detokenizer is not None:
            texts = self._detokenizer.start_request(watch_of(sequence, message))
        elif self._remote_text:
            self.link.send(watch_of(sequence, message))
        self.link.send(message)
        if texts:
            self.take_in(texts)

    def _withdraw(self, sequence: SequenceState) -> None:
        """Take a sequence out of the engine; it keeps what it has."""
        self._void([sequence], is_running=True)

    def _void(self, sequences: Sequence[SequenceState], is_running: bool) -> None:
        """Give sequences new names, so that nothing is believed that is still sent under the old ones."""
        if is_running and sequences:
            self.link.send(Abort(rids=[sequence.standing.name for sequence in sequences]))
        for sequence in sequences:
            del self._sequences[sequence.standing.name]
            number = sequence.standing.admissions + 1
            while (name := f"{sequence.rid}~{number}") in self._sequences or name in self._rids:
                number += 1
            sequence.standing.name = name
            self._sequences[name] = sequence
