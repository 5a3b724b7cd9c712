"""`Collector`: appends the engine's messages to outputs, in the thread in which they arrive; the
offline side of the transport.

A step costs one list extension per sequence. Text is decoded once at the end, except for streams
and stop strings. Used by `Engine` and by the sessions of `frame.entrypoints.processes.launch`.
Must not know a process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Abort, AnyMessage, ControlReply, Fatal, Finish, Message, StepText, StepTokens, TokenLogprobs
from frame.core.text.detokenizer import Detokenizer
from frame.core.text.incremental_decoder import FAILED, PROMPT_TAIL, TextStream


@dataclass(slots=True)
class Output:
    """One sequence: finished, or while streaming the part so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None: it still runs
    matched: int | str | None = None  # the stop token id or stop string
    error: str | None = None  # one sentence, where the reason is "error"
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    vector: bytes | None = field(default=None, repr=False)  # float32, of a pooling model
    outputs: list[Output] = field(default_factory=list, repr=False, compare=False)  # with `n` > 1 all sequences, this one first


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to sequence `index`, counted over all prompts and their `n` sequences.
    `output` is the sequence so far."""

    index: int
    text: str
    token_ids: list[int]
    output: Output


class SequenceOutput:
    """The output of a sequence that runs, and what its text needs."""

    __slots__ = ("index", "job", "output", "params", "prompt_tail", "rid", "stream")

    def __init__(self, job: Job, index: int, rid: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.job = job
        self.index = index
        self.rid = rid
        self.params = params
        self.prompt_tail = list(prompt[-PROMPT_TAIL:])
        self.output = Output(prompt_tokens=len(prompt))
        self.stream: TextStream | None = None  # only where text is needed at each step


class Job:
    """All sequences of one call. `on_delta` (for streaming) and `on_done` are called in the thread
    of the messages.

    When `on_done` is called while `num_unfinished` is not 0, the engine has crashed; the job can be
    added to another collector.
    """

    def __init__(self, on_done: Callable[[], None], on_delta: Callable[[Delta], None] | None = None) -> None:
        self.sequences: list[SequenceOutput] = []
        self.prompts: list[list[int]] = []  # one per sequence
        self.second_text_starts: list[int] = []  # of pairs of texts: where the second one begins, one a sequence
        self.encoder_inputs: list[bytes] = []  # of encoder-decoder models, one a sequence
        self.num_unfinished = 0
        self.collector: Collector | None = None  # the last one that it was added to
        self.num_crashes = 0  # of engines during this job
        self.is_stopped = False  # its caller has stopped waiting
        self.on_done = on_done
        self.on_delta = on_delta

    @property
    def running(self) -> list[SequenceOutput]:
        """The sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.output.finish_reason is None]


