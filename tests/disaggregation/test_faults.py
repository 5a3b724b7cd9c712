"""A prefill server, a decode server and a router whose wire fails, and which are stopped and killed
under streams: each answer is that of one server, or an error that names the cause. `NUM_ROUNDS`: of
each kind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.disaggregation.servers import Deployment, DividingRouter, ask, deploy, make_body, wait_empty
from tests.entrypoints.serving import RunningServer, list_children, wait_until
from tests.kv_tiers.faulty_tiers import FaultFile

pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.soak
NUM_ROUNDS = int(os.environ.get("NUM_ROUNDS", "2"))
STREAMS = 16
STOPPED = 2.0  # seconds for which a server is stopped
SLOW = 6.0  # seconds of a slow read


class Run:
    """The servers, and the numbers of bodies that were not sent yet."""

    def __init__(self, servers: Deployment, fault: Path) -> None:
        self.servers, self.fault, self._next = servers, FaultFile(fault, SLOW), 10_000

    def ask_all(self, strike: Callable[[], None] = lambda: None, causes: tuple[str, ...] = ()) -> tuple[int, float]:
        """Ask with new prompts. strike: called while they are answered. -> answers that are clean
        errors with one of the causes, and the seconds of the slowest."""
        bodies = [make_body(self._next + number, max_tokens=20, stream=number % 4 > 0, temperature=0) for number in range(STREAMS)]
        self._next += STREAMS
        slowest: list[float] = []

        def run(body: dict[str, Any]) -> Any:
            began = time.monotonic()
            try:
                return ask(self.servers.router, body)
            except httpx.TransportError as error:
                return 0, f"{self.servers.router.url}: {error!r}"
            finally:
                slowest.append(time.monotonic() - began)

        with ThreadPoolExecutor(STREAMS) as pool:
            expected = list(pool.map(partial(ask, self.servers.whole), bodies))
            running = [pool.submit(run, body) for body in bodies]
            strike()
            results = [each.result() for each in running]
        failed = [result for result, one in zip(results, expected, strict=True) if result[:3] != one[:3]]
        unclean = [result for result in failed if len(result) != 2 or not any(cause in result[1] for cause in causes)]
        assert not unclean, unclean
        return len(failed), max(slowest)

    def check_left(self) -> None:
        wait_empty(self.servers.prefill)
        for server in (self.servers.prefill, self.servers.decode):
            wait_until(lambda server=server: server.get("/server_info")["used_pages"] == 0)
            assert server.post("/check_integrity", {}).status_code == 200


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    fault = tmp_path_factory.mktemp("fault") / "fault"
    fault.write_text("")
    with deploy(fault) as servers:
        yield Run(servers, fault)


def list_processes(server: RunningServer) -> list[psutil.Process]:
    return [psutil.Process(server.process.pid), *list_children(server.process.pid, recursive=True)]


@pytest.mark.parametrize("name", ["wire_flip", "slow"])
def test_the_wire_fails(run: Run, name: str) -> None:
    _, undisturbed = run.ask_all()
    before, waited = run.fault.count_faults(), 0.0
    run.fault.set_fault(name)
    for _ in range(NUM_ROUNDS):
        failed, seconds = run.ask_all()
        assert not failed, "the decode server computes"
        waited = max(waited, seconds)
    run.fault.set_fault("")
    print(f"{name}: {run.fault.count_faults() - before} faults, slowest {waited:.2f} s, undisturbed {undisturbed:.2f} s")
    assert run.fault.count_faults() - before >= NUM_ROUNDS
    assert waited <= 3 * undisturbed + 2.0  # the machine is not even
    run.check_left()


def test_leases_expire(run: Run) -> None:
    servers, count = run.servers, 0
    for number in range(NUM_ROUNDS):
        bodies = [make_body(50_000 + 8 * number + each, max_tokens=6, temperature=0) for each in range(8)]
        handles = []
        for body in bodies:
            begun = servers.prefill.post(
                "/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            ).json()
            handles.append(begun.get("kv_transfer_params"))
        before = servers.prefill.metric("frame_kv_expired_leases_total")
        wait_empty(servers.prefill)
        for body, handle in zip(bodies, handles, strict=True):
            if handle is not None:
                assert ask(servers.decode, {**body, "kv_transfer_params": handle})[:3] == ask(servers.whole, body)[:3]
        count += int(servers.prefill.metric("frame_kv_expired_leases_total") - before)
    print(f"expired: {count}")
    assert count >= NUM_ROUNDS
    run.check_left()


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_server_is_stopped(run: Run, role: str) -> None:
    """All of its processes, for a time."""
    total = 0

    def strike() -> None:
        processes = list_processes(getattr(run.servers, role))
        time.sleep(0.2)
        for process in processes:
            process.suspend()
        time.sleep(STOPPED)
        for process in processes:
            process.resume()

    waited = 0.0
    for _ in range(NUM_ROUNDS):
        failed, seconds = run.ask_all(strike, (run.servers.prefill.url, run.servers.decode.url, "no replica is healthy"))
        total, waited = total + failed, max(waited, seconds)
        wait_until(lambda: set(httpx.get(run.servers.router.url + "/health").json()["replicas"].values()) == {"ok"}, 60.0)
    print(f"SIGSTOP of {role}: {NUM_ROUNDS} times, {total} of {NUM_ROUNDS * STREAMS} clean errors, slowest {waited:.2f} s")
    assert not total or role == "decode"
    run.check_left()


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_server_is_killed_and_comes_back(run: Run, role: str) -> None:
    """At the same address."""
    servers, total = run.servers, 0
    for _ in range(NUM_ROUNDS):
        victim: RunningServer = getattr(servers, role)

        def strike(victim: RunningServer = victim) -> None:
            time.sleep(0.3)
            victim.kill()

        failed, _ = run.ask_all(strike, (victim.url, "no replica is healthy"))
        total += failed
        port = victim.url.rpartition(":")[2]
        if role == "router":
            servers.router = servers.stack.enter_context(DividingRouter([servers.prefill.url], [servers.decode.url]))
        else:
            setattr(servers, role, servers.start(role, "--port", port))
        wait_until(lambda: set(httpx.get(servers.router.url + "/health").json()["replicas"].values()) == {"ok"}, 60.0)
        with contextlib.suppress(httpx.HTTPError):
            wait_empty(servers.prefill)
        assert run.ask_all()[0] == 0
    print(f"SIGKILL of {role}: {NUM_ROUNDS} times, {total} of {NUM_ROUNDS * STREAMS} clean errors")
    assert not total or role != "prefill", "a decode server computes what a prefill server has lost"
    run.check_left()
