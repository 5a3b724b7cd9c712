"""A Ray cluster of two workers on this machine: ranks of both, and replicas by Ray Serve."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import psutil
import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")

import frame_ray  # noqa: E402 - needs ray
from frame_ray.launcher import RayLauncher, RayOptions  # noqa: E402
from frame_ray.replicas import build  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from frame import Engine  # noqa: E402
from frame.core.errors import ConfigurationError  # noqa: E402
from frame.interfaces.launcher import LauncherContext  # noqa: E402
from frame.plugins.loader import load_registry  # noqa: E402
from frame.testing import conformance  # noqa: E402
from frame.testing.conformance import run_suite  # noqa: E402

PARAMS = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers of four CPUs. The package is installed, for the processes of its workers."""
    with pytest.MonkeyPatch.context() as patch:
        site = tmp_path_factory.mktemp("site")
        info = site / "frame_ray-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: frame-ray\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[frame]\nray = frame_ray\n")
        package = Path(frame_ray.__file__).parents[1]
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(site), str(package), str(Path.cwd()), os.environ.get("PYTHONPATH", ""))))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        made.add_node(num_cpus=4)
        patch.setenv("RAY_ADDRESS", made.address)
        ray.init(made.address, log_to_driver=False)
        try:
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def rank_parents() -> list[psutil.Process]:
    """The actors of the launcher that have ranks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("ray::RankHost") and process.uids().real == os.getuid() and process.children():
                found.append(process)
    return found


def find_servers() -> list[psutil.Process]:
    """The servers that replicas have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "frame_ray.child" in process.cmdline() and process.uids().real == os.getuid():
                found.append(process)
    return found


def follow_stream(url: str, name: str, begun: Semaphore) -> str:
    """Read a long stream to its end. -> its last event. Releases `begun` after the first one."""
    request = {"model": "frame-tiny", "prompt": name, "max_tokens": 600, "temperature": 0, "ignore_eos": True, "stream": True}
    last = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=request, headers={"x-request-id": name}, timeout=90) as stream:
        for line in stream.iter_lines():
            if line and not last:
                begun.release()
            last = line or last
    return last


def test_ranks_of_two_workers_survive_the_death_of_one_and_of_its_actor(cluster: Cluster) -> None:
    """Greedy tokens equal those of one process; the second worker's actor has two ranks."""
    keys: dict[str, Any] = {"max_total_tokens": 256, "threads": 1, "dtype": "float32", "device": "cpu"}
    before = {process.pid for process in rank_parents()}
    with Engine(**keys) as engine:
        expected = engine.generate([5, 6, 7, 8], PARAMS).token_ids
    with Engine(tp=4, nnodes=2, launcher="ray", **keys) as engine:
        assert engine.generate([5, 6, 7, 8], PARAMS).token_ids == expected
        for is_rank in (True, False):
            (actor,) = (process for process in rank_parents() if process.pid not in before)
            ranks = actor.children()
            assert len(ranks) == 2
            victim = ranks[1] if is_rank else actor
            victim.kill()
            psutil.wait_procs([victim], timeout=120)
            assert engine.generate([5, 6, 7, 8], PARAMS).token_ids == expected
    deadline = time.monotonic() + 10
    while {process.pid for process in rank_parents()} != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert {process.pid for process in rank_parents()} == before


HOSTILE = """
import sys
with open({marks!r}, "a") as file:
    file.write(__name__ + " " + str(sys.orig_argv) + chr(10))
raise ImportError(__name__)
"""
PROGRAM = """
from frame import Engine
with Engine(tp=2, nnodes=2, launcher="ray", max_total_tokens=256, threads=1, device="cpu") as engine:
    print(engine.generate([5, 6, 7, 8], {"max_tokens": 2, "ignore_eos": True}).token_ids)
"""


def test_actors_and_ranks_do_not_import_from_the_working_folder(cluster: Cluster, tmp_path: Path) -> None:
    folder, marks = tmp_path / "folder", tmp_path / "marks"
    folder.mkdir()
    for name in ("frame", "frame_ray", "torch", "json", "msgspec", "zmq", "pydantic", "pydantic_core", "pluggy", "numpy", "psutil", "hmac"):
        (folder / f"{name}.py").write_text(HOSTILE.format(marks=str(marks)))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-P", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert not marks.exists(), marks.read_text()
    assert done.returncode == 0, done.stderr


def test_two_replicas_answer_and_one_is_replaced(cluster: Cluster) -> None:
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    url = f"http://127.0.0.1:{port}"
    try:
        serve.run(build({"replicas": "2", "cpus": "1", "arguments": "--device cpu --max-total-tokens 2048 --threads 1"}))
        servers = find_servers()
        assert len(servers) == 2
        request = {"model": "frame-tiny", "prompt": "def f", "max_tokens": 4, "temperature": 0}
        first = httpx.post(f"{url}/v1/completions", json=request, timeout=60)
        assert first.status_code == 200
        text = first.json()["choices"][0]["text"]
        with httpx.stream("POST", f"{url}/v1/completions", json={**request, "stream": True}, timeout=60) as stream:
            assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
        with ThreadPoolExecutor(8) as pool:
            begun = Semaphore(0)
            streams = [pool.submit(follow_stream, url, f"stream-{number}", begun) for number in range(8)]
            for _ in streams:
                assert begun.acquire(timeout=60)
            servers[0].kill()
            ends = [stream.result(90) for stream in streams]
        broken = [number for number, end in enumerate(ends) if end != "data: [DONE]"]
        assert 0 < len(broken) < 8
        for number in broken:
            assert "error" in ends[number] and f"request stream-{number}" in ends[number]
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not (len(now := find_servers()) == 2 and servers[0] not in now):
            time.sleep(0.2)
        assert servers[0] not in now
        assert servers[1] in now
        for _ in range(8):
            assert httpx.post(f"{url}/v1/completions", json=request, timeout=60).json()["choices"][0]["text"] == text
    finally:
        serve.shutdown()
    _, alive = psutil.wait_procs(find_servers(), timeout=120)
    assert alive == []


def test_the_launcher_passes_the_suite(cluster: Cluster) -> None:
    registry = load_registry(installed=False)
    part = registry.kind("launcher", "frame_ray")
    frame_ray.register_launchers(part)
    registry.commit(part)
    found = run_suite(conformance.find(registry, "launcher:ray", conformance.Setting()))
    assert [each for each in found if each.result != "passed"] == []


def test_what_ray_cannot_place_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    launcher = RayLauncher(LauncherContext(2, tmp_path, 2), RayOptions(resources={"CPU": 99}, patience=0.5))
    with pytest.raises(ConfigurationError, match=r"does not have 2 host\(s\), this one among them, with {'CPU': 99.0} free"):
        launcher.place()
    launcher.close()
    with pytest.raises(ConfigurationError, match="run frame serve once, without --node-rank"):
        RayLauncher(LauncherContext(2, tmp_path, 2, 1))
    with pytest.raises(ValueError, match="aguments"):
        build({"aguments": ""})
