"""`Collector`: sends sequences to the engine as its queue has room, and appends the messages of the
engine to outputs, in the thread in which they arrive; the offline side of the transport.

A step costs one list extension per sequence. Text is decoded once at the end, except for streams
and stop strings. Used by `Engine` and by the sessions of `frame.entrypoints.offline.session`.
Must not know a process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from frame.core.interfaces.media import MediaItem
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Abort, AnyMessage, ControlReply, Fatal, Finish, Generate, Message, StepText, StepTokens, TokenLogprobs
from frame.entrypoints.engine_client.limits import STATES_OF_TOKENS
from frame.text.detokenizer import Detokenizer
from frame.text.incremental_decoder import FAILED, PROMPT_TAIL, TextStream


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
    # float32 [tokens, hidden_size], of the prompt and of the output but its last token; None: not
    # asked for
    hidden_states: np.ndarray | None = field(default=None, repr=False, compare=False)
    outputs: list[Output] = field(default_factory=list, compare=False)  # with `n` > 1 all sequences, this one first


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to sequence `index`, counted over all prompts and their `n` sequences.
    `output` is the sequence so far."""

    index: int
    text: str
    token_ids: list[int]
    output: Output


class SequenceOutput:
    """The output of a sequence that runs, and what the engine and its text need.

    `second_text_start`: of a pair of texts, the index of the second one's first token.
    `media`: the items of the prompt. `adapter`: a digest. `reads_states`: the model computes the
    hidden states of its tokens, which are all known.
    """

    __slots__ = (
        "adapter", "index", "job", "media", "output", "params", "prompt", "reads_states", "rid", "second_text_start", "stream", "unsent",
    )  # fmt: skip

    def __init__(self, job: Job, rid: str, prompt: list[int], params: SamplingParams) -> None:
        self.job = job
        self.index = len(job.sequences)
        self.rid = rid
        self.prompt = prompt  # shared by the sequences of one prompt
        self.params = params
        self.second_text_start = 0
        self.media: list[MediaItem] = []
        self.adapter = ""
        self.reads_states = False
        self.output = Output(prompt_tokens=len(prompt))
        self.stream: TextStream | None = None  # only where text is needed at each step
        self.unsent: tuple[str, list[int]] = ("", [])  # text and tokens that wait for the `stream_interval`

    @property
    def engine_rid(self) -> str:
        return f"{self.rid}-states" if self.reads_states else self.rid  # messages of the earlier one may be on their way

    @property
    def is_done(self) -> bool:
        return self.output.finish_reason is not None and not self.reads_states

    def add_states(self, data: bytes) -> None:
        """The hidden states that the engine has computed, which end the sequence."""
        num_tokens = len(self.prompt) + max(0, len(self.output.token_ids) - 1)
        self.output.hidden_states = np.frombuffer(data, "<f4").reshape(num_tokens, -1)

    def take_delta(self, text: str, ids: list[int], *, is_last: bool) -> Delta | None:
        """What the caller has not received, with one step's output. None: it waits for more."""
        interval = self.params.stream_interval
        if interval > 1:
            text, ids = self.unsent[0] + text, self.unsent[1] + ids
            is_first = len(ids) == len(self.output.token_ids)
            if not (is_last or is_first or len(ids) >= interval):
                self.unsent = (text, ids)
                return None
            self.unsent = ("", [])
        return Delta(self.index, text, ids, self.output)

    def create_message(self, deadline: float | None) -> Generate:
        """The message that starts the sequence, or continues it from its last token."""
        output, params = self.output, self.params
        if output.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        ids = output.token_ids
        if params.return_hidden_states and not self.reads_states:
            params = msgspec.structs.replace(params, return_hidden_states=False)
        elif self.reads_states:
            return self._create_states_message(deadline)
        return Generate(
            rid=self.rid,
            token_ids=self.prompt + ids,
            params=params,
            output_len=len(ids),
            deadline=deadline,
            second_text_start=self.second_text_start,
            media=self.media,
            adapter=self.adapter,
        )

    def _create_states_message(self, deadline: float | None) -> Generate:
        return Generate(
            rid=self.engine_rid,
            token_ids=self.prompt + self.output.token_ids[:-1],
            params=STATES_OF_TOKENS,
            deadline=deadline,
            second_text_start=self.second_text_start,
            media=self.media,
            adapter=self.adapter,
        )


