"""Data-parallel replicas behind one server: one of them dies under streams, the others serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.entrypoints.chaos.storm import Storm, restarts
from tests.entrypoints.serving import RunningServer, list_children, wait_until

FLAGS = ("--dp", "2", "--max-model-len", "512", "--max-total-tokens", "8192", "--max-running-requests", "8", "--heartbeat-timeout", "3")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, *FLAGS, "--max-restarts", "1", env={"FRAME_FAKE_STEP": "0.004"}) as running:
        yield running


def engines(server: RunningServer) -> dict[str, psutil.Process]:
    """By number of the replica."""
    found = {}
    for child in list_children(server.process.pid):
        if "scheduler" in (line := child.cmdline()):
            found[line[line.index("--replica") + 1]] = child
    return found


def resolve(server: RunningServer) -> None:
    wait_until(lambda: server.get("/server_info")["outstanding"] == 0)
    wait_until(lambda: (info := server.get("/server_info"))["running"] + info["waiting"] == 0)


def test_a_replica_dies_and_the_others_serve(server: RunningServer) -> None:
    storm = Storm(24, 30)
    calm = storm(server)
    assert not any(reply.error for reply in calm)
    resolve(server)
    info = server.get("/server_info")
    assert [each["running"] for each in info["replicas"]] == [0, 0]
    shares = [each["prompt_tokens"] for each in info["replicas"]]
    assert info["prompt_tokens"] == sum(shares) and min(shares) > sum(shares) / 5  # both have served
    assert server.metric("frame_requests_outstanding") == 0

    ready: list[bool] = []

    def strike() -> None:
        engines(server)["1"].kill()
        ready.append(server.ready())

    assert storm(server, storm.progress // 5, strike) == calm
    assert ready == [True]  # the other replica serves meanwhile
    wait_until(lambda: restarts(server) == 1)
    wait_until(lambda: len(server.get("/server_info")["replicas"]) == 2)
    resolve(server)
    assert server.post("/check_integrity", {}).status_code == 200
    assert server.post("/flush_cache", {}).json()["pages"] > 0
    assert server.get("/server_info")["used_pages"] == 0


def test_the_rest_serves_when_a_replica_ends_for_good(server: RunningServer) -> None:
    """After the test above: replica 1 has no restart left."""
    engines(server)["1"].kill()
    wait_until(lambda: any("the other replicas go on" in line for line in server.lines))
    assert server.ready()
    storm = Storm(8, 10)
    assert not any(reply.error for reply in storm(server))
    assert len(server.get("/server_info")["replicas"]) == 1
    assert server.post("/flush_cache", {}).status_code == 200


@pytest.mark.soak
def test_attention_groups_give_the_texts_of_one_rank(tmp_path: Path) -> None:
    """With grammars, overlap, chunked prompts, shared prefixes, and a rank that dies."""
    folder = make_checkpoint("Qwen3MoeForCausalLM", tmp_path)
    flags = ("--dtype", "float32", "--max-total-tokens", "1024", "--page-size", "16", "--chunked-prefill-size", "64")
    groups = ("--tp", "2", "--ep", "2", "--dp", "2", "--enable-dp-attention", "--overlap")
    storm, replies = Storm(40, 40), []
    for number, body in enumerate(storm.bodies):
        body["temperature"] = 0.0
        if number % 3 == 0:
            body["regex"] = "[a-f]{1,30}"
    for more in ((), groups):
        with RunningServer(folder, *flags, "--max-running-requests", "8", *more, fake=False) as server:
            replies.append(storm(server))
            if more:
                follower = next(child for child in list_children(server.process.pid) if "follower" in child.cmdline())
                replies.append(storm(server, storm.progress // 3, follower.kill))
                resolve(server)
                assert restarts(server) == 1
                assert server.post("/check_integrity", {}).status_code == 200
    assert replies[0] == replies[1] == replies[2]
    assert not any(reply.error for reply in replies[0])


@pytest.mark.soak
def test_replicas_give_the_texts_of_one_engine() -> None:
    """A real model, with chunked prompts, shared prefixes and preemption."""
    flags = ("--dtype", "float32", "--max-total-tokens", "1024", "--page-size", "16", "--chunked-prefill-size", "64")
    storm, replies = Storm(40, 40), []
    for body in storm.bodies:
        body["temperature"] = 0.0
    for replicas in ("1", "2"):
        with RunningServer(Path("frame-tiny"), *flags, "--max-running-requests", "8", "--dp", replicas, fake=False) as server:
            replies.append(storm(server))
    assert replies[0] == replies[1]
    assert not any(reply.error for reply in replies[0])