class Collector:
    """Routes messages to jobs. `send` sends aborts to the engine when a stop string matches."""

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self.detokenizer = detokenizer
        self.send: Callable[[Message], None] = lambda message: None
        self.dead_reason: str | None = None  # None: the engine runs
        self._sequences: dict[str, SequenceOutput] = {}
        self._replies: dict[str, Callable[[ControlReply], None]] = {}
        self._lock = threading.Lock()  # between `add_job` and `fail_jobs`

    def add_job(self, job: Job) -> None:
        """Route messages to the job. Raises RuntimeError when the engine is gone."""
        running = job.running
        for sequence in running:
            wants_text = bool(sequence.params.stop) or job.on_delta is not None
            if self.detokenizer is not None and wants_text and sequence.stream is None:
                sequence.stream = self.detokenizer.create_stream(sequence.params, sequence.prompt_tail)
        with self._lock:
            if self.dead_reason is not None:
                raise RuntimeError(self.dead_reason)
            job.num_unfinished, job.collector = len(running), self
            self._sequences.update((sequence.rid, sequence) for sequence in running)
        if not job.num_unfinished:
            job.on_done()

    def remove_job(self, job: Job) -> list[str]:
        """Stop routing messages to the job; returns the rids that still run."""
        return [s.rid for s in job.sequences if self._sequences.pop(s.rid, None) is not None]

    def add_command(self, name: str, on_reply: Callable[[ControlReply], None]) -> None:
        """Call `on_reply` with a command's reply. Raises RuntimeError without an engine."""
        with self._lock:
            if self.dead_reason is not None:
                raise RuntimeError(self.dead_reason)
            self._replies[name] = on_reply

    def handle_message(self, message: AnyMessage) -> None:
        if isinstance(message, StepTokens):
            self._add_tokens(message)
        elif isinstance(message, ControlReply):
            on_reply = self._replies.pop(message.id, None)
            if on_reply is not None:
                on_reply(message)
        elif isinstance(message, Fatal):
            self.fail_jobs(f"{message.process} failed: {message.error}")
        elif isinstance(message, StepText):
            raise TypeError("the collector decodes text itself")

    def _add_tokens(self, message: StepTokens) -> None:
        sequences = self._sequences
        extras = message.logprobs or message.prompt_logprobs or message.num_cached_tokens or message.pooled
        for place, rid in enumerate(message.rids):
            sequence = sequences.get(rid)
            if sequence is None:
                continue
            if extras:
                _add_extras(sequence.output, message, place)
            if sequence.stream is None and place not in message.finishes and sequence.job.on_delta is None:
                sequence.output.token_ids += message.token_ids[place]
            else:
                self._add_step(sequence, message.token_ids[place], message.finishes.get(place))

    def _add_step(self, sequence: SequenceOutput, ids: list[int], finish: Finish | None) -> None:
        output, text, end = sequence.output, "", finish
        if sequence.stream is not None:
            text, used, end = sequence.stream.feed(ids, finish)
            ids = ids[:used]
            output.text += text
        output.token_ids += ids
        if end is not None:
            output.finish_reason, output.matched, output.error = end.reason, end.matched, end.error
            self._sequences.pop(sequence.rid, None)
            if finish is None:  # a stop string, which the engine does not check
                self.send(Abort(rids=[sequence.rid], reason="stop"))
        job = sequence.job
        if job.on_delta is not None:
            job.on_delta(Delta(sequence.index, text, ids, output))
        if end is not None:
            job.num_unfinished -= 1
            if not job.num_unfinished:
                job.on_done()

    def fail_jobs(self, error: str) -> None:
        """The engine is gone: end every job and command. Outputs keep what they have."""
        with self._lock:
            self.dead_reason = self.dead_reason or error
            left, self._sequences = list(self._sequences.values()), {}
        for job in {id(sequence.job): sequence.job for sequence in left}.values():
            job.on_done()
        replies, self._replies = self._replies, {}
        for name, on_reply in replies.items():
            on_reply(ControlReply(id=name, ok=False, error=error))

    def finish_text(self, job: Job) -> None:
        """Decode, in the caller's thread, what was not decoded at each step."""
        if self.detokenizer is None:
            return
        for sequence in job.sequences:
            output = sequence.output
            if sequence.stream is None and output.token_ids:
                stream = self.detokenizer.create_stream(sequence.params, sequence.prompt_tail)
                output.text, _, end = stream.feed(output.token_ids, Finish("length", output.matched))
                if end is FAILED:
                    output.finish_reason, output.error = end.reason, end.error


def _add_extras(output: Output, message: StepTokens, place: int) -> None:
    if place in message.num_cached_tokens:
        output.cached_tokens = message.num_cached_tokens[place]
    output.vector = message.pooled.get(place, output.vector)
    if place in message.logprobs:
        output.logprobs = _concatenate(output.logprobs, message.logprobs[place])
    if place in message.prompt_logprobs:
        output.prompt_logprobs = _concatenate(output.prompt_logprobs, message.prompt_logprobs[place])


def _concatenate(first: TokenLogprobs | None, second: TokenLogprobs) -> TokenLogprobs:
    if first is None:
        return TokenLogprobs(list(second.token_ids), list(second.logprobs), list(second.top))
    first.token_ids.extend(second.token_ids)
    first.logprobs.extend(second.logprobs)
    first.top.extend(second.top)
    return first


def group_outputs(outputs: Iterable[Output], counts: Sequence[int]) -> list[Output]:
    """One output per prompt; `counts[i]` sequences belong to prompt i."""
    flat = iter(outputs)
    results: list[Output] = []
    for count in counts:
        siblings = [next(flat) for _ in range(count)]
        siblings[0].outputs = siblings
        results.append(siblings[0])
    return results
