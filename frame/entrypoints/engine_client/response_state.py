"""`RequestState` and its `SequenceState`s: what one client request waits for, filled a step at a time by the client. Knows no
transport and no HTTP."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, Generate, TokenLogprobs


class Times:
    """When things happened to a sequence (`time.perf_counter`; 0: not yet). `waited`: seconds until the engine had a place for it."""

    __slots__ = ("first", "last", "waited")

    def __init__(self) -> None:
        self.waited = 0.0
        self.first = 0.0  # token
        self.last = 0.0  # token


class RecoveryState:
    """All that a sequence needs to go on in another engine. `name` is what it is called in the engine: another one after each
    re-admission, so that whatever an admission before it still sends is nobody's."""

    __slots__ = (
        "admissions", "deaths", "died_at", "died_in_prompt", "expires", "is_aborted", "message", "name", "output", "text_deaths",
        "text_died_at",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.output = array("i")  # every token so far
        self.message: Generate | None = None  # its first admission
        self.admissions = 0
        self.expires = 0.0  # seconds, monotonic
        self.is_aborted = False  # the engine was told so, and may have died before it heard
        self.deaths = 0  # of the engine, with this sequence on the device and no further than before
        self.died_at = 0  # tokens that it had at the last of them
        self.died_in_prompt = 0  # most tokens of the prompt whose prefill was begun at one of them
        self.text_deaths = 0  # of the detokenizer, in the midst of this sequence's text and no further than before
        self.text_died_at = 0


class SequenceState:
    """One sequence of an answer: what came since the last `take`, totals, and where it stands. `index` is its place in the answer. `name`
    is unique among those of its tenant, `rid` in the server."""

    __slots__ = (
        "answer", "cached", "changed", "finish", "index", "logprobs", "name", "params", "prompt", "prompt_index", "prompt_logprobs",
        "standing", "texts", "times", "token_ids",
    )  # fmt: skip

    def __init__(self, answer: RequestState, index: int, prompt_index: int, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.answer = answer
        self.index = index
        self.prompt_index = prompt_index
        self.name = name
        self.prompt = prompt
        self.params = params
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: TokenLogprobs | None = None
        self.finish: Finish | None = None
        self.cached = 0
        self.times = Times()
        self.changed = False
        self.standing = RecoveryState(self.rid)

    @property
    def rid(self) -> str:
        owner = self.answer.owner  # which has no colon
        return f"{owner}:{self.name}" if owner else self.name

    @property
    def num_tokens(self) -> int:
        return len(self.standing.output)

    def take(self) -> tuple[str, list[int], list[TokenLogprobs]]:
        """The text, tokens and logprobs since the last call."""
        texts, ids, logprobs = self.texts, self.token_ids, self.logprobs
        self.texts, self.token_ids = [], []
        if logprobs:
            self.logprobs = []
        return (texts[0] if len(texts) == 1 else "".join(texts)), ids, logprobs


class RequestState:
    """All sequences that one client request asked for (prompts × n). One waiter: the handler that serves it."""

    __slots__ = (
        "_most_unread", "_num_unread", "_on_overrun", "_waiter", "changed", "created", "gone", "on_news", "open", "owner", "rid",
        "second_text_starts", "sequences", "submitted", "vectors",
    )  # fmt: skip

    def __init__(self, rid: str = "", owner: str = "") -> None:
        self.rid = rid  # of the request, as its client knows it; its sequences' names begin with it
        self.owner = owner  # the tenant that sent it; "" where no key is asked for
        self.sequences: list[SequenceState] = []
        self.changed: list[SequenceState] = []
        self.open = 0  # sequences without a finish
        self.submitted = time.perf_counter()
        self.created = self.submitted  # when the request arrived, if it was read and tokenized before
        self.gone = False  # the client hung up
        self.on_news: Callable[[], None] | None = None  # instead of a waiter
        self.second_text_starts: Sequence[int] = ()  # of prompts that are pairs of texts: where the second one begins
        self.vectors: dict[int, bytes] = {}  # float32, by sequence; of an engine that embeds or classifies
        self._num_unread = 0  # tokens on top of others that nobody has taken
        self._most_unread: int | None = None
        self._on_overrun: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    def bound(self, most_unread: int, on_overrun: Callable[[], None]) -> None:
        """For an answer that is sent as it comes: when more than so many tokens pile up (with logprobs, each alternative is one more),
        `on_overrun` is called, once; it should end the request. An answer that is sent whole waits for its last token."""
        self._most_unread, self._on_overrun = most_unread, on_overrun

    def add_unread(self, sequence: SequenceState, count: int) -> None:
        """So many tokens more came of a sequence whose last ones have not been taken yet."""
        self._num_unread += count * (1 + (sequence.params.logprobs or 0))
        if self._most_unread is not None and self._on_overrun is not None and self._num_unread > self._most_unread:
            self._most_unread = None
            self._on_overrun()

    def second_text_start_of(self, sequence: SequenceState) -> int:
        return self.second_text_starts[sequence.prompt_index] if self.second_text_starts else 0

    async def wait(self) -> list[SequenceState]:
        """The sequences with something new; empty when the client is gone or all is over."""
        while not self.changed and not self.gone and self.open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_changed()

    def take_changed(self) -> list[SequenceState]:
        changed, self.changed, self._num_unread = self.changed, [], 0
        for sequence in changed:
            sequence.changed = False
        return changed

    async def complete(self) -> None:
        """Until every sequence ended, or the client is gone. Deltas stay in the sequences, for one `take`."""
        while self.open and not self.gone:
            await self.wait()

    def hang_up(self) -> None:
        """The client is gone: let the handler wake."""
        self.gone = True
        self.wake()

    def wake(self) -> None:
        """Tell whoever serves the answer that there is news."""
        if self.on_news is not None:
            self.on_news()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
