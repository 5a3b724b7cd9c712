"""The page's history: rates, percentiles and alerts of made load, and its fixed size."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest

from frame.core.messages import Heartbeat
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.stats import ClientStats
from frame.entrypoints.http.operations.alerts import find_alerts
from frame.entrypoints.http.operations.live_history import CAPACITY, COLUMNS, INTERVAL, MAX_KEPT, LiveHistory, StepLatencies
from frame.interfaces.stats import StepRecord


class Client:
    def __init__(self) -> None:
        self.stats = ClientStats()
        self.load: Heartbeat | None = None


class Server:
    """A history of a client whose counters a test sets."""

    def __init__(self) -> None:
        self.client = Client()
        self.failures = 0
        self.now = 100.0
        self.history = LiveHistory(cast(EngineClient, self.client), lambda: self.failures)

    def sample(self, **load: Any) -> dict[str, float]:
        self.client.load = Heartbeat("engine", **{"total_pages": 100, **load})
        self.now += INTERVAL
        self.history.take_sample(self.now)
        return dict(zip(COLUMNS, self.history.list_rows(1)[0].tolist(), strict=True))

    def rules(self) -> list[str]:
        return [alert.rule for alert in find_alerts(self.history.list_rows())]


def test_rates_are_changes_of_counters() -> None:
    server = Server()
    first = server.sample(preempted=1000)
    assert first["preempted"] == 0  # nothing is known of the time before
    server.client.stats.generated_tokens = 500
    second = server.sample(preempted=1100, drafted_tokens=40, accepted_tokens=30, running=3)
    assert (second["generated"], second["preempted"], second["acceptance"], second["running"]) == (100.0, 20.0, 0.75, 3.0)
    third = server.sample(preempted=5)  # the engine was started again
    assert third["preempted"] == 0 and math.isnan(third["acceptance"])


def test_experts_of_the_last_heartbeat_are_averaged() -> None:
    assert Server().sample(expert_imbalance=[1.5, 2.5])["imbalance"] == 2.0
    assert math.isnan(Server().sample()["imbalance"])


def test_size_is_fixed() -> None:
    server = Server()
    size = server.history._rows.nbytes
    for _ in range(CAPACITY + 10):
        server.sample()
    assert server.history._rows.nbytes == size < 200_000
    rows = server.history.list_rows()
    assert len(rows) == CAPACITY and server.history.num_samples == CAPACITY + 10
    assert (np.diff(rows[:, 0]) == INTERVAL).all() and rows[-1, 0] == server.now
    assert len(server.history.list_rows(12)) == 12


@pytest.mark.parametrize("scale", [0.0005, 0.02, 3.0])
def test_percentiles_are_within_five_percent(scale: float) -> None:
    server = Server()
    values = np.random.default_rng(1).gamma(2.0, scale, 5000)
    for start in range(0, len(values), 50):
        server.history.latencies.record_step(StepRecord(1, 0, 1, inter_token_latencies=values[start : start + 50].tolist()))
    row = server.sample()
    for name, share in (("itl_p50", 0.5), ("itl_p90", 0.9), ("itl_p99", 0.99)):
        assert row[name] == pytest.approx(np.quantile(values, share), rel=0.06)
    assert math.isnan(row["ttft_p50"])
    assert server.history.summarize_latencies()["itl"][3] == 5000
    assert math.isnan(server.sample()["itl_p50"])  # of the time since the last sample alone
    assert server.history.summarize_latencies()["itl"][3] == 5000  # of the last minute


def test_latencies_that_wait_are_bounded() -> None:
    latencies = StepLatencies()
    for _ in range(100):
        latencies.record_step(StepRecord(1, 0, 1, first_token_latencies=[0.1] * 50, inter_token_latencies=[1e9] * 7))
        assert len(latencies._first) + len(latencies._inter) < 2 * MAX_KEPT
    assert latencies.take_counts().sum(1).tolist() == [5000, 700]


def test_a_quiet_server_has_no_alerts() -> None:
    server = Server()
    for step in range(130):
        server.client.stats.finished["stop"] = step
        server.sample(waiting=2, used_pages=50)
    assert server.rules() == []


def test_a_growing_queue_is_told_and_a_steady_one_is_not() -> None:
    server = Server()
    for _ in range(12):
        server.sample(waiting=40)
    assert server.rules() == []
    for waiting in range(44, 100, 8):
        server.sample(waiting=waiting)
    assert server.rules() == ["queue"]


def test_kv_pressure_and_preemptions() -> None:
    server = Server()
    for _ in range(6):
        assert server.rules() == []
        server.sample(used_pages=97)
    assert server.rules() == ["kv"]
    server.sample(used_pages=97, preempted=4)
    (alert,) = find_alerts(server.history.list_rows())
    assert (alert.level, alert.text[:13]) == ("critical", "4 preemptions")


def test_restarts_are_told_for_ten_minutes() -> None:
    server = Server()
    server.sample()
    server.client.stats.restarts["engine"] = 1
    server.sample()
    assert server.rules() == ["restarts"]
    for _ in range(120):
        server.sample()
    assert server.rules() == []


def test_errors_are_counted_once() -> None:
    server = Server()
    server.sample()
    server.client.stats.finished.update(stop=90, error=10)
    server.failures = 10  # the responses of the same requests
    server.sample()
    (alert,) = find_alerts(server.history.list_rows())
    assert alert.rule == "errors"
    assert alert.text.startswith("10 errors") and "10.0%" in alert.text


def test_refused_requests() -> None:
    server = Server()
    server.sample()
    server.client.stats.rejected = 7
    server.sample()
    assert server.rules() == ["rejected"]