class Job:
    """All sequences of one call. `on_delta` (for streaming) and `on_done` are called in the thread
    of the messages.

    When `on_done` is called while `num_unfinished` is not 0, the engine has crashed; the job can be
    added to another collector.
    """

    def __init__(self, on_done: Callable[[], None], on_delta: Callable[[Delta], None] | None = None) -> None:
        self.sequences: list[SequenceOutput] = []
        self.num_unfinished = 0
        self.collector: Collector | None = None  # the last one that it was added to
        self.num_crashes = 0  # of engines during this job
        self.is_stopped = False  # its caller has stopped waiting
        self.held = ExitStack()  # what it keeps until its end
        self.on_done = on_done
        self.on_delta = on_delta

    @property
    def adapters(self) -> set[str]:
        """The digests of its sequences."""
        return {sequence.adapter for sequence in self.sequences} - {""}

    @property
    def running(self) -> list[SequenceOutput]:
        """The sequences that have not ended."""
        return [sequence for sequence in self.sequences if not sequence.is_done]


class Collector:
    """Routes messages to jobs, and sends the engine their sequences: at most `max_submitted` at
    once, the others when one of these ends.

    A sequence that the engine refuses for want of room ("queue_full") is sent again, from its last
    token, while others of this collector are submitted. Refused alone, it ends with that error.
    """

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self.detokenizer = detokenizer
        self.dead_reason: str | None = None  # None: the engine runs
        self._process = os.getpid()  # whose threads run the engine
        self._send_all: Callable[[Sequence[Message]], None] = lambda messages: None
        self._max_submitted = self._limit = 0
        self._deadline: float | None = None
        self._submitted: dict[str, SequenceOutput] = {}  # by rid: those that the engine has
        self._pending: deque[SequenceOutput] = deque()  # those that it gets when it has room
        self._replies: dict[str, Callable[[ControlReply], None]] = {}
        self._lock = threading.Lock()  # of `_submitted` and `_pending` with the order of what is sent

    def connect(self, send_all: Callable[[Sequence[Message]], None], max_submitted: int, deadline: float | None) -> None:
        """Send to an engine. `deadline`: seconds of each sequence; None: the engine's."""
        self._send_all, self._deadline = send_all, deadline
        self._max_submitted = self._limit = max_submitted

    def add_job(self, job: Job) -> None:
        """Run the job's sequences that have not ended, each from its last token on. Raises
        RuntimeError when the engine is gone."""
        self._check_process()
        running = job.running
        for sequence in running:
            wants_text = bool(sequence.params.stop or sequence.params.stop_regex) or job.on_delta is not None
            if self.detokenizer is not None and wants_text and sequence.stream is None:
                sequence.stream = self.detokenizer.create_stream(sequence.params, sequence.prompt[-PROMPT_TAIL:])
        with self._lock:
            if self.dead_reason is not None:
                raise RuntimeError(self.dead_reason)
            job.num_unfinished, job.collector = len(running), self
            self._pending.extend(running)
            self._submit_pending()
        if not running:
            job.on_done()

    def remove_job(self, job: Job) -> None:
        """Stop routing messages to the job, and abort what still runs."""
        if not job.num_unfinished:
            return
        with self._lock:
            rids = [s.engine_rid for s in job.running if self._submitted.pop(s.engine_rid, None) is not None]
            self._pending = deque(sequence for sequence in self._pending if sequence.job is not job)
            if rids:
                self._send_all([Abort(rids=rids)])
            self._submit_pending()

    def _submit_pending(self) -> None:
        """Send pending sequences as there is room. The lock is held."""
        room = min(self._limit - len(self._submitted), len(self._pending))
        if room > 0:
            sent = [self._pending.popleft() for _ in range(room)]
            self._submitted.update((sequence.engine_rid, sequence) for sequence in sent)
            self._send_all([sequence.create_message(self._deadline) for sequence in sent])

    def add_command(self, name: str, on_reply: Callable[[ControlReply], None]) -> None:
        """Call `on_reply` with a command's reply. Raises RuntimeError without an engine."""
        self._check_process()
        with self._lock:
            if self.dead_reason is not None:
                raise RuntimeError(self.dead_reason)
            self._replies[name] = on_reply

    def _check_process(self) -> None:
        """Raises RuntimeError in a fork of the engine's process, which has none of its threads."""
        if os.getpid() != self._process:
            raise RuntimeError(f"this process is a fork of process {self._process}, whose engine does not run here; create an Engine in it")

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
        submitted = self._submitted
        extras = message.logprobs or message.prompt_logprobs or message.num_cached_tokens or message.pooled
        for place, rid in enumerate(message.rids):
            sequence = submitted.get(rid)
            if sequence is None:
                continue
            if sequence.reads_states:
                self._add_states(sequence, message.pooled.get(place), message.finishes.get(place))
                continue
            if extras:
                _add_extras(sequence.output, message, place)
            if sequence.stream is None and place not in message.finishes and sequence.job.on_delta is None:
                sequence.output.token_ids += message.token_ids[place]
            else:
                self._add_step(sequence, message.token_ids[place], message.finishes.get(place))
        if message.finishes and self._pending:
            with self._lock:
                self._submit_pending()

    def _add_step(self, sequence: SequenceOutput, ids: list[int], finish: Finish | None) -> None:
        is_refused = finish is not None and finish.code == "queue_full" and len(self._submitted) > 1
        output, text, end = sequence.output, "", None if is_refused else finish
        if sequence.stream is not None:
            text, used, end = sequence.stream.feed(ids, end)
            ids = ids[:used]
            output.text += text
        output.token_ids += ids
        if end is not None:
            output.finish_reason, output.matched, output.error = end.reason, end.matched, end.error
            self._end_sequence(sequence, is_running=finish is None)
        elif is_refused:
            self._return_sequence(sequence)
        job = sequence.job
        if job.on_delta is not None and (delta := sequence.take_delta(text, ids, is_last=end is not None)) is not None:
            job.on_delta(delta)
        if end is None:
            return
        if sequence.params.return_hidden_states and end.reason in ("stop", "length"):
            sequence.reads_states = True
            with self._lock:
                self._pending.append(sequence)
                self._submit_pending()
        else:
            _count_end(job)

    def _add_states(self, sequence: SequenceOutput, data: bytes | None, finish: Finish | None) -> None:
        if data is not None:
            sequence.add_states(data)
        if finish is None:
            return
        if finish.code == "queue_full" and len(self._submitted) > 1:
            self._return_sequence(sequence)
            return
        self._end_sequence(sequence, is_running=False)
        sequence.reads_states, output = False, sequence.output
        if output.hidden_states is None:
            output.finish_reason, output.error = "error", finish.error or "the request was aborted before its hidden states were computed"
        elif output.finish_reason is None:  # of a pooling model
            output.finish_reason = finish.reason
        _count_end(sequence.job)

    def _end_sequence(self, sequence: SequenceOutput, is_running: bool) -> None:
        """`is_running`: the engine runs it still, because it does not check stop strings."""
        with self._lock:
            self._submitted.pop(sequence.engine_rid, None)
            self._limit = min(self._limit + 1, self._max_submitted)
            if is_running:
                self._send_all([Abort(rids=[sequence.rid], reason="stop")])

    def _return_sequence(self, sequence: SequenceOutput) -> None:
        """The engine has refused the sequence: it holds no more than the others now."""
        with self._lock:
            if self._submitted.pop(sequence.engine_rid, None) is not None:  # else its job was removed meanwhile
                self._pending.appendleft(sequence)
            self._limit = max(1, len(self._submitted))

    def fail_jobs(self, error: str) -> None:
        """The engine is gone: end every job and command. Outputs keep what they have."""
        with self._lock:
            self.dead_reason = self.dead_reason or error
            left = [*self._submitted.values(), *self._pending]
            self._submitted, self._pending = {}, deque()
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
                stream = self.detokenizer.create_stream(sequence.params, sequence.prompt[-PROMPT_TAIL:])
                output.text, _, end = stream.feed(output.token_ids, Finish("length", output.matched))
                if end is FAILED:
                    output.finish_reason, output.error = end.reason, end.error


def _count_end(job: Job) -> None:
    job.num_unfinished -= 1
    if not job.num_unfinished:
        job.on_done()


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


def call_soon(loop: asyncio.AbstractEventLoop, call: Any, *arguments: Any) -> None:
    """Call in the loop's thread; ignored when the loop is closed."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return
