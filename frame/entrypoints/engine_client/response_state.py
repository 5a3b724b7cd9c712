"""`RequestState` and its `SequenceState`s: the client's view of one request, to which each engine
step adds tokens and text.

vLLM's counterpart is `RequestState` of its `OutputProcessor`, with `RequestOutputCollector`. Must
not know a transport or HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from frame.core.interfaces.kv_tier import KVTransfer
from frame.core.interfaces.media import MediaItem
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, Generate, SessionPin, TokenLogprobs
from frame.entrypoints.engine_client.adapter_spool import AdapterUse

MAX_ADAPTERS_SHOWN = 16


@dataclass(slots=True)
class SequenceTimes:
    """`waited`: seconds in the engine's queue. `first` and `last`: when those tokens arrived
    (`time.perf_counter`; 0: not yet)."""

    waited: float = 0.0
    first: float = 0.0
    last: float = 0.0


@dataclass(slots=True)
class RecoveryState:
    """What a sequence needs to continue in a restarted engine, and how many crashes it was part of.

    `engine_rid` names the sequence in the engine. It changes with each recovery, so that late
    messages of an earlier admission match no sequence.
    """

    engine_rid: str
    output_ids: array[int] = field(default_factory=partial(array, "i"))  # every token so far
    media: list[MediaItem] = field(default_factory=list)  # shared by the sequences of a prompt
    adapter: AdapterUse | None = None
    transfer: KVTransfer | None = None  # of the prompt's blocks, to or from another server
    pin: SessionPin | None = None
    first_ids: list[int] = field(default_factory=list)  # tokens that a prefill server has generated
    num_cached: int | None = None  # prompt tokens that a prefill server found in its prefix cache; None: none computed it
    num_accepted: int = 0  # drafted tokens so far
    num_rejected: int = 0
    generate: Generate | None = None  # the message of the first admission; None until the sequence is started
    num_admissions: int = 0
    expires_at: float = 0.0  # seconds, time.monotonic
    is_aborted: bool = False  # an abort was sent; the engine may have crashed before it took effect
    num_crashes: int = 0  # of the engine, with this sequence on the device, without progress since the first of them
    crash_num_tokens: int = 0  # output tokens at the last of them
    crash_num_prefilled: int = 0  # most prompt tokens whose prefill had begun at one of them
    num_text_crashes: int = 0  # of the detokenizer, during this sequence's text, without progress since the first of them
    text_crash_num_tokens: int = 0  # output tokens at the last of them


@dataclass(slots=True, eq=False, repr=False)
class SequenceState:
    """One sequence of a request: the output since the last `take_output`, totals, and its recovery
    state.

    `index` is its position in the request, `prompt_index` that of its prompt. `name` is unique
    among the sequences of its tenant, `rid` in the server. `has_update`: it is in the request's
    `changed`.
    """

    request: RequestState
    index: int
    prompt_index: int
    name: str
    prompt: list[int]  # token ids
    params: SamplingParams
    texts: list[str] = field(default_factory=list)  # since the last `take_output`, as are the next two
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None
    finish: Finish | None = None
    cached: int = 0  # prompt tokens that came from the prefix cache
    cached_tiers: dict[str, int] = field(default_factory=dict)  # of these, tokens that came from tiers, by their names
    num_kept: int = 0  # prompt tokens that a session keeps
    times: SequenceTimes = field(default_factory=SequenceTimes)
    has_update: bool = False
    versions: list[tuple[int, str]] = field(default_factory=list)  # of the weights: (index of their first output token, version)
    num_reported: int = 0  # output tokens that the reader has taken
    recovery: RecoveryState = field(init=False)

    def __post_init__(self) -> None:
        self.recovery = RecoveryState(self.rid)

    @property
    def rid(self) -> str:
        owner = self.request.owner  # a tenant's name has no colon
        return f"{owner}:{self.name}" if owner else self.name

    @property
    def weight_version(self) -> str:
        """The version of the weights that made the last token, or that makes the first one; ""
        before the start."""
        versions = self.weight_versions
        return versions[-1][1] if versions else ""

    @property
    def weight_versions(self) -> Sequence[tuple[int, str]]:
        """`versions` without one that has made no token, as after an update before an abort."""
        has_none = len(self.versions) > 1 and self.versions[-1][0] == self.num_tokens
        return self.versions[:-1] if has_none else self.versions

    def change_version(self, version: str) -> None:
        """Later tokens are of these weights."""
        if self.versions and self.versions[-1][0] == self.num_tokens:
            self.versions.pop()
        if version != self.weight_version:
            self.versions.append((self.num_tokens, version))

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.recovery.output_ids)

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities of its output and prompt so far, those of alternatives too."""
        size = 0 if self.params.logprobs is None else self.num_tokens * (1 + self.params.num_alternatives)
        return size if self.prompt_logprobs is None else size + len(self.prompt) * (1 + (self.params.prompt_logprobs or 0))

    @property
    def num_written(self) -> int:
        """Prompt tokens that a session keeps and that the prefix cache did not have."""
        return max(0, self.num_kept - self.cached)

    @property
    def has_interval(self) -> bool:
        """Whether there are tokens for one event of a `stream_interval`; the first token is one."""
        return not self.num_reported or self.num_tokens - self.num_reported >= self.params.stream_interval

    def take_output(self) -> tuple[str, list[int], list[TokenLogprobs]]:
        """The text, tokens and logprobs since the last call."""
        texts, ids, logprobs = self.texts, self.token_ids, self.logprobs
        self.texts, self.token_ids = [], []
        self.num_reported = self.num_tokens
        if logprobs:
            self.logprobs = []
        return (texts[0] if len(texts) == 1 else "".join(texts)), ids, logprobs


