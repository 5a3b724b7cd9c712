"""Gathers what the engine sends into outputs, in whichever thread the messages arrive; the offline API's side of the transport.

A step costs one list extension a sequence. Text is decoded once at the end, unless a caller streams or a stop string is watched for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Abort, AnyMessage, ControlReply, Fatal, Finish, Message, StepText, StepTokens, TokenLogprobs
from frame.core.text.detokenizer import Detokenizer
from frame.core.text.incremental_decoder import FAILED, PROMPT_TAIL, TextStream


@dataclass(slots=True)
class Output:
    """One finished (or, while streaming, growing) sequence. With `n` > 1 `outputs` holds all of them, the first being this one.

    `finish_reason` is "stop", "length", "abort" or "error"; `matched` the stop token or string; `error` a sentence.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    matched: int | str | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    vector: bytes | None = field(default=None, repr=False)  # float32; of a model that embeds or classifies
    outputs: list[Output] = field(default_factory=list, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to sequence `index` (place in the list of prompts, times `n`). `output` is the sequence so far."""

    index: int
    text: str
    token_ids: list[int]
    output: Output


class Collected:
    """A sequence in progress."""

    __slots__ = ("index", "job", "output", "params", "prompt_tail", "rid", "stream")

    def __init__(self, job: Job, index: int, rid: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.job = job
        self.index = index
        self.rid = rid
        self.params = params
        self.prompt_tail = list(prompt[-PROMPT_TAIL:])
        self.output = Output(prompt_tokens=len(prompt))
        self.stream: TextStream | None = None  # only when text is wanted at every step


class Job:
    """All sequences of one call. `on_delta` (streaming) and `on_done` are called in the thread of the messages. A job that is done with
    some sequences still `open` has lost its engine, and may be added to another one's collector."""

    def __init__(self, on_done: Callable[[], None], on_delta: Callable[[Delta], None] | None = None) -> None:
        self.sequences: list[Collected] = []
        self.prompts: list[list[int]] = []  # one a sequence
        self.second_text_starts: list[int] = []  # of pairs of texts: where the second one begins, one a sequence
        self.open = 0
        self.collector: Collector | None = None  # where it was added last
        self.deaths = 0  # of engines, under this job
        self.is_stopped = False  # nobody waits for it any more
        self.on_done = on_done
        self.on_delta = on_delta

    @property
    def running(self) -> list[Collected]:
        """The sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.output.finish_reason is None]


class Collector:
    """Routes messages to jobs. `send` is how stop strings tell the engine to stop."""

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self.detokenizer = detokenizer
        self.send: Callable[[Message], None] = lambda message: None
        self.dead: str | None = None
        self._sequences: dict[str, Collected] = {}
        self._replies: dict[str, Callable[[ControlReply], None]] = {}
        self._lock = threading.Lock()  # between the start of a job and the death of the engine

    def add(self, job: Job) -> None:
        """Begin to listen for a job's sequences. Raises RuntimeError when the engine is dead."""
        running = job.running
        for sequence in running:
            wants_text = bool(sequence.params.stop) or job.on_delta is not None
            if self.detokenizer is not None and wants_text and sequence.stream is None:
                sequence.stream = self.detokenizer.create_stream(sequence.params, sequence.prompt_tail)
        with self._lock:
            if self.dead is not None:
                raise RuntimeError(self.dead)
            job.open, job.collector = len(running), self
            self._sequences.update((sequence.rid, sequence) for sequence in running)
        if not job.open:
            job.on_done()

    def remove(self, job: Job) -> list[str]:
        """Stop listening; returns the rids that still run."""
        return [s.rid for s in job.sequences if self._sequences.pop(s.rid, None) is not None]

    def expect(self, name: str, on_reply: Callable[[ControlReply], None]) -> None:
        """Call `on_reply` with the answer to control `name`. Raises RuntimeError when the engine is dead."""
        with self._lock:
            if self.dead is not None:
                raise RuntimeError(self.dead)
            self._replies[name] = on_reply

    def take(self, message: AnyMessage) -> None:
        """The sink of the transport."""
        if isinstance(message, StepTokens):
            self._tokens(message)
        elif isinstance(message, ControlReply):
            on_reply = self._replies.pop(message.id, None)
            if on_reply is not None:
                on_reply(message)
        elif isinstance(message, Fatal):
            self.fail(f"{message.process} failed: {message.error}")
        elif isinstance(message, StepText):
            raise TypeError("the collector decodes text itself")

    def _tokens(self, message: StepTokens) -> None:
        sequences = self._sequences
        extras = message.logprobs or message.prompt_logprobs or message.num_cached_tokens or message.pooled
        for place, rid in enumerate(message.rids):
            sequence = sequences.get(rid)
            if sequence is None:
                continue
            if extras:
                _take_extras(sequence.output, message, place)
            if sequence.stream is None and place not in message.finishes and sequence.job.on_delta is None:
                sequence.output.token_ids += message.token_ids[place]
            else:
                self._step(sequence, message.token_ids[place], message.finishes.get(place))

    def _step(self, sequence: Collected, ids: list[int], finish: Finish | None) -> None:
        output, text, end = sequence.output, "", finish
        if sequence.stream is not None:
            text, used, end = sequence.stream.feed(ids, finish)
            ids = ids[:used]
            output.text += text
        output.token_ids += ids
        if end is not None:
            output.finish_reason, output.matched, output.error = end.reason, end.matched, end.error
            self._sequences.pop(sequence.rid, None)
            if finish is None:  # a stop string: the engine does not know yet
                self.send(Abort(rids=[sequence.rid], reason="stop"))
        job = sequence.job
        if job.on_delta is not None:
            job.on_delta(Delta(sequence.index, text, ids, output))
        if end is not None:
            job.open -= 1
            if not job.open:
                job.on_done()

    def fail(self, error: str) -> None:
        """The engine is gone: jobs are told, commands fail. Sequences stay as they are."""
        with self._lock:
            self.dead = self.dead or error
            left, self._sequences = list(self._sequences.values()), {}
        for job in {id(sequence.job): sequence.job for sequence in left}.values():
            job.on_done()
        replies, self._replies = self._replies, {}
        for name, on_reply in replies.items():
            on_reply(ControlReply(id=name, ok=False, error=error))

    def finish_text(self, job: Job) -> None:
        """Decode what was not decoded on the way; in the caller's thread."""
        if self.detokenizer is None:
            return
        for sequence in job.sequences:
            output = sequence.output
            if sequence.stream is None and output.token_ids:
                stream = self.detokenizer.create_stream(sequence.params, sequence.prompt_tail)
                output.text, _, end = stream.feed(output.token_ids, Finish("length", output.matched))
                if end is FAILED:
                    output.finish_reason, output.error = end.reason, end.error


def _take_extras(output: Output, message: StepTokens, place: int) -> None:
    if place in message.num_cached_tokens:
        output.cached_tokens = message.num_cached_tokens[place]
    output.vector = message.pooled.get(place, output.vector)
    if place in message.logprobs:
        output.logprobs = _joined(output.logprobs, message.logprobs[place])
    if place in message.prompt_logprobs:
        output.prompt_logprobs = _joined(output.prompt_logprobs, message.prompt_logprobs[place])


def _joined(first: TokenLogprobs | None, second: TokenLogprobs) -> TokenLogprobs:
    if first is None:
        return TokenLogprobs(list(second.token_ids), list(second.logprobs), list(second.top))
    first.token_ids.extend(second.token_ids)
    first.logprobs.extend(second.logprobs)
    first.top.extend(second.top)
    return first


def grouped(job: Job, counts: Sequence[int]) -> list[Output]:
    """The outputs of each prompt: `counts[i]` sequences belong to prompt i."""
    flat = iter(job.sequences)
    results: list[Output] = []
    for count in counts:
        siblings = [next(flat).output for _ in range(count)]
        siblings[0].outputs = siblings
        results.append(siblings[0])
    return results
