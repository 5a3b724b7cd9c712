"""`TokenRouter`: what a step's message brings, put where the handlers of its requests find it. The path of every token: one pass a
message, no
object and no task a token. Knows no link, no engine and no death.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from frame.core.messages import Finish, StepText, StepTokens, TokenLogprobs
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.engine_client.stats import ClientStats


class TokenRouter:
    """`sequences`, by their names in the engine, is the client's own dict; who ends leaves it and is told to `end`, with the time
    (`time.perf_counter`)."""

    def __init__(
        self, sequences: dict[str, SequenceState], stats: ClientStats, end: Callable[[SequenceState, Finish, float], None]
    ) -> None:
        self._sequences = sequences
        self.stats = stats
        self._end = end

    def take(self, message: StepText | StepTokens, texts: list[str] | None, touched: list[RequestState]) -> None:
        """One message; `touched` gets the answers that it is the first news of."""
        sequences, token_ids, now = self._sequences, message.token_ids, time.perf_counter()
        latencies, count = self.stats.inter_token, 0
        for place, rid in enumerate(message.rids):
            sequence = sequences.get(rid)
            if sequence is None:  # abandoned meanwhile
                continue
            ids = token_ids[place]
            if ids:
                times = sequence.times
                if times.last:
                    latencies.append((now - times.last) / len(ids))
                else:
                    self.stats.first_token.append(now - sequence.answer.created)
                    times.first = now
                times.last = now
                sequence.token_ids += ids
                sequence.standing.output.extend(ids)
                count += len(ids)
            if texts is not None:
                sequence.texts.append(texts[place])
            if not sequence.changed:
                sequence.changed = True
                answer = sequence.answer
                if not answer.changed:
                    touched.append(answer)
                answer.changed.append(sequence)
            else:
                sequence.answer.add_unread(sequence, len(ids))
        self.stats.generated_tokens += count
        self._take_rest(message, now)

    def _take_rest(self, message: StepText | StepTokens, now: float) -> None:
        """What concerns a few of the requests only."""
        rids, sequences = message.rids, self._sequences
        for place, cached in message.num_cached_tokens.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.cached = cached
                self.stats.cached_tokens += cached
        for place, queue_time in message.queue_times.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.times.waited = queue_time
                self.stats.waited(sequence, queue_time, now)
        for place, logprobs in message.logprobs.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.logprobs.append(logprobs)
        for place, logprobs in message.prompt_logprobs.items():
            if (sequence := sequences.get(rids[place])) is not None:
                sequence.prompt_logprobs = _joined(sequence.prompt_logprobs, logprobs)
        if isinstance(message, StepTokens):
            for place, vector in message.pooled.items():
                if (sequence := sequences.get(rids[place])) is not None:
                    sequence.answer.vectors[sequence.index] = vector
        for place, finish in message.finishes.items():
            if (sequence := sequences.pop(rids[place], None)) is not None:
                self._end(sequence, finish, now)


def _joined(first: TokenLogprobs | None, second: TokenLogprobs) -> TokenLogprobs:
    """Prompt logprobs come a chunk at a time."""
    if first is None:
        return second
    ids, ranks = first.token_ids + second.token_ids, first.ranks + second.ranks
    return TokenLogprobs(ids, first.logprobs + second.logprobs, first.top + second.top, ranks)
