"""`EngineClient`: the asyncio side of the engine. Submits sequences, feeds the answers that wait for them, aborts what is cancelled.

One message of a step feeds all its requests in one pass and wakes each waiting answer once; no task or queue operation a token.
Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from frame.core.detokenizer import PROMPT_TAIL, Detokenizer
from frame.core.messages import (
    Abort,
    AnyMessage,
    Control,
    ControlReply,
    Fatal,
    Finish,
    Generate,
    Heartbeat,
    Message,
    Ready,
    Text,
    Tokenized,
    TokenLogprobs,
    Tokens,
    Watch,
)
from frame.core.sampling_params import SamplingParams
from frame.entrypoints.answers import Answer, Stream
from frame.entrypoints.limits import ClientLimits, EngineDeadError, InvalidRequestError, QueueFullError, check_request, sibling

CONTROL_TIMEOUT = 30.0  # seconds


@dataclass(slots=True)
class ClientStats:
    """What metrics are made of; lists (of seconds, and of tokens a request) are taken and emptied by the reader."""

    first_token: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
    end_to_end: list[float] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    prompt_sizes: list[float] = field(default_factory=list)
    output_sizes: list[float] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0


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
        self.stats = ClientStats()
        self.load: Heartbeat | None = None
        self.heartbeat_at = time.monotonic()
        self.dead: str | None = None
        self.on_tokenized: Callable[[Tokenized], None] | None = None
        self._detokenizer = detokenizer  # None: another process sends Text, or there is no text at all
        self._remote_text = remote_text
        self._sequences: dict[str, Stream] = {}
        self._controls: dict[str, asyncio.Future[ControlReply]] = {}
        self._reserved = 0

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

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
        namespace: str = "",
        rid: str | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """Start every prompt `params.n` times. All have passed `check`. The places are `reserve`d by the caller and are used up."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        answer = Answer(rid or uuid.uuid4().hex)
        alone = len(prompts) == 1 and params[0].n == 1
        for prompt_index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            for number in range(wanted.n):
                own = wanted if wanted.n == 1 else sibling(wanted, number)
                index = len(answer.sequences)
                sequence = Stream(answer, index, prompt_index, answer.rid if alone else f"{answer.rid}-{index}", prompt, own)
                if sequence.rid in self._sequences:
                    raise InvalidRequestError(f"a request with the rid {sequence.rid!r} is running; choose another", "rid")
                answer.sequences.append(sequence)
        answer.open = len(answer.sequences)
        self._reserved -= answer.open
        try:
            for sequence in answer.sequences:
                self._start(sequence, priority, namespace, deadline)
        except BaseException:
            self.abandon(answer)
            self._reserved += answer.open  # the caller's again, who gives them back
            raise
        return answer

    def _start(self, sequence: Stream, priority: int, namespace: str, deadline: float | None) -> None:
        rid, prompt = sequence.rid, sequence.prompt
        self._sequences[rid] = sequence
        self.stats.prompt_tokens += len(prompt)
        watch = Watch(rid=rid, params=sequence.params, prompt_tail=prompt[-PROMPT_TAIL:])
        if self._detokenizer is not None:
            self._detokenizer.watch(watch)
        elif self._remote_text:
            self.link.send(watch)
        params = sequence.params
        self.link.send(Generate(rid=rid, token_ids=prompt, params=params, priority=priority, namespace=namespace, deadline=deadline))

    def abandon(self, answer: Answer) -> None:
        """The answer is not wanted any more: stop what still runs. Safe to call at any time."""
        rids = [s.rid for s in answer.sequences if s.finish is None and self._sequences.pop(s.rid, None) is not None]
        if rids:
            self._count("abort", len(rids))
            self.link.send(Abort(rids=rids))

    def abort(self, rids: list[str]) -> None:
        """End requests by name (all, when empty); they finish with reason "abort". A request's name stands for all its sequences."""
        if not rids:
            self.link.send(Abort())
            return
        named = set(rids)
        found = [rid for rid, sequence in self._sequences.items() if rid in named or sequence.answer.rid in named]
        if found:  # an empty list would mean all
            self.link.send(Abort(rids=found))

    @property
    def num_outstanding(self) -> int:
        return len(self._sequences) + self._reserved

    # control -------------------------------------------------------------------------------------------------------

    async def control(self, action: Any, **arguments: Any) -> ControlReply:
        """One command and its answer. Raises EngineDeadError, TimeoutError."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        control = Control(id=uuid.uuid4().hex, action=action, arguments=arguments)
        future = self._controls[control.id] = asyncio.get_running_loop().create_future()
        self.link.send(control)
        try:
            return await asyncio.wait_for(future, CONTROL_TIMEOUT)
        finally:
            self._controls.pop(control.id, None)

    # receive -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take in everything that has arrived (the reader callback of the link's fd)."""
        self.take_in(self.link.receive(0.0))

    def take_in(self, messages: Iterable[AnyMessage]) -> None:
        touched: list[Answer] = []
        for message in messages:
            if isinstance(message, Text):
                self._feed(message, message.texts, touched)
            elif isinstance(message, Tokens):
                if self._detokenizer is not None:
                    text = self._detokenizer.process(message)
                    self._feed(text, text.texts, touched)
                else:
                    self._feed(message, None, touched)
            else:
                self._take_other(message)
        for answer in touched:
            if answer.changed:
                answer.wake()

    def _take_other(self, message: AnyMessage) -> None:
        if isinstance(message, Heartbeat):
            self.load = message
            self.heartbeat_at = time.monotonic()
        elif isinstance(message, ControlReply):
            future = self._controls.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Fatal):
            self.fail(f"{message.process} failed: {message.error}")
        elif isinstance(message, Tokenized) and self.on_tokenized is not None:
            self.on_tokenized(message)
        elif not isinstance(message, Ready | Tokenized):
            raise TypeError(f"the client does not take {type(message).__name__}")

    def _feed(self, message: Text | Tokens, texts: list[str] | None, touched: list[Answer]) -> None:
        sequences, token_ids, now = self._sequences, message.token_ids, time.perf_counter()
        latencies, count = self.stats.inter_token, 0
        for place, rid in enumerate(message.rids):
            sequence = sequences.get(rid)
            if sequence is None:  # abandoned meanwhile
                continue
            ids = token_ids[place]
            if ids:
                times = sequence.times
                if times.last:
                    latencies.append((now - times.last) / len(ids))
                else:
                    self.stats.first_token.append(now - sequence.answer.created)
                    times.first = now
                times.last = now
                sequence.token_ids += ids
                sequence.num_tokens += len(ids)
                count += len(ids)
            if texts is not None:
                sequence.texts.append(texts[place])
            if not sequence.changed:
                sequence.changed = True
                answer = sequence.answer
                if not answer.changed:
                    touched.append(answer)
                answer.changed.append(sequence)
        self.stats.generated_tokens += count
        self._feed_rest(message, now)

    def _feed_rest(self, message: Text | Tokens, now: float) -> None:
        """What concerns a few of the requests only."""
        rids, sequences = message.rids, self._sequences
        for place, cached in message.cached.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.cached = cached
                self.stats.cached_tokens += cached
        for place, waited in message.waited.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.times.waited = waited
                self.stats.queue.append(waited)
                self.stats.prefill.append(max(0.0, now - sequence.answer.submitted - waited))
        for place, logprobs in message.logprobs.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.logprobs.append(logprobs)
        for place, logprobs in message.prompt_logprobs.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.prompt_logprobs = _joined(sequence.prompt_logprobs, logprobs)
        for place, finish in message.finishes.items():
            if (sequence := sequences.pop(rids[place], None)) is not None:
                self._end(sequence, finish, now)
        if isinstance(message, Text) and message.stopped:
            self.link.send(Abort(rids=[rids[place] for place in message.stopped], reason="stop"))

    def _end(self, sequence: Stream, finish: Finish, now: float) -> None:
        sequence.finish = finish
        sequence.answer.open -= 1
        stats = self.stats
        stats.end_to_end.append(now - sequence.answer.created)
        stats.prompt_sizes.append(len(sequence.prompt))
        stats.output_sizes.append(sequence.num_tokens)
        if sequence.times.first:
            stats.decode.append(now - sequence.times.first)
        self._count(finish.reason, 1)

    def _count(self, reason: str, count: int) -> None:
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + count

    def fail(self, error: str) -> None:
        """A process died: every answer ends with this error, and no more are taken."""
        if self.dead is None:
            self.dead = error
        now = time.perf_counter()
        sequences, self._sequences = list(self._sequences.values()), {}
        for sequence in sequences:
            self._end(sequence, Finish("error", None, error), now)
            if not sequence.changed:
                sequence.changed = True
                sequence.answer.changed.append(sequence)
        for answer in {id(s.answer): s.answer for s in sequences}.values():
            answer.wake()
        for future in self._controls.values():
            if not future.done():
                future.set_exception(EngineDeadError(error))


def _joined(first: TokenLogprobs | None, second: TokenLogprobs) -> TokenLogprobs:
    """Prompt logprobs come a chunk at a time."""
    if first is None:
        return second
    return TokenLogprobs(first.token_ids + second.token_ids, first.logprobs + second.logprobs, first.top + second.top)
