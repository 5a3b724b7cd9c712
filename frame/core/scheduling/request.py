"""`Request`: one sequence from its arrival to its end, with everything that is needed to come back after it left the device.

Knows no tensor and no page: while a request runs, its counters live by slot in `frame.core.scheduling.request_slots`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from frame.core.interfaces.batch import PromptLogprobs
from frame.core.interfaces.cache import Match
from frame.core.interfaces.sampling import Grammar
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish

if TYPE_CHECKING:
    from frame.core.grammars.grammar_threads import ThreadedCall


def timed_out(seconds: float) -> Finish:
    """How a request ends when its deadline has passed; it had `seconds` from its arrival."""
    sentence = f"deadline exceeded: the request took longer than its {seconds:g} s; allow it more time"
    return Finish("error", error=sentence, code="deadline_exceeded")


def queue_full(reason: str) -> Finish:
    """How a request ends that cannot be taken now, and may be sent again later."""
    return Finish("error", error=f"queue full: {reason}; try again later", code="queue_full")


class RequestStatus(IntEnum):
    """Where a request is."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(slots=True)
class GrammarState:
    """What the scheduler keeps of one request's grammar between steps."""

    call: ThreadedCall | None = None  # a call that no step waits for
    mask: np.ndarray | None = None  # int32 [words]; the next mask, once it is filled
    error: Finish | None = None  # how the request ends at its next token, because the mask could not be filled
    seconds: float = 0.0  # CPU time of the last call
    is_slow: bool = False  # the next call runs beside the steps


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Identity is the object; `index` is its place in the order of arrival.

    `output` holds the committed tokens, up to date whenever a policy sees the request or the request is off the device.
    `tokens` is prompt plus output as of the last admission or jump, int32. `max_num_tokens` and `min_num_tokens` count prompt and
    output together.
    `match` is filled in for policies that need it, and is only good while the policy looks at it.
    """

    rid: str
    prompt: np.ndarray  # int32 [prompt_len]
    params: SamplingParams
    seed: int
    index: int
    arrival: float  # seconds, monotonic
    deadline: float  # seconds, monotonic
    max_num_tokens: int
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    namespace: str = ""
    tenant: str = ""  # the owner of the namespace
    grammar: Grammar | None = None
    grammar_state: GrammarState | None = None
    output: array[int] = field(default_factory=lambda: array("i"))
    state: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    unsent: list[int] = field(default_factory=list)  # the end of `output` that was not reported yet, since no step drew it
    match: Match | None = None
    handle: Any = None  # the locked end of the cached prefix, while running
    cached_tokens: int = -1  # prompt tokens that came from the prefix cache at the first admission
    is_reported: bool = False  # tokens of it were sent
    num_preemptions: int = 0
    trace: str = ""  # W3C traceparent, where somebody traces
    first_token: float = 0.0  # seconds, monotonic
    admitted: float = 0.0  # seconds, monotonic; when it first came onto the device
    second_text_start: int = 0  # where a pair's second text begins
    wants_prompt_logprobs: bool = False
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        return int(self.prompt.shape[0])

    @property
    def output_len(self) -> int:
        return len(self.output)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def max_new_tokens(self) -> int:
        """Most output tokens that the request may have."""
        return self.max_num_tokens - len(self.prompt)

    def all_tokens(self) -> np.ndarray:
        """Prompt and output so far, int32; the prompt itself when there is no output."""
        if not self.output:
            return self.prompt
        return np.concatenate((self.prompt, np.array(self.output, np.int32)))
