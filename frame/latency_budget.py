"""`LatencyBudget`: how many prompt tokens a step may have, so that the inter-token latency of
running requests stays within a target.

Implements the scheduler's `PromptBudget`; `scheduler.target_itl_ms` sets its target. Must not know
a request or a device.
"""

from __future__ import annotations

from collections import deque

from frame.core.scheduling.running import StepRecord

TILE = 128  # rows of a step that matrix products compute together; also the least prompt tokens of a step
FIRST = 4 * TILE  # prompt tokens beside decodes while no step was measured
DEFAULT_TARGET = 0.05  # seconds, of a server without a target
DEFAULT_MINIMUM = 2048  # prompt tokens of its steps: smaller ones read the weights too often
AIM = 0.9  # share of the target that a step is planned for: steps differ
WEIGHT = 0.2  # of a new step in a mean
MAX_RATIO = 4.0  # of a step to the mean, above which it counts for less: it may have compiled a kernel


class DecodeServerBudget:
    """Of a decode server without a target: `FIRST` prompt tokens beside decodes, since prompts that
    it computes after all must not delay the streams that it is there for."""

    def __init__(self, token_budget: int) -> None:
        self._maximum = token_budget

    def choose(self, step: int, num_decodes: int, now: float) -> int:
        return min(FIRST, self._maximum) if num_decodes else self._maximum

    def record_step(self, record: StepRecord, now: float) -> None: ...


class LatencyBudget:
    """Learns the seconds of a row of steps with prompts and decodes. A row of a larger step costs
    no more, because weights are read once: a budget from a smaller step is within the target.

    A step that used less than half of its budget says little of a full one, so it counts only if it
    was late. The budget grows to twice the last step that counted, not further: no size is chosen
    of which the half was not measured. The mean rises at once and falls slowly, for the slowest
    steps make the tail. A step without decodes has the whole budget, and no step less than the
    minimum: prompts go on even where decodes alone exceed the target.

    Steps overlap: one is launched before the previous one is committed. If the launch takes long,
    that commit is late and the next one comes soon after. So what a step of decodes takes longer
    than others counts for the prompts of the step after it.
    """

    def __init__(self, target: float, token_budget: int, minimum: int = TILE) -> None:
        """target: seconds. token_budget: most prompt tokens of a step. minimum: prompt tokens that
        a step may have however long it takes."""
        self._aim, self._maximum, self._minimum = AIM * target, token_budget, minimum
        self._row = 0.0  # seconds of a row; 0: unknown
        self._size = max(FIRST, minimum) // 2  # prompt tokens of the last step that counted
        self._decodes = 0.0  # seconds of a step of decodes alone, with one after it
        self._before = 0.0  # seconds of the last step, if it had decodes alone
        self._planned: deque[tuple[int, float, int]] = deque()  # step, when it was planned, its budget
        self._encoded: dict[int, int] = {}  # by planned step: prompt tokens that take as long as the media that it encodes
        self._committed = float("-inf")  # when the last step was committed

    def choose(self, step: int, num_decodes: int, now: float) -> int:
        budget = self._fit(num_decodes) if num_decodes else self._maximum
        self._planned.append((step, now, budget))
        return budget

    def note_encoded(self, tokens: float) -> None:
        """The step planned last encodes media, which takes as long as so many prompt tokens."""
        self._encoded[self._planned[-1][0]] = int(tokens)

    def record_step(self, record: StepRecord, now: float) -> None:
        while self._planned and self._planned[0][0] < record.step:  # a step that had no rows, or failed
            self._encoded.pop(self._planned.popleft()[0], 0)
        if not self._planned or self._planned[0][0] > record.step:
            return
        _, start, budget = self._planned.popleft()
        seconds, self._committed = now - max(start, self._committed), now  # a planned step waits for the one in flight
        encoded = self._encoded.pop(record.step, 0)
        num_rows, num_prompt_tokens = int(record.num_scheduled.sum()) + encoded, _count_prompt_tokens(record) + encoded
        if not num_prompt_tokens:
            if before := self._before:  # nothing of a launch of prompts is in it
                self._decodes = min(before, _follow(self._decodes, before)) if self._decodes else before
            self._before = seconds
            return
        seconds, self._before = seconds + max(0.0, self._before - self._decodes), 0.0
        is_late = seconds > self._aim and num_prompt_tokens >= TILE
        if num_prompt_tokens < num_rows and (is_late or 2 * num_prompt_tokens >= budget):
            row, self._size = seconds / num_rows, num_prompt_tokens
            row = min(row, MAX_RATIO * self._row) if self._row else row
            self._row = max(row, _follow(self._row, row))

    def _fit(self, num_decodes: int) -> int:
        """The most tokens that end within the target; all rows together are whole tiles."""
        rows = 2 * self._size + num_decodes
        if self._row * rows > self._aim:
            rows = int(self._aim / self._row)
        return min(max(rows // TILE * TILE - num_decodes, self._minimum), self._maximum)


def _follow(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean)


def _count_prompt_tokens(record: StepRecord) -> int:
    """Tokens of the extend rows without a draft."""
    counts = record.num_scheduled[record.num_decodes :]
    return int(counts.sum() if record.num_drafts is None else counts[record.num_drafts[record.num_decodes :] == 0].sum())
