"""`LatencyBudget`: how many prompt tokens a step may have, so that the inter-token latency of
running requests stays within a target.

Implements the scheduler's `PromptBudget`; `scheduler.target_itl_ms` selects it. Must not know a
request or a device.
"""

from __future__ import annotations

from collections import deque

from frame.core.scheduling.running import StepRecord

TILE = 128  # rows of a step that matrix products compute together; also the least prompt tokens of a step
FIRST = 4 * TILE  # prompt tokens beside decodes while no step was measured
AIM = 0.9  # share of the target that a step is planned for: steps differ
WEIGHT = 0.2  # of a new step in a mean


class LatencyBudget:
    """Learns the seconds of a step of decodes alone, and what each prompt token adds to it.

    Only steps that used at least half of their budget count for the latter, so that it is the mean
    up to the sizes that are chosen: the first hundred tokens of a step may cost nothing, because
    the step waits for weights. It rises at once and falls slowly, for the slowest steps make the
    tail. A value of less than half is taken at once: those before may have compiled kernels. A step
    without decodes has the whole budget, and no step less than `TILE` tokens: prompts go on even
    where decodes alone exceed the target.
    """

    def __init__(self, target: float, token_budget: int) -> None:
        """target: seconds. token_budget: most prompt tokens of a step."""
        self._aim, self._maximum = AIM * target, token_budget
        self._last = min(FIRST, token_budget)  # the last budget beside decodes
        self._decodes = 0.0  # seconds of a step of decodes alone; 0: unknown
        self._token: float | None = None  # seconds that a prompt token adds
        self._planned: deque[tuple[int, float, int]] = deque()  # step, when it was planned, its budget
        self._committed = float("-inf")  # when the last step was committed

    def choose(self, step: int, num_decodes: int, now: float) -> int:
        budget = self._fit(num_decodes) if num_decodes else self._maximum
        self._planned.append((step, now, budget))
        return budget

    def record_step(self, record: StepRecord, now: float) -> None:
        while self._planned and self._planned[0][0] < record.step:  # a step that had no rows, or failed
            self._planned.popleft()
        if not self._planned or self._planned[0][0] > record.step:
            return
        _, start, budget = self._planned.popleft()
        seconds, self._committed = now - max(start, self._committed), now  # a planned step waits for the one in flight
        num_prompt_tokens = int(record.num_scheduled[record.num_decodes :].sum())
        if not num_prompt_tokens:
            self._decodes = _follow(self._decodes, min(seconds, 2 * self._decodes or seconds))
        elif 2 * num_prompt_tokens >= budget or self._token is None:
            added = max(0.0, seconds - self._decodes) / num_prompt_tokens
            self._token = added if self._token is None else max(added, _follow(self._token, added))

    def _fit(self, num_decodes: int) -> int:
        """The most tokens that end within the target; all rows together are whole tiles. It grows
        twofold at most, because a greater step may cost more a token."""
        if self._token is None:
            return self._last
        slack, maximum = self._aim - self._decodes, min(self._maximum, 2 * self._last)
        tokens = maximum if slack > self._token * maximum else int(max(0.0, slack) / self._token) if self._token else 0
        tokens = (tokens + num_decodes) // TILE * TILE - num_decodes
        self._last = min(max(tokens, TILE), self._maximum)
        return self._last


def _follow(mean: float, value: float) -> float:
    """The mean after a new value."""
    return value if value < mean / 2 or not mean else mean + WEIGHT * (value - mean)
