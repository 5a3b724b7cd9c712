"""`Pressure`: what a server says of the room that it has left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frame.entrypoints.engine_client.stats import ClientStats
from frame.entrypoints.http.operations import pressure as module
from frame.entrypoints.http.operations.pressure import Pressure
from frame.entrypoints.router.scaling import read_inter_token


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_server_learns_its_rate_and_tells_its_backlog(clock: list[float]) -> None:
    waiting = SimpleNamespace(prompt=range(8000), times=SimpleNamespace(first=0.0))
    sequences: Any = {"waits": waiting, "runs": SimpleNamespace(prompt=range(70), times=SimpleNamespace(first=1.0))}
    stats = ClientStats(sequences=[sequences])
    load = SimpleNamespace(used_pages=50, total_pages=100, waiting=0)
    client: Any = SimpleNamespace(stats=stats, load=load)
    pressure = Pressure(client, page_size=16)
    assert (pressure.count_queued_seconds(), pressure.rate_ratio, pressure.find_kv_pressure()) == (0.0, 0.0, 0.5)  # no rate is known
    for _ in range(3):  # 1,000 prompt tokens and 1,000 output tokens, of which 500 prompt tokens were cached
        clock[0] += 1.0
        waiting.prompt = waiting.prompt[1000:]
        stats.computed_tokens += 500
        stats.generated_tokens += 1000
        stats.num_gaps, stats.gap_seconds = stats.num_gaps + 10, stats.gap_seconds + 0.25
        pressure.measure()
    assert pressure.ceiling == 1500
    assert pressure.rate_ratio == 1
    assert pressure.count_queued_seconds() == pytest.approx(5000 / 1500)
    load.waiting = 3
    assert pressure.find_kv_pressure() == pytest.approx(0.5 + 5000 / 16 / 100)
    header = dict(pressure.describe())[b"x-frame-load"].decode()
    assert (header, read_inter_token(header)) == ("0.025", 0.025)
    clock[0] += 2.0
    stats.generated_tokens += 1500
    pressure.measure()
    assert (pressure.rate_ratio, pressure.inter_token) == (0.5, 0.0)
    clock[0] += 2.0
    sequences.clear()  # their clients have left: nothing of them was computed
    pressure.measure()
    assert (pressure.rate_ratio, pressure.ceiling) == (0.0, 1500)
