"""The interface of stat loggers: where the statistics of steps and requests go (kind
`stat_logger`).

Used by the engine client of the main process. Must not know HTTP or a destination. Imports no
torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter or gauge of the server, at the moment of reading."""

    name: str  # "requests_running"
    text: str  # its meaning, one sentence
    samples: Sequence[tuple[Sequence[str], float]]  # values of the labels, and the value
    labels: tuple[str, ...] = ()
    is_counter: bool = False


@dataclass(frozen=True, slots=True)
class RenderedMetrics:
    """The response to `GET /metrics`."""

    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class StatLoggerContext:
    """The server whose statistics are logged. `read_metrics` returns its counters and gauges:
    load, memory, starts, restarts, HTTP responses."""

    model: str  # its name in the API
    read_metrics: Callable[[], Iterable[Metric]] = tuple
    metrics_aliases: tuple[str, ...] = ()  # server.metrics_aliases


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine, when its tokens have arrived in the main process. `running`,
    `waiting`, `used_pages` and `total_pages` are those of the engine's last heartbeat. The
    sequences are those of this step, times are in seconds."""

    num_requests: int  # sequences that got tokens or ended
    prompt_tokens: int  # computed for sequences that got their first token; without those from the prefix cache
    generated_tokens: int
    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    total_pages: int = 0
    first_token_latencies: Sequence[float] = ()  # from the arrival to the first token
    inter_token_latencies: Sequence[float] = ()  # since the sequence's tokens before, divided by the number of tokens
    queue_times: Sequence[float] = ()  # in the engine's queue, of sequences that got their first token
    prefill_times: Sequence[float] = ()  # from the queue's end to the first token


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One sequence that has ended. Times are in seconds."""

    rid: str
    model: str
    key: str  # name of the tenant's key; "": the server asks for none
    finish_reason: str  # "stop", "length", "abort", "error"
    prompt_tokens: int
    cached_tokens: int  # of the prompt, from the prefix cache
    output_tokens: int
    end_to_end: float  # from the arrival to the end
    queue_time: float = 0.0  # in the engine's queue
    time_to_first_token: float | None = None  # None: it ended before
    inter_token_latency: float | None = None  # mean time between output tokens; None: there are fewer than two
    inference_time: float | None = None  # from the queue's end to the end; None: it ended before its first token
    max_tokens: int | None = None  # of the request; None: not given
    is_abandoned: bool = False  # its client has left
    n: int = 1  # sequences of each prompt that the request asked for


class StatLogger(ABC):
    """Sends statistics somewhere.

    Contract:
    - The methods run in the event loop of the main process: they return at once, and neither wait
      for a network nor write to standard output.
    - A logger keeps a bounded amount of data.
    - A logger that raises is named in the log, once, and gets no more records. Requests do not
      notice.
    - `close` may be called more than once, and records that come later are ignored.
    - All loggers get the same records, and change nothing of them.
    """

    def __init__(self, context: StatLoggerContext, options: BaseModel | None = None) -> None: ...

    def record_step(self, step: StepRecord) -> None:
        """A step's tokens have arrived."""
        return

    @abstractmethod
    def record_request(self, request: RequestRecord) -> None:
        """A sequence has ended."""

    def render_metrics(self) -> RenderedMetrics | None:
        """The response to `GET /metrics`, of the first logger that has one. None: it has none."""
        return None

    def close(self) -> None:
        """The server stops: send what is left."""
        return
