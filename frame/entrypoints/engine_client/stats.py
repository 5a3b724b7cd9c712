"""`ClientStats`: counters of the client's requests, and the stat loggers; `Outstanding`: the
requests that are not finished.

Filled by `EngineClient` and `TokenRouter`, read by the metrics. Must not know a metric's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from frame.core.messages import Finish
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.entrypoints.engine_client.stat_loggers import StatLoggers


@dataclass(slots=True)
class ClientStats:
    """Totals since the start; times and sizes go to the stat loggers."""

    finished: dict[str, int] = field(default_factory=dict)  # sequences, by finish reason
    restarts: dict[str, int] = field(default_factory=dict)  # by process
    recovered: int = 0  # sequences admitted again after a crash
    rejected: int = 0  # sequences refused because the queue was full
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    loggers: StatLoggers | None = None  # None: no stat logger is chosen

    def record_finish(self, sequence: SequenceState, finish: Finish, now: float) -> None:
        """Record a sequence that has ended (`now`: `time.perf_counter`)."""
        self.count_finishes(finish.reason, 1)
        if self.loggers is not None:
            self.loggers.record_request(sequence, finish, now)

    def count_finishes(self, reason: str, count: int) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + count


@dataclass(slots=True)
class Outstanding:
    """What the clients of all replicas share: the counters, the rids of unfinished sequences, and
    the room reserved for sequences that are not started."""

    stats: ClientStats = field(default_factory=ClientStats)
    rids: set[str] = field(default_factory=set)
    reserved: int = 0

    @property
    def count(self) -> int:
        """Sequences running, waiting or reserved."""
        return len(self.rids) + self.reserved
