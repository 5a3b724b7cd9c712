"""What the scheduler costs on the CPU, in microseconds a step: `python benchmarks/scheduler.py`
prints one JSON object.

A runner without a model answers at once, so that `schedule_batch` and `commit` are all that is
timed. Steps are timed one by one; medians and 99th percentiles, so that the rare step that flushes,
evicts or admits is seen and does not hide the rest.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import deque

import numpy as np

from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.interfaces.scheduling import SchedulingPolicy
from frame.core.kv_cache.page_allocator import PagedAllocator
from frame.core.messages import Generate
from frame.core.scheduling.scheduler import Scheduler, SchedulerConfig
from frame.entrypoints.processes.build_scheduler import assemble_scheduler
from frame.plugins.loader import load_registry
from frame.plugins.prefix_caches.radix import RadixCache
from frame.testing.contexts import EVICTION, SCHEDULING

VOCAB = 32_000
REGISTRY = load_registry(installed=False)


def policy(name: str) -> SchedulingPolicy:
    found: SchedulingPolicy = REGISTRY.load(REGISTRY.get("scheduling_policy", name))(SCHEDULING)
    return found


class Instant:
    """Answers a batch with random tokens that no one stops at."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def run(self, batch: ScheduledBatch) -> StepResult:
        count = int(np.count_nonzero(batch.samples))
        return StepResult(step=batch.step, token_ids=self._random.integers(10, VOCAB, count, dtype=np.int32))


def build(running: int, page_size: int, overlap: bool, order: SchedulingPolicy, tokens_each: int, queued: int = 0) -> Scheduler:
    config = SchedulerConfig(
        page_size=page_size,
        num_pages=1 + running * (-(-tokens_each // page_size) + 8),
        max_running=running,
        token_budget=8192,
        max_context=tokens_each,
        vocab_size=VOCAB,
        max_queued=queued + running + 1,
        eos_ids=(2,),
        overlap=overlap,
    )
    return assemble_scheduler(
        config,
        RadixCache(PrefixCacheContext(page_size, config.num_pages, REGISTRY.load(REGISTRY.get("eviction_policy", "lru"))(EVICTION))),
        PagedAllocator(config.num_pages),
        order,
    )


def drive(scheduler: Scheduler, steps: int, overlap: bool) -> np.ndarray:
    """Seconds of scheduler work in each of `steps` steps."""
    runner, pending, times = Instant(), deque[tuple[ScheduledBatch, StepResult]](), []
    for _ in range(steps):
        start = time.perf_counter()
        batch = scheduler.schedule_batch(0.0)
        spent = time.perf_counter() - start
        if batch is not None:
            pending.append((batch, runner.run(batch)))
        while len(pending) > overlap:
            done, result = pending.popleft()
            start = time.perf_counter()
            scheduler.commit(done, result)
            spent += time.perf_counter() - start
        times.append(spent)
    while pending:
        scheduler.commit(*pending.popleft())
    return np.array(times)


def figures(times: np.ndarray) -> dict[str, float]:
    micro = times * 1e6
    return {
        "median_us": round(float(np.median(micro)), 1),
        "mean_us": round(float(micro.mean()), 1),
        "p99_us": round(float(np.percentile(micro, 99)), 1),
    }


def decoding(running: int, overlap: bool, page_size: int = 16, steps: int = 1500) -> dict[str, float]:
    """All requests decode; none starts or ends."""
    scheduler = build(running, page_size, overlap, policy("fcfs"), steps + 200)
    random = np.random.default_rng(1)
    for i in range(running):
        prompt = random.integers(10, VOCAB, 64).tolist()
        refused = scheduler.add_request(Generate(rid=f"request-{i}", token_ids=prompt, params=SamplingParams(max_tokens=steps + 100)))
        if refused:
            raise RuntimeError(refused.error)
    drive(scheduler, 20, overlap)
    return figures(drive(scheduler, steps, overlap))


def queued(order: str, running: int, waiting: int, steps: int = 600) -> dict[str, float]:
    """`running` on the device, `waiting` in the queue all the time; requests of 32 to 96 tokens
    come and go."""
    scheduler = build(running, 16, True, policy(order), 256, waiting + 10_000)
    random = np.random.default_rng(2)
    shared = [random.integers(10, VOCAB, 64).tolist() for _ in range(16)]

    def add(i: int) -> None:
        prompt = shared[i % 16] + random.integers(10, VOCAB, 32).tolist()
        refused = scheduler.add_request(
            Generate(rid=str(i), token_ids=prompt, priority=i % 7, params=SamplingParams(max_tokens=int(random.integers(32, 97))))
        )
        if refused:
            raise RuntimeError(refused.error)

    for i in range(running + waiting):
        add(i)
    times, count = [], running + waiting
    for _ in range(steps // 10):
        times.append(drive(scheduler, 10, True))
        while scheduler.get_load()["waiting"] < waiting:
            add(count)
            count += 1
    return figures(np.concatenate(times)[100:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    steps = parser.parse_args().steps
    report = {
        "benchmark": "scheduler",
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "decoding": {f"{n} running, overlap {o}": decoding(n, o, steps=steps) for n in (1, 64, 256) for o in (False, True)},
        "page_size_1": decoding(256, True, page_size=1, steps=steps),
        "queued_10000": {name: queued(name, 256, 10_000) for name in ("fcfs", "lpm", "dfs-weight", "priority", "random")},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
