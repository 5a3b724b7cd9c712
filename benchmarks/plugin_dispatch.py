"""How much of a step the calls of plugins cost beyond the plugins' own work.

Plugins are objects whose methods the engine calls, so what a step pays for them is: the guard of
the scheduling policy, the logits processors' plan while no request uses one, the search for faults,
and the test for observers. Times each without its plugin's work, and a decode step of a model.

    python benchmarks/plugin_dispatch.py [--rows 8] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from frame.core.engine import Observers
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.interfaces.scheduling import SchedulerView, SchedulingContext, SchedulingPolicy
from frame.core.ipc.transport import InProcessTransport
from frame.core.messages import Generate
from frame.core.sampling.logits_pipeline import Processors
from frame.core.scheduling.policy_guard import GuardedPolicy
from frame.core.scheduling.request import Request
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.configuration.sources import from_keywords
from frame.entrypoints.processes.build_engine import build_engine

STEPS, CALLS = 200, 20_000


class Unordered(SchedulingPolicy):
    """Does nothing."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return waiting


def step_seconds(rows: int, **settings: object) -> tuple[float, Processors]:
    """The median decode step of `rows` requests, and the logits processors of the runner."""
    prepared = prepare(from_keywords(**settings).config)
    engine = build_engine(prepared.resolved, prepared.registry, InProcessTransport.pair(lambda _: None)[1])[0]
    params = SamplingParams(max_tokens=STEPS + 8, temperature=0.0, ignore_eos=True)
    for number in range(rows):
        engine.scheduler.add_request(Generate(rid=str(number), token_ids=[number + 6] * 16, params=params))
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        batch = engine.scheduler.schedule_batch()
        assert batch is not None
        engine.scheduler.commit(batch, engine.runner.launch(batch).wait())
        seconds.append(time.perf_counter() - began)
    processors: Processors = engine.runner.processors
    return statistics.median(seconds[8:]), processors


def call_seconds(call: Callable[[], object]) -> float:
    """The least mean time of a call in five series."""
    return min(timeit.repeat(call, number=CALLS, repeat=5)) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--model", default="frame-tiny")
    options = parser.parse_args()
    step, processors = step_seconds(options.rows, model=options.model)
    slots, positions, observers = np.arange(options.rows), np.arange(options.rows), Observers()
    policy = Unordered(SchedulingContext(8, 64, 512, 16, 64), None)
    guarded, view = GuardedPolicy(policy), SchedulerView(0.0, 8, 64, 64, 0, 16)
    plain = call_seconds(lambda: policy.sort_waiting([], view))
    parts = {
        "guard of the scheduling policy": call_seconds(lambda: list(guarded.sort_waiting([], view))) - plain,
        "logits processors, unused": call_seconds(lambda: (processors.update((), ()), processors.plan(slots, positions))),
        "search for faults": call_seconds(lambda: processors.find_faults(slots)),
        "observers, none": call_seconds(lambda: observers.on_step is not None),
    }
    total = sum(parts.values())
    print(f"decode step of {options.rows} rows: {1e6 * step:.0f} µs")
    for name, seconds in parts.items():
        print(f"  {name}: {1e6 * seconds:.2f} µs")
    print(f"plugin dispatch: {1e6 * total:.2f} µs, {100 * total / step:.3f} % of the step")


if __name__ == "__main__":
    main()
