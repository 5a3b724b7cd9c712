"""Trainers over HTTP: SGLang's and vLLM's calls, `WeightClient`, and what a crash leaves."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed import distributed_c10d

from frame.rl.weight_client import WeightClient, WeightUpdateError
from tests.entrypoints.serving import RunningServer, wait_until

TRANSFERS = ("--weight-transfer", "ipc", "--weight-transfer", "group")
FLAGS = ("--dtype", "float32", "--max-model-len", "128", "--max-total-tokens", "2048", *TRANSFERS)
WAIT = timedelta(seconds=30)
BODY = {"input_ids": list(range(20, 50)), "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[RunningServer]:
    with RunningServer(folders[0], *FLAGS, "--weight-update-timeout", "20", fake=False) as running:
        yield running


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def generate(server: RunningServer) -> tuple[list[int], str]:
    reply = server.post("/generate", BODY)
    assert reply.status_code == 200, reply.text
    return reply.json()["output_ids"], reply.json()["meta_info"]["weight_version"]


class SglangTrainer:
    """Rank 0 as SGLang's clients make it: torch's rendezvous and helper, and broadcasts beside the
    request."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        with httpx.Client() as client:
            self.world_size = 1 + client.get(f"{url}/get_world_size").json()["world_size"]
        self.port = find_port()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def join(self) -> None:
        replies: list[httpx.Response] = []
        body = {
            "master_address": "127.0.0.1", "master_port": self.port, "rank_offset": 1, "world_size": self.world_size,
            "group_name": self.name, "backend": "gloo",
        }  # fmt: skip
        thread = threading.Thread(target=lambda: replies.append(self.post("/init_weights_update_group", body)))
        thread.start()
        store, rank, size = next(distributed.rendezvous(f"tcp://127.0.0.1:{self.port}", 0, self.world_size, timeout=WAIT))
        store = distributed.PrefixStore(self.name, store)
        self.group, _ = distributed_c10d._new_process_group_helper(
            size, rank, [], distributed.Backend("gloo"), store, group_name=self.name, backend_options=None, timeout=WAIT
        )
        distributed_c10d._world.pg_group_ranks[self.group] = {number: number for number in range(size)}
        thread.join()
        assert replies[0].json()["success"], replies[0].text

    def update(self, tensors: dict[str, torch.Tensor], **fields: Any) -> httpx.Response:
        replies: list[httpx.Response] = []
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": self.name,
            **fields,
        }
        thread = threading.Thread(target=lambda: replies.append(self.post("/update_weights_from_distributed", body)))
        thread.start()
        if fields.get("load_format"):
            flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])
            distributed.broadcast(flat, src=0, group=self.group)
        else:
            for tensor in tensors.values():
                distributed.broadcast(tensor, src=0, group=self.group)
        thread.join()
        return replies[0]


def find_closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find_port() -> int:
    store = distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    return int(store.port)


def test_sglangs_calls(server: RunningServer, folders: list[Path]) -> None:
    """Buckets without flush_cache are one update, which is committed with its last tensor."""
    first, second = (tensors_of(folder) for folder in folders)
    before = generate(server)
    trainer = SglangTrainer(server.url, "sglang")
    assert trainer.post("/destroy_weights_update_group", {"group_name": "other"}).status_code == 400
    trainer.join()
    names = list(second)
    for part in (names[:3], names[3:8]):
        reply = trainer.update({name: second[name] for name in part}, flush_cache=False)
        assert (reply.status_code, reply.json()["weight_version"]) == (200, None)
    last = trainer.update({name: second[name] for name in names[8:]}, flush_cache=False, weight_version="step 1")
    assert last.json() == {"success": True, "message": "the weights are updated", "update_id": None, "weight_version": "step 1"}
    changed = generate(server)
    assert changed[1] == "step 1" and changed[0] != before[0]
    refused = trainer.update({name: first[name] for name in names[:3]})
    assert refused.status_code == 400 and "would be missing: send all tensors, or set partial" in refused.json()["error"]["message"]
    wrong = trainer.update({"model.other": torch.ones(3)})
    assert wrong.status_code == 400 and "model.other" in wrong.json()["error"]["message"]
    assert generate(server) == changed
    assert trainer.update(first, load_format="flattened_bucket", weight_version="step 2").status_code == 200
    assert generate(server) == (before[0], "step 2")
    assert trainer.post("/destroy_weights_update_group", {"group_name": "sglang"}).status_code == 200
    assert server.get("/get_weight_version") == {"weight_version": "step 2"}


