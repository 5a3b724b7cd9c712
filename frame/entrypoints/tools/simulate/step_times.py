"""`StepTimes`: how long a step of a plan takes: the lower bounds of `frame plan` divided by
measured shares.

Used by `VirtualEngine`. Must not know a request or a clock.
"""

from __future__ import annotations

from typing import NamedTuple

from frame.entrypoints.tools.plan.planner import SUMS_A_LAYER, DeploymentPlan
from frame.entrypoints.tools.simulate.shares import PeakShares

CAUSES = ("reading weights", "matrix products", "reading the KV cache", "attention", "sums over ranks", "launches")


class StepWork(NamedTuple):
    """What a step computes. `rows`: tokens that pass the layers. `samples`: rows of the output
    matrix. `cached`: tokens whose K and V are read. `pairs`: (query, key) pairs of prompts."""

    rows: int
    samples: int
    cached: int
    pairs: float


class StepTimes:
    """The steps of one replica. Stages work on `plan.pp` micro-batches at the same time, so a step
    takes what its largest micro-batch takes in all stages."""

    def __init__(self, plan: DeploymentPlan, shares: PeakShares) -> None:
        cost, card = plan.cost, plan.card
        if cost is None or card is None:
            raise ValueError("the plan has no lower bounds")
        model, parallel = plan.resolved.model, plan.resolved.plan
        tp, divided = parallel.tp, parallel.ep > 1
        self._cost, self._launches = cost, shares.layer * model.num_layers
        rate = card.ceilings.operations * (2 if card.has_fp8 and cost.weight_bytes < 1.5 else 1)
        self._read = card.ceilings.read * shares.weights * (shares.ep_weights if divided else 1) * tp / cost.weight_bytes  # values/s
        self._multiply = rate * shares.products * (shares.ep_products if divided else 1) * tp  # operations/s
        self._pair = cost.pair / (card.ceilings.operations * shares.attention * tp)  # seconds of a pair
        self.cached_token = sum(stage.bytes_per_token for stage in plan.stages) / (card.ceilings.read * shares.cache)
        self._num_sums, self._one_sum = SUMS_A_LAYER * model.num_layers if tp > 1 else 0, shares.one_sum
        self._row_sum = model.hidden_size * 2 * 2 * (tp - 1) / tp / (card.links * shares.links)  # seconds
        self._met = sum(layer.met for layer in cost.layers)
        self._weights: dict[int, float] = {}

    def measure(self, work: StepWork) -> tuple[float, ...]:
        """Seconds of a step by cause, in the order of `CAUSES`."""
        read = self._weights.get(work.rows)
        if read is None:
            values = sum(layer.read(work.rows) for layer in self._cost.layers) + self._cost.head
            read = self._weights[work.rows] = values / self._read
        products = 2 * (work.rows * self._met + work.samples * self._cost.head) / self._multiply
        is_read = read > products
        sums = self._num_sums * max(self._one_sum, work.rows * self._row_sum)
        cache, attention = work.cached * self.cached_token, work.pairs * self._pair
        return (read if is_read else 0.0, 0.0 if is_read else products, cache, attention, sums, self._launches)
