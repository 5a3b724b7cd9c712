"""`StatLoggers`: makes the records of steps and requests and gives them to the chosen stat loggers.

Used by `ClientStats`. A logger that raises is named in the log and switched off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.stats import RequestRecord, StatLogger, StepRecord

if TYPE_CHECKING:
    from frame.core.messages import Finish, Heartbeat, StepText, StepTokens
    from frame.entrypoints.engine_client.response_state import SequenceState

log = logging.getLogger(__name__)


class StatLoggers:
    """`loggers`: by name, with the distribution that brought each. `get_load` returns the engine's
    last heartbeat."""

    def __init__(self, model: str, loggers: Mapping[str, StatLogger], get_load: Callable[[], Heartbeat | None]) -> None:
        self._model = model
        self._loggers = dict(loggers)
        self._get_load = get_load

    def record_step(self, message: StepText | StepTokens, sequences: Mapping[str, SequenceState], generated: int) -> None:
        """Record a step, before its ended sequences are removed from `sequences`."""
        rids = message.rids
        starts = [(sequences.get(rids[place]), cached) for place, cached in message.num_cached_tokens.items()]
        prompt_tokens = sum(len(sequence.prompt) - cached for sequence, cached in starts if sequence is not None)
        load = self._get_load()
        sizes = (load.running, load.waiting, load.used_pages, load.total_pages) if load is not None else ()
        self._call("record_step", StepRecord(len(rids), prompt_tokens, generated, *sizes))

    def record_request(self, sequence: SequenceState, finish: Finish, now: float) -> None:
        """Record a sequence that has ended (`now`: `time.perf_counter`)."""
        request, times, count = sequence.request, sequence.times, sequence.num_tokens
        record = RequestRecord(
            rid=sequence.rid,
            model=self._model,
            key=request.owner,
            finish_reason=finish.reason,
            prompt_tokens=len(sequence.prompt),
            cached_tokens=sequence.cached,
            output_tokens=count,
            end_to_end=now - request.created,
            queue_time=times.waited,
            time_to_first_token=times.first - request.created if times.first else None,
            inter_token_latency=(times.last - times.first) / (count - 1) if times.first and count > 1 else None,
        )
        self._call("record_request", record)

    def record_requests(self, sequences: Sequence[SequenceState], finish: Finish, now: float) -> None:
        for sequence in sequences:
            self.record_request(sequence, finish, now)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        for name, logger in tuple(self._loggers.items()):
            try:
                getattr(logger, method)(*arguments)
            except Exception:  # a logger must not harm a request
                del self._loggers[name]
                log.exception("stat_logger %s raised in %s and is switched off", name, method)
