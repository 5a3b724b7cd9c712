"""`DraftLengths`: how many tokens the next step drafts, and how many for each slot.

Used by `frame.speculation.draft_scheduler`, on the scheduler's rank alone: the other ranks get the
lengths with the batch (SGLang: adaptive speculative decoding). Imports no torch. Must not know a
drafter, a request or pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PROBE_STEPS = 4  # steps in a row that try a length
CHECK_STEPS = 16  # steps in a row with the best length, before it is computed again
FILL_STEPS = 8  # steps before a probe in which an idle drafter follows the decodes again
FIRST_STEPS = 32  # steps before the first probe of another length
USE_STEPS = 128  # steps between the next two; doubled while the best length stays the same
MAX_USE_STEPS = 1024
PROBE_SHARE = 0.01  # of all time that probes may take away
MIN_GAIN = 1.04  # drafts must raise the predicted output rate by this factor
MAX_STEP_WEIGHT = 0.03  # of a new step in the acceptance of all slots
ROW_WEIGHT = 0.01  # the same, of each of its rows
SLOT_DECAY = 0.95  # weight of the earlier drafts of a slot, for each new one
IDLE_DECAY = 0.995  # the same, for each step that gives a slot no draft because of its acceptance
CAUTION = 0.7  # factor of the acceptance that pays for a token: a slot's acceptance is an estimate
UNMEASURED = 0.3  # the acceptance that pays for a token while no seconds are known
PRIOR_TOKENS = 6.0  # weight of the mean of all slots in the acceptance of one
COST_WEIGHT = 0.2  # of a new step in the mean seconds of a length
MAX_TOKENS_ALIKE = 0.05  # drafted tokens a row by which a step may differ from the mean of its length, to show the growth of texts
MIN_TOKENS_APART = 0.25  # drafted tokens a row by which two lengths differ, so that their difference gives the cost of a token


@dataclass(slots=True)
class StepCost:
    """Means over the recent steps of one size and length."""

    seconds: float
    num_drafted: float  # tokens
    num_rows: float
    count: int = 1

    def add(self, seconds: float, num_drafted: int, num_rows: int) -> None:
        """A step of half the mean or less begins a new mean: the steps before compiled kernels, for
        example. Of longer steps at most twice the mean counts."""
        if seconds < self.seconds / 2:
            self.count = 0
        self.count += 1
        weight = max(1 / self.count, COST_WEIGHT)
        self.seconds += weight * (min(seconds, 2 * self.seconds) - self.seconds)
        self.num_drafted += weight * (num_drafted - self.num_drafted)
        self.num_rows += weight * (num_rows - self.num_rows)


class DraftLengths:
    """Predicts the output rate of each length as expected output tokens a row by seconds a step.

    The expected tokens come from the share of rows whose draft was accepted up to each position.
    The seconds are those of steps of decodes alone, by size of batch, for the lengths 0, 1, half of
    `num_steps` and `num_steps`, and interpolated between them. Most steps use the best length; a
    few in a row probe another one, so that its seconds and the acceptance stay known. A slot gets
    no tokens at positions where its own acceptance does not pay for the time of a token.

    Of trees, whose first n tokens are the likeliest tree of n, the length is the number of tokens,
    and a position is a node: a longer tree has all nodes of a shorter one. All slots have one
    length.
    """

    def __init__(self, num_slots: int, num_steps: int, *, is_adaptive: bool, has_trees: bool = False) -> None:
        """num_steps: the greatest length, and every step's and slot's where it is not adaptive."""
        self._has_trees = has_trees
        self._greatest = num_steps
        self._is_adaptive = is_adaptive
        self._probed = sorted({0, 1, -(-num_steps // 2), num_steps})
        self._plans: dict[int, Iterator[tuple[int, int, bool]]] = {}  # by size: of each next step, see `_plan`
        self._costs: dict[tuple[int, int], StepCost] = {}  # by size and length
        self._recorded = (0, 0, 0)  # size and length of the last recorded steps, and how many in a row had them
        self._minimum = 0  # tokens to draft for each slot
        self.is_idle = False  # whether the chosen length is 0, and that of the steps after it too
        self._threshold = 0.0  # see `_find_threshold`; of the chosen length
        self._reached = np.tile([[3.5], [5.0]], num_steps)  # rows whose draft was accepted at a position; those accepted up to it
        self._all = np.array([3.5, 5.0])  # drafted tokens that were accepted; those verified
        self._slots = np.zeros((2, num_slots))  # the same by slot

    def choose(self, num_rows: int) -> int:
        """The draft length of the next step, which has about so many rows."""
        if not self._is_adaptive:
            return self._greatest
        size = _size(num_rows)
        if size not in self._plans:
            self._plans[size] = self._plan(size)
        length, self._minimum, self.is_idle = next(self._plans[size])
        self._threshold = self._find_threshold(size, length)
        return length

    def limit(self, slots: np.ndarray) -> np.ndarray:
        """Maximum tokens to draft for each slot in the step of the last `choose`: int32 [n]."""
        if self._threshold <= 0 or self._has_trees:
            return np.full(len(slots), self._greatest, np.int32)
        hits, tries = self._slots[:, slots]
        rate = (hits + PRIOR_TOKENS * self._all[0] / self._all[1]) / (tries + PRIOR_TOKENS)
        limits = np.floor(np.log(self._threshold) / np.log(np.clip(rate, 1e-3, 0.999)))
        self._slots[:, slots[limits == 0]] *= IDLE_DECAY
        return np.clip(limits, self._minimum, self._greatest).astype(np.int32)

    def reset(self, slot: int) -> None:
        """The slot has no request any more."""
        self._slots[:, slot] = 0.0

    def count(self, slots: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Drafts are verified: tokens of each slot, drafted at least 1."""
        verified = np.minimum(drafted, accepted + 1)
        self._slots[:, slots] = SLOT_DECAY * self._slots[:, slots] + (accepted, verified)
        self._all = _decay(len(slots)) * self._all + (accepted.sum(), verified.sum())

    def observe(self, num_rows: int, length: int, accepted_at: np.ndarray) -> None:
        """A step of this length is committed. num_rows: its decodes, with drafts and without.
        accepted_at: int [num_steps]; the rows whose draft was accepted at each position, or
        node."""
        before = np.full(len(accepted_at), num_rows) if self._has_trees else np.concatenate(([num_rows], accepted_at[:-1]))
        self._reached[:, :length] = _decay(num_rows) * self._reached[:, :length] + (accepted_at[:length], before[:length])

    def record(self, num_rows: int, length: int, num_drafted: int, seconds: float) -> None:
        """A step of decodes alone took so long, from the end of the step before, which had the same
        length. Steps take longer as texts grow: what a length in use becomes slower by, with as
        many drafted tokens, is added to the lengths that were measured earlier."""
        size = _size(num_rows)
        count = self._recorded[2] + 1 if self._recorded[:2] == (size, length) else 1
        self._recorded = size, length, count
        cost = self._costs.get((size, length))
        if cost is None:
            self._costs[size, length] = StepCost(seconds, num_drafted, num_rows)
            return
        is_alike = abs(num_drafted - cost.num_drafted) <= MAX_TOKENS_ALIKE * num_rows
        before = cost.seconds, cost.num_drafted
        cost.add(seconds, num_drafted, num_rows)
        if is_alike and count > PROBE_STEPS and cost.count > 1:
            slower = cost.seconds - before[0] - self._find_token_cost(size, length)[1] * (cost.num_drafted - before[1])
            for other in self._probed:
                if other != length and (size, other) in self._costs:
                    self._costs[size, other].seconds += slower

    def find_best(self, size: int) -> int:
        """The length with the highest predicted rate."""
        costs = self._find_costs(size)
        if not costs:
            return self._greatest
        seconds = np.interp(np.arange(self._greatest + 1), list(costs), [cost.seconds for cost in costs.values()])
        rates = self._expected_tokens() / seconds
        best = int(rates.argmax())
        return best if rates[best] > MIN_GAIN * rates[0] else 0

    def _find_pause(self, size: int, best: int, probed: int) -> int:
        """The steps of the best length, at least, before the steps that probe a length: so many
        that the output lost in these is PROBE_SHARE of that of all steps."""
        costs = self._find_costs(size)
        if not costs:
            return 0
        tokens = self._expected_tokens()
        used, tried = (float(np.interp(length, list(costs), [cost.seconds for cost in costs.values()])) for length in (best, probed))
        lost = PROBE_STEPS * (tried / used - tokens[probed] / tokens[best])
        return int(min(lost / PROBE_SHARE, MAX_USE_STEPS))

    def _expected_tokens(self) -> np.ndarray:
        """Output tokens a row for each length: float [num_steps + 1]."""
        rates = self._reached[0] / self._reached[1]
        return np.concatenate(([1.0], 1.0 + np.cumsum(rates if self._has_trees else np.cumprod(rates))))

    def _find_costs(self, size: int) -> dict[int, StepCost]:
        """The costs by length, in order, of the nearest size that has two of them; empty: none has.
        Steps of a few tokens between prompts are never measured."""
        for each in (size, *sorted({known for known, _ in self._costs}, key=lambda known: abs(known - size))):
            costs = {length: self._costs[each, length] for length in self._probed if (each, length) in self._costs}
            if len(costs) > 1:
                return costs
        return {}

    def _find_threshold(self, size: int, length: int) -> float:
        """The probability of acceptance from which a drafted token pays: the tokens that a step
        puts out in the time that one more drafted token takes. 0: the lengths differ too little."""
        costs = self._find_costs(size)
        if not costs:
            return UNMEASURED
        known, seconds = self._find_token_cost(size, length)
        rate = costs[known].num_rows * self._expected_tokens()[known] / costs[known].seconds if seconds else 0.0
        return min(CAUTION * rate * seconds, 0.9)

    def _find_token_cost(self, size: int, length: int) -> tuple[int, float]:
        """The greatest measured length up to this one, and the seconds of a drafted token: by which
        it differs from the longest one with fewer tokens. 0 seconds: there is none."""
        costs = self._find_costs(size)
        *shorter, known = (-1, *(each for each in costs if each <= length))
        for each in reversed(shorter[1:]):
            tokens = costs[known].num_drafted - costs[each].num_drafted
            if tokens >= MIN_TOKENS_APART * costs[known].num_rows:
                return known, max(costs[known].seconds - costs[each].seconds, 0.0) / tokens
        return 0, 0.0

    def _plan(self, size: int) -> Iterator[tuple[int, int, bool]]:
        """The steps of one size of batch, without end: length, minimum tokens for a slot, and
        `is_idle`. While no drafts are best, a probe drafts for every slot, so that the acceptance
        stays known, and a drafter is not idle in the last steps before. A probe of length 0 is
        idle, as the steps that it stands for. Every other of these probes
        has length 1, which costs least."""
        for length in (self._greatest, 0):
            yield from [(length, 1, length == 0)] * PROBE_STEPS
        num_steps, place, last = FIRST_STEPS, 0, -1
        while True:
            best = self.find_best(size)
            pause = max(num_steps, self._find_pause(size, best, self._choose_probe(best, place)))
            for left in range(pause // CHECK_STEPS, 0, -1):
                num_idle = 0 if best else CHECK_STEPS - FILL_STEPS * (left == 1)
                yield from (*[(best, 0, True)] * num_idle, *[(best, 0, False)] * (CHECK_STEPS - num_idle))
                best = self.find_best(size)
            length = self._choose_probe(best, place)
            yield from [(length, int(best == 0 or not self._costs), length == 0)] * PROBE_STEPS
            num_steps = min(2 * num_steps, MAX_USE_STEPS) if best == last else USE_STEPS
            place, last = place + 1, best

    def _choose_probe(self, best: int, place: int) -> int:
        """The length of probe number `place`."""
        others = [length for length in self._probed if length != best]
        return others[-1 - place // (1 if best else 2) % len(others)] if best or place % 2 else 1


def _decay(num_rows: int) -> float:
    """The weight of the acceptance in earlier steps."""
    return 1 - min(ROW_WEIGHT * num_rows, MAX_STEP_WEIGHT)


def _size(num_rows: int) -> int:
    """The size of a batch, of which each power of two has two: at most 34."""
    bits = num_rows.bit_length()
    return 2 * bits + (num_rows >> max(bits - 2, 0) & 1)
