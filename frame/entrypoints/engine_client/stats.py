"""`ClientStats`: what the client counts and times of its requests. Knows no metric's name and no bucket: those are the reader's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frame.core.messages import Finish
    from frame.entrypoints.engine_client.response_state import SequenceState


@dataclass(slots=True)
class ClientStats:
    """Lists (of seconds, and of tokens a request) are taken and emptied by the reader."""

    first_token: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
    end_to_end: list[float] = field(default_factory=list)
    queue: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    inference: list[float] = field(default_factory=list)
    per_output_token: list[float] = field(default_factory=list)
    prompt_sizes: list[float] = field(default_factory=list)
    output_sizes: list[float] = field(default_factory=list)
    output_limits: list[float] = field(default_factory=list)  # max_tokens, where it was given
    finished: dict[str, int] = field(default_factory=dict)  # by reason
    restarts: dict[str, int] = field(default_factory=dict)  # by process
    recovered: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0

    def ended(self, sequence: SequenceState, finish: Finish, now: float) -> None:
        """A sequence came to its end (`now`: `time.perf_counter`)."""
        self.end_to_end.append(now - sequence.answer.created)
        self.prompt_sizes.append(len(sequence.prompt))
        self.output_sizes.append(sequence.num_tokens)
        if sequence.params.max_tokens is not None:
            self.output_limits.append(sequence.params.max_tokens)
        if first := sequence.times.first:
            self.decode.append(now - first)
            self.inference.append(max(0.0, now - sequence.answer.submitted - sequence.times.waited))
            if sequence.num_tokens > 1:
                self.per_output_token.append((now - first) / (sequence.num_tokens - 1))
        self.count_ends(finish.reason, 1)

    def waited(self, sequence: SequenceState, seconds: float, now: float) -> None:
        """A sequence's first token came, and it had waited so long for a place on the device."""
        self.queue.append(seconds)
        self.prefill.append(max(0.0, now - sequence.answer.submitted - seconds))

    def count_ends(self, reason: str, count: int) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + count
