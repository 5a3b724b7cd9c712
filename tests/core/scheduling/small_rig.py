"""A small scheduler with the fake runner, and helpers of its tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.scheduling.request import Request
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.plugins.loader import load_registry
from frame.testing.contexts import SCHEDULING
from frame.testing.scheduler_rig import SchedulerRig

REGISTRY = load_registry(installed=False)
VOCAB = 101
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def policy(name: str = "fcfs") -> SchedulingPolicy:
    return REGISTRY.load(REGISTRY.get("scheduling_policy", name))(SCHEDULING)


def config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "page_size": 4,
        "num_pages": 65,
        "max_running": 4,
        "token_budget": 32,
        "max_context": 100,
        "vocab_size": VOCAB,
        "eos_ids": (2,),
        "growth_reserve": 0,
    }
    return SchedulerConfig(**{**values, **changes})


def rig(name: str = "fcfs", **changes: Any) -> SchedulerRig:
    return SchedulerRig(config(**changes), policy(name))


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **changes})


def prompt(length: int, start: int = 10) -> list[int]:
    return [(start + 7 * i) % VOCAB for i in range(length)]


def count_steps(used: SchedulerRig) -> int:
    """Runs a rig until it is idle."""
    steps = 0
    while not used.scheduler.is_idle:
        used.step()
        steps += 1
    used.check()
    return steps


class Recorder(SchedulingPolicy):
    """Preempts the newest request; records each victim with the oldest request, and the sizes of
    the windows."""

    def __init__(self) -> None:
        self.victims: list[tuple[str, str]] = []
        self.windows: list[int] = []

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        self.windows.append(len(waiting))
        return waiting

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        if len(running) < 2:
            return None
        assert [request.index for request in running] == sorted(request.index for request in running)
        assert all(request.output_len <= request.max_new_tokens for request in running)
        self.victims.append((running[-1].rid, running[0].rid))
        return running[-1]