def test_streams_go_on_while_a_trainer_is_awaited(server: RunningServer) -> None:
    """`init_weights_update_group` without its trainer: a stream ends before its reply. A later
    request for the group, and its end, end the first; then a trainer can join."""
    body = {"master_address": "127.0.0.1", "master_port": find_closed_port(), "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    replies: list[httpx.Response] = []

    def init() -> None:
        replies.append(server.post("/init_weights_update_group", {**body, "group_name": "absent"}))

    before, threads = generate(server), [threading.Thread(target=init) for _ in range(2)]
    threads[0].start()
    long = {**BODY, "stream": True, "sampling_params": {"max_new_tokens": 90, "temperature": 0, "ignore_eos": True}}
    with httpx.stream("POST", server.url + "/generate", json=long, timeout=60) as response:
        assert sum(line.startswith("data: {") for line in response.iter_lines()) > 10
    assert generate(server) == before and not replies
    threads[1].start()
    threads[0].join()
    assert replies[0].status_code == 400 and "another request forms this group anew" in replies[0].text
    assert server.post("/destroy_weights_update_group", {"group_name": "absent"}).status_code == 200
    threads[1].join()
    assert replies[1].status_code == 400 and "closed before it was formed" in replies[1].text
    trainer = SglangTrainer(server.url, "absent")
    trainer.join()
    assert trainer.post("/destroy_weights_update_group", {"group_name": "absent"}).status_code == 200


def test_numbers_beyond_64_bits_are_refused(server: RunningServer) -> None:
    huge = 1 << 70
    tensor = {"name": "a", "dtype": "float32", "shape": [huge]}
    for path, body in (
        ("/transfer_weights", {"step": "part", "kind": "ipc", "tensors": [tensor]}),
        ("/transfer_weights", {"step": "open", "kind": "group", "info": {"world_size": huge}}),
        ("/update_weights_from_tensor", {"tensors": [tensor]}),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"], "shapes": [[huge]]}),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[huge]]}}),
    ):
        reply = server.post(path, body)
        assert reply.status_code == 400 and "64 bits" in reply.text, (path, reply.text)


def test_tensors_on_another_device_than_the_group_are_refused(server: RunningServer, folders: list[Path]) -> None:
    client, tensors = WeightClient(server.url), tensors_of(folders[0])
    client.join_group()
    began = time.monotonic()
    with pytest.raises(WeightUpdateError, match=r"is on meta, and the group was joined for device='cpu': move it there"):
        client.update({name: tensor.to("meta") for name, tensor in tensors.items()})
    assert time.monotonic() - began < 30  # the server waits for no broadcast
    assert client.update(tensors, "same") == "same"
    client.close()


def test_vllms_calls_and_sessions(server: RunningServer, folders: list[Path]) -> None:
    client = WeightClient(server.url)
    client.update(tensors_of(folders[0]), "start")
    before = generate(server)
    post = server.post
    assert server.get("/get_world_size") == {"world_size": 1}
    assert post("/init_weight_transfer_engine", {"init_info": {}}).status_code == 200
    assert post("/finish_weight_update", {}).status_code == 409
    assert post("/start_weight_update", {"is_checkpoint_format": False}).status_code == 400
    assert post("/start_weight_update", {}).status_code == 200
    assert post("/begin_weight_update", {}).status_code == 409
    pickled = base64.b64encode(pickle.dumps({})).decode()
    for path, body in (
        ("/update_weights", {"update_info": {"names": [], "ipc_handles_pickled": pickled}}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [pickled]}),
    ):
        refused = post(path, body)
        assert refused.status_code == 400 and "holds pickled tensors" in refused.json()["error"]["message"]
    assert post("/update_weights", {"update_info": {"names": ["a"], "dtype_names": [], "shapes": []}}).status_code == 400
    empty = post("/finish_weight_update", {"weight_version": "nothing"})
    assert empty.status_code == 400 and "no tensor came" in empty.json()["error"]["message"]
    assert post("/cancel_weight_update", {}).status_code == 200
    assert generate(server) == before
    assert client.update(tensors_of(folders[1]), "step 3", bucket_bytes=100_000) == "step 3"
    assert generate(server)[0] != before[0]
    with pytest.raises(WeightUpdateError, match="has the shape"):
        client.update({name: tensor[:1] for name, tensor in tensors_of(folders[0]).items()})


