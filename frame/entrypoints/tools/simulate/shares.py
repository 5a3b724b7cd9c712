"""How much of a device's peak rates steps reach, measured on one H200 in bfloat16.

Each share is peak time / measured time of one part of a step. They are fitted to the workloads
`single`, `batch8`, `longctx`, `prefill` and `mixed256` of `SOURCES`; `docs/simulate.md` has the
error of each workload. Used by `StepTimes`. Must not know a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = {
    "dense": "benchmarks/results/2026-11-21-h200-table-7.json, llama-3.1-8b",
    "experts": "benchmarks/results/2026-11-21-h200-table-7.json, qwen3-30b-a3b",
    "sums": "benchmarks/results/2026-11-23-llama-3.1-8b-tp2-h200-x2.json",
}


@dataclass(frozen=True, slots=True)
class PeakShares:
    """`weights`, `products`, `cache`, `attention`, `links`: shares of the peak rates at which each
    is read, computed or sent; `ep_weights` and `ep_products` are further factors where experts are
    divided among ranks, whose fullest one is waited for. In seconds: `layer`: of launches and small
    kernels of a layer; `one_sum`: of the smallest sum over ranks; `entry`: of a request until the
    scheduler has it, and of its first token's way back."""

    weights: float
    products: float
    cache: float
    attention: float
    links: float
    layer: float
    one_sum: float
    entry: float
    ep_weights: float = 1.0
    ep_products: float = 1.0


DENSE = PeakShares(weights=0.99, products=0.87, cache=0.70, attention=0.80, links=0.68, layer=15e-6, one_sum=4e-6, entry=12e-3)
EXPERTS = PeakShares(
    weights=0.87,
    products=0.67,
    cache=0.70,
    attention=0.80,
    links=0.68,
    layer=15e-6,
    one_sum=4e-6,
    entry=12e-3,
    ep_weights=0.8,
    ep_products=0.58,
)
