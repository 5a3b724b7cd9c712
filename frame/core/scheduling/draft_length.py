"""`DraftLength`: chooses the draft length of each step from the measured output rate.

For each size of batch and each length it keeps the recent output tokens and seconds of steps of
decodes alone. Most steps use the length with the highest rate; a few in a row try another one.
Length 0 is one of them, so that drafts that cost more than they save are given up. Used by
`Speculation`. Must not know a drafter, a request or a device.
"""

from __future__ import annotations

from collections.abc import Iterator

PROBE_STEPS = 4  # steps in a row that try a length
USE_STEPS = 64  # steps in a row with the best length; doubled while it stays the best
MAX_USE_STEPS = 512
DECAY = 0.9  # weight of the earlier steps of a length, for each new one
MIN_GAIN = 1.02  # a longer draft must raise the output rate by this factor


class DraftLength:
    """One choice a step; all ranks get it with the batch."""

    def __init__(self, num_steps: int, *, is_adaptive: bool) -> None:
        """num_steps: the greatest length, and every step's where it is not adaptive."""
        self._greatest = num_steps
        self._is_adaptive = is_adaptive
        self._lengths = sorted({0, 1, -(-num_steps // 2), num_steps})
        self._plans: dict[int, Iterator[int]] = {}  # by size of batch: the lengths of the next steps
        self._rates: dict[tuple[int, int], tuple[float, float]] = {}  # by size and length: output tokens and seconds

    def choose(self, num_rows: int) -> int:
        """The draft length of the next step, which has about so many rows."""
        if not self._is_adaptive:
            return self._greatest
        size = num_rows.bit_length()  # at most 17 of them
        if size not in self._plans:
            self._plans[size] = self._plan(size)
        return next(self._plans[size])

    def record(self, num_rows: int, length: int, num_tokens: int, seconds: float) -> None:
        """A step of decodes alone with drafts of this length has put out so many tokens. seconds:
        from the end of the step before, which had the same length."""
        key = (num_rows.bit_length(), length)
        tokens, total = self._rates.get(key, (0.0, 0.0))
        self._rates[key] = (DECAY * tokens + num_tokens, DECAY * total + seconds)

    def find_best(self, size: int) -> int:
        """The length with the highest rate; the shorter one of two that are nearly equal."""
        best, best_rate = self._greatest, 0.0
        for length in self._lengths:
            tokens, seconds = self._rates.get((size, length), (0.0, 0.0))
            rate = tokens / seconds if seconds else 0.0
            if rate > best_rate * MIN_GAIN:
                best, best_rate = length, rate
        return best

    def _plan(self, size: int) -> Iterator[int]:
        """The lengths of the steps of one size of batch, without end."""
        for length in reversed(self._lengths):
            yield from [length] * PROBE_STEPS
        num_steps, place, last = USE_STEPS, 0, -1
        while True:
            best = self.find_best(size)
            num_steps = min(2 * num_steps, MAX_USE_STEPS) if best == last else USE_STEPS
            yield from [best] * num_steps
            others = [length for length in self._lengths if length != best]
            place, last = place + 1, best
            yield from [others[place % len(others)]] * PROBE_STEPS
