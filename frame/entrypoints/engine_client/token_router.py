"""`TokenRouter`: appends the tokens of a step's message to the state of its requests.

It runs for every token, so it makes one pass a message and creates no task and no object a token.
Used by `EngineClient`; vLLM's counterpart is `OutputProcessor.process_outputs`. Must not know a
transport or recovery.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from frame.core.messages import Finish, StepText, StepTokens, TokenLogprobs
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.engine_client.stats import ClientStats, StepTimes


class TokenRouter:
    """`sequences`, by their rids in the engine, is the client's own dict. A sequence that ends is
    removed from it and given to `end`, with the time (`time.perf_counter`)."""

    def __init__(
        self, sequences: dict[str, SequenceState], stats: ClientStats, end: Callable[[SequenceState, Finish, float], None]
    ) -> None:
        self._sequences = sequences
        self.stats = stats
        stats.sequences.append(sequences)
        self._end = end
        self.weight_version = "default"  # of the tokens that arrive now

    def change_version(self, version: str) -> None:
        """Later tokens are of these weights."""
        if version != self.weight_version:
            self.weight_version = version
            for sequence in self._sequences.values():
                sequence.change_version(version)

    def route_step(self, message: StepText | StepTokens, texts: list[str] | None, touched: list[RequestState]) -> None:
        """Append one step's tokens and `texts` (None: there is no text). Requests without earlier
        unread output are added to `touched`, once."""
        sequences, token_ids, now = self._sequences, message.token_ids, time.perf_counter()
        first_token: list[float] = []
        inter_token: list[float] = []
        count = 0
        for place, rid in enumerate(message.rids):
            sequence = sequences.get(rid)
            if sequence is None:  # aborted meanwhile
                continue
            ids = token_ids[place]
            if ids:
                times = sequence.times
                if times.last:
                    inter_token.append((now - times.last) / len(ids))
                else:
                    first_token.append(now - sequence.request.created)
                    times.first = now
                times.last = now
                sequence.token_ids += ids
                sequence.recovery.output_ids.extend(ids)
                count += len(ids)
            if texts is not None:
                sequence.texts.append(texts[place])
            if not sequence.has_update:
                if sequence.params.stream_interval > 1 and place not in message.finishes and not sequence.has_interval:
                    continue
                sequence.has_update = True
                request = sequence.request
                if not request.changed:
                    touched.append(request)
                request.changed.append(sequence)
            else:
                sequence.request.add_unread(sequence, len(ids))
        self.stats.generated_tokens += count
        self.stats.num_gaps += len(inter_token)
        self.stats.gap_seconds += sum(inter_token)
        if self.stats.loggers is not None:
            self.stats.loggers.record_step(message, sequences, StepTimes(now, count, first_token, inter_token))
        self._route_rest(message, now)

    def _route_rest(self, message: StepText | StepTokens, now: float) -> None:
        """The fields that a step has for few of its requests."""
        rids, sequences = message.rids, self._sequences
        for place, cached in message.num_cached_tokens.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.cached = cached if sequence.recovery.num_cached is None else sequence.recovery.num_cached
                self.stats.cached_tokens += cached
                self.stats.computed_tokens += max(0, len(sequence.prompt) - cached)
        for place, tiers in message.cached_tiers.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.cached_tiers = tiers
        for place, queue_time in message.queue_times.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.times.waited = queue_time
        for place, (accepted, rejected) in message.drafts.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.recovery.num_accepted += accepted
                sequence.recovery.num_rejected += rejected
        for place, logprobs in message.logprobs.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.logprobs.append(logprobs)
        for place, logprobs in message.prompt_logprobs.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.prompt_logprobs = _concatenate(sequence.prompt_logprobs, logprobs)
        for place, vector in message.pooled.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.request.vectors[sequence.index] = vector
        for place, finish in message.finishes.items():
            if (sequence := sequences.pop(rids[place], None)) is not None:
                self._end(sequence, finish, now)


def _concatenate(first: TokenLogprobs | None, second: TokenLogprobs) -> TokenLogprobs:
    """Prompt logprobs arrive one chunk at a time."""
    if first is None:
        return second
    ids, ranks = first.token_ids + second.token_ids, first.ranks + second.ranks
    return TokenLogprobs(ids, first.logprobs + second.logprobs, first.top + second.top, ranks)
