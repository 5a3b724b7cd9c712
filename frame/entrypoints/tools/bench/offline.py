"""Runs a workload on an engine in this process and computes the lower bound of its time. Used by
`frame bench offline`; prints nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.tools.bench.floors import H200, Ceilings, ModelCost, floor_seconds

if TYPE_CHECKING:
    from frame.config.schema import FrameConfig
    from frame.entrypoints.tools.bench.workload import Job, Shape, Workload

PLAIN = "none"  # weight format of weights that are not quantized


def measure(engine: Any, jobs: Sequence[Job]) -> dict[str, Any]:
    """Run the jobs once. -> seconds from the first request to the last token, and rates."""
    params = [SamplingParams(max_tokens=job.output, temperature=job.temperature, ignore_eos=True) for job in jobs]
    started = time.perf_counter()
    outputs = engine.generate([job.prompt for job in jobs], params)
    seconds = time.perf_counter() - started
    if failed := next((output.error for output in outputs if output.error is not None), None):
        raise RuntimeError(f"a sequence ended with an error, so the figures would be wrong: {failed}")
    tokens, prompts = sum(len(output.token_ids) for output in outputs), sum(len(job.prompt) for job in jobs)
    return {
        "requests": len(jobs),
        "seconds": round(seconds, 4),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "prompt_tokens_per_s": round(prompts / seconds, 1),
        "output_tokens": tokens,
    }


@dataclass(frozen=True, slots=True)
class Floors:
    """Lower bounds of a model's workloads under these peak rates."""

    ceilings: Ceilings
    source: str
    cost: ModelCost

    def row(self, workload: Workload | Shape, vocabulary: int, seconds: float) -> dict[str, float]:
        """The lower bound of a workload that took `seconds`, for its row."""
        jobs = workload.jobs(vocabulary, 0)
        prompts, outputs = [len(job.prompt) for job in jobs], [job.output for job in jobs]
        floor = floor_seconds(self.cost, self.ceilings, prompts, outputs, workload.common)
        return {"floor_seconds": round(floor, 4), "share_of_floor": round(floor / seconds, 4)}

    def about(self) -> dict[str, Any]:
        return {"ceilings": {"source": self.source, **asdict(self.ceilings)}}


def floors(config: FrameConfig, source: str) -> Floors | None:
    """The lower bounds for the model and devices of a configuration; None for quantized weights or
    a model of unknown sizes. source: "h200", or "measured" (measures now, while device memory is
    free)."""
    from frame.entrypoints.configuration.prepare import prepare
    from frame.plugins.devices import open_platform

    resolved = prepare(config).resolved
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    cost = ModelCost.of(resolved.model, sizes[resolved.dtype], sizes.get(resolved.kv_dtype, 1))
    if cost is None or resolved.choice("weight_format").name != PLAIN:
        return None
    if source == "h200":
        one = H200
    else:
        import torch

        from frame.entrypoints.tools.bench.clock import measured_ceilings

        one = measured_ceilings(open_platform(resolved.device).device, getattr(torch, resolved.dtype))
    ranks = 1 if open_platform(resolved.device).measure_memory().is_shared else resolved.plan.num_ranks
    return Floors(Ceilings(one.read * ranks, one.operations * ranks, one.copy * ranks), source, cost)
