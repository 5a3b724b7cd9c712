"""Gaps between tokens through the engine's loop, on a virtual clock: a device works off its steps
while the host launches the next one."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frame.core.engine import Engine, EngineOptions
from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.runner import ModelRunner
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.transport import InProcessTransport
from frame.core.messages import Generate
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.entrypoints.processes.build_scheduler import assemble_scheduler
from frame.latency_budget import LatencyBudget
from frame.plugins.eviction_policies.lru import Lru
from frame.plugins.prefix_caches.radix import RadixCache
from frame.plugins.scheduling_policies.fcfs import Fcfs
from frame.testing.contexts import EVICTION, SCHEDULING
from frame.testing.page_allocators import make_allocator
from tests.test_latency_budget import card

PAGES, VOCAB = 1 + 4096, 1000


class Step:
    """A launched step, done at `due`."""

    def __init__(self, device: Device, batch: ScheduledBatch, num_prompt_tokens: int, due: float) -> None:
        self._device, self._batch, self._num_prompt_tokens, self._due = device, batch, num_prompt_tokens, due

    def wait(self) -> StepResult:
        device, begin = self._device, self._device.committed
        device.now = device.committed = max(device.now, self._due)
        if self._batch.num_decodes:
            device.gaps.append(device.now - begin)
            device.prompt_tokens.append(self._num_prompt_tokens)
        device.send_due()
        return StepResult(step=self._batch.step, token_ids=np.full(int(self._batch.samples.sum()), 5, np.int32))


class Device(ModelRunner):
    """Steps take the seconds of `card`, and the first `cold` more. A launch with a prompt takes the
    host `host` seconds, and one without 0.3 ms, while the device works; host None: the host is the
    device, and a launch returns when the step is done. arrivals: seconds, prompt tokens, output
    tokens."""

    def __init__(self, host: float | None, cold: float, arrivals: list[tuple[float, int, int]]) -> None:
        self.host, self.cold, self.arrivals = host, cold, deque(enumerate(arrivals))
        self.now, self.due, self.committed = 0.0, 0.0, 0.0
        self.gaps: list[float] = []  # between commits, of each step with decodes
        self.prompt_tokens: list[int] = []  # the same
        self.near, self.far = InProcessTransport.pair()
        self.send_due()

    def send_due(self) -> None:
        while self.arrivals and self.arrivals[0][1][0] <= self.now:
            number, (_, length, count) = self.arrivals.popleft()
            tokens = [(number * 7919 + place * 31) % VOCAB for place in range(length)]
            self.near.send(Generate(f"r{number}", tokens, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)))

    def launch(self, batch: ScheduledBatch) -> Step:
        tokens, start = int(batch.num_scheduled[batch.num_decodes :].sum()), self.now
        seconds = card(batch.num_decodes, tokens) + (0.0 if batch.step else self.cold)
        self.now += seconds if self.host is None else self.host if tokens else 3e-4
        self.due = max(max(self.due, start) + seconds, self.now) if self.host is not None else self.now
        return Step(self, batch, tokens, self.due)

    def close(self) -> None:
        return


class VirtualEngine(Engine):
    """An engine that ends with its requests. While it is idle, the clock jumps to the next
    arrival."""

    def _receive(self, timeout: float | None) -> None:
        device = self.runner
        assert isinstance(device, Device)
        if timeout != 0.0 and self.scheduler.is_idle:
            if not device.arrivals:
                self._stopping = True
                return
            device.now = max(device.now, device.arrivals[0][1][0])
            device.send_due()
        super()._receive(0.0)


def serve(monkeypatch: pytest.MonkeyPatch, target: float | None, host: float | None, cold: float) -> Device:
    """Serve 24 requests a second, after short ones, as `benchmarks/latency_target.py` does."""
    numbers, at = random.Random(5), cold
    arrivals = [(0.0, 300, 16), (0.0, 60, 16)]
    for rate, lengths, outputs, count in ((40.0, (64, 900), (16, 17), 14), (24.0, (512, 1536), (96, 288), 120)):
        for _ in range(count):
            at += numbers.expovariate(rate)
            arrivals.append((at, numbers.randrange(*lengths), numbers.randrange(*outputs)))
        at += 1.0
    device = Device(host, cold, arrivals)

    def clock() -> float:
        return device.now

    sizes: dict[str, Any] = {"page_size": 64, "num_pages": PAGES, "max_running": 256, "max_context": 2048, "vocab_size": VOCAB}
    config = SchedulerConfig(token_budget=8192, overlap=True, **sizes)
    budget = None if target is None else LatencyBudget(target, config.token_budget)
    cache = RadixCache(PrefixCacheContext(64, PAGES, Lru(EVICTION)))
    scheduler = assemble_scheduler(config, cache, make_allocator(PAGES), Fcfs(SCHEDULING), clock=clock, prompt_budget=budget)
    monkeypatch.setattr("frame.core.engine.time", SimpleNamespace(monotonic=clock, perf_counter=clock))
    VirtualEngine(scheduler, device, device.far, EngineOptions(overlap=True, check_integrity="off")).run()
    return device


@pytest.mark.parametrize(("host", "cold"), [(1e-3, 0.4), (8e-3, 0.0), (15e-3, 0.0), (None, 0.4)])
def test_gaps_stay_within_the_target(monkeypatch: pytest.MonkeyPatch, host: float | None, cold: float) -> None:
    free, limited = serve(monkeypatch, None, host, cold), serve(monkeypatch, 0.03, host, cold)
    assert np.percentile(free.gaps, 99) > 0.045
    assert np.percentile(limited.gaps, 99) < 0.03
    assert max(limited.gaps) < 0.035
    assert max(limited.prompt_tokens) > 900  # chunks are no shorter than they must be
    assert limited.now < 1.02 * free.now