@dataclass(slots=True, eq=False, repr=False)
class RequestState:
    """All sequences of one client request (prompts × n). One handler reads it: by `wait`, or by the
    callback `on_update`."""

    rid: str = ""  # the request's name for its client; the names of its sequences begin with it
    owner: str = ""  # the tenant; "" where the server asks for no key
    sequences: list[SequenceState] = field(default_factory=list)
    sent_name: Callable[[str], str] = str  # sampling parameter -> the client's name for it
    changed: list[SequenceState] = field(default_factory=list)  # sequences with output that was not taken
    num_unfinished: int = 0  # sequences without a finish
    submitted: float = field(default_factory=time.perf_counter)
    created_at: float = field(default_factory=time.time)  # Unix seconds, as responses show it; of the server that began it
    fingerprint: str = ""  # OpenAI's system_fingerprint, of the server that began it; "": not known yet
    created: float = field(init=False)  # arrival of the request, where it was parsed and tokenized before the submission
    is_disconnected: bool = False
    is_answered: bool = False  # a part of the response was sent
    on_update: Callable[[], None] | None = None  # called instead of waking `wait`
    namespace: str = ""  # of the prefix cache
    second_text_starts: Sequence[int] = ()  # one a prompt, for pairs of texts: where the second text begins
    on_left: Callable[[], None] | None = None  # called once, when no sequence will be in an engine any more
    vectors: dict[int, bytes] = field(default_factory=dict)  # by sequence index: float32 bytes, from a pooling engine
    _num_left: int = 0  # sequences that were started and are in no engine any more
    _num_unread: int = 0  # tokens that arrived for sequences with output that was not taken
    _overrun: tuple[int, Callable[[], None]] | None = None  # see `set_backpressure_limit`
    _waiter: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self.created = self.submitted

    @property
    def first_sequences(self) -> list[SequenceState]:
        """The first sequence of each prompt, which counts once in usage."""
        return list({sequence.prompt_index: sequence for sequence in reversed(self.sequences)}.values())

    @property
    def adapters(self) -> str:
        """The names and versions of its adapters, for its client; "" without any."""
        labels = dict.fromkeys(str(s.recovery.adapter) for s in self.sequences if s.recovery.adapter is not None)
        return ", ".join(islice(labels, MAX_ADAPTERS_SHOWN))

    def count_left(self) -> None:
        """One more sequence is in no engine any more."""
        self._num_left += 1
        if self._num_left == len(self.sequences):
            self.leave()

    def leave(self) -> None:
        """No sequence will be in an engine any more; a second call does nothing."""
        on_left, self.on_left = self.on_left, None
        if on_left is not None:
            on_left()

    @property
    def num_unread(self) -> int:
        """Tokens, and alternatives of log-probabilities, that wait for the reader."""
        return self._num_unread

    def set_backpressure_limit(self, max_unread: int, on_overrun: Callable[[], None]) -> None:
        """Bound the output that waits for the reader of a streamed response: above `max_unread`
        tokens (each alternative logprob counts as one more) `on_overrun` is called, once; it should
        end the request.
        """
        self._overrun = max_unread, on_overrun

    def add_unread(self, sequence: SequenceState, count: int) -> None:
        """Count `count` new tokens of a sequence with output that was not taken."""
        self._num_unread += count * (1 + sequence.params.num_alternatives)
        if self._overrun is not None and self._num_unread > self._overrun[0]:
            (_, on_overrun), self._overrun = self._overrun, None
            on_overrun()

    async def wait(self) -> list[SequenceState]:
        """Wait for sequences with new output; empty after a disconnect or the end."""
        while not self.changed and not self.is_disconnected and self.num_unfinished:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_changed()

    def take_changed(self) -> list[SequenceState]:
        """The sequences with new output since the last call."""
        changed, self.changed, self._num_unread = self.changed, [], 0
        for sequence in changed:
            sequence.has_update = False
        return changed

    async def wait_until_complete(self, max_logprobs: float = math.inf, read: Callable[[SequenceState], None] | None = None) -> None:
        """Return when every sequence has ended, the client has disconnected, or more than
        `max_logprobs` log-probabilities are held. The output stays in the sequences for one
        `take_output`; `read` is called for each that has new output, and may take it."""
        held: dict[int, int] = {}  # by index of the sequence
        total = 0
        while self.num_unfinished and not self.is_disconnected and total <= max_logprobs:
            for sequence in await self.wait():
                if read is not None:
                    read(sequence)
                if number := sequence.num_logprobs:
                    total += number - held.get(sequence.index, 0)
                    held[sequence.index] = number

    def mark_disconnected(self) -> None:
        """The client closed its connection: wake the handler."""
        self.is_disconnected = True
        self.notify()

    def notify(self) -> None:
        """Tell the handler that there is new output."""
        if self.on_update is not None:
            self.on_update()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