KILLED = """
import os, sys, threading, torch
from safetensors.torch import load_file
from frame.rl import WeightClient
client, phase = WeightClient(sys.argv[1]), sys.argv[3]
tensors = load_file(sys.argv[2])
def broken():
    for number, pair in enumerate(tensors.items()):
        if phase == "first" or (phase == "later" and number == 4):
            os.kill(os.getpid(), 9)
        yield pair
if phase != "begin":
    client.join_group()
    send = client._group.broadcast
    def broadcast(*arguments):
        if phase == "broadcast":
            os.kill(os.getpid(), 9)
        return send(*arguments)
    client._broadcast_of_group = broadcast
    if phase == "broadcast":
        class Group:
            broadcast = staticmethod(broadcast)
        client._group = Group()
    client.update(broken(), bucket_bytes=1)
else:
    client._step("begin")
    os.kill(os.getpid(), 9)
"""


# of the others, test_faulty_trainers.py has the like under streams in each run
@pytest.mark.slow
@pytest.mark.parametrize("phase", [*(pytest.param(phase, marks=pytest.mark.soak) for phase in ("begin", "first", "broadcast")), "later"])
def test_a_trainer_that_is_killed(phase: str, folders: list[Path]) -> None:
    """Old weights, or, after a crash, none until the next update; never a mixture."""
    with RunningServer(folders[0], *FLAGS, "--weight-update-timeout", "2", fake=False) as server:
        before = generate(server)
        command = [sys.executable, "-c", KILLED, server.url, str(folders[1] / "model.safetensors"), phase]
        assert subprocess.run(command, check=False, env={**os.environ}, capture_output=True).returncode == -signal.SIGKILL
        assert generate(server) == before
        with WeightClient(server.url) as client:
            wait_until(lambda: client._request("GET", "/get_world_size") is not None)

            def is_updated() -> bool:
                try:
                    return client.update(tensors_of(folders[1]), "new") == "new"
                except WeightUpdateError:
                    return False

            wait_until(is_updated)
        changed = generate(server)
        assert changed[1] == "new" and changed[0] != before[0]


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, pytest.param(True, marks=pytest.mark.soak)])  # test_faulty_trainers.py: under streams
def test_an_engine_that_is_killed_after_an_update(keeps: bool, folders: list[Path], tmp_path: Path) -> None:
    flags = ("--keep-updates", str(tmp_path)) if keeps else ()
    with RunningServer(folders[0], *FLAGS, *flags, fake=False) as server, WeightClient(server.url) as client:
        old = generate(server)
        client.update(tensors_of(folders[1]), "new")
        new = generate(server)
        assert new[0] != old[0]
        server.children()["scheduler"].kill()
        wait_until(lambda: any("engine ready again" in line for line in server.lines))
        if keeps:
            assert generate(server) == new
            return
        refused = server.post("/generate", BODY)
        assert refused.status_code == 503 and "came from a trainer and were lost in a restart" in refused.json()["error"]["message"]
        assert server.post("/update_weights_from_disk", {"model_path": str(folders[0])}).status_code == 200
        assert generate(server)[0] == old[0]
        client.update(tensors_of(folders[1]), "again")
        assert generate(server)[0] == new[0]
