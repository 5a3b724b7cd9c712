"""torchrl's `SGLangWeightSyncScheme` updates a server: its own code where it is installed, and the
calls of version 0.14.1 everywhere. On a CPU its group is one of gloo, and its copies to a GPU are
none."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed import distributed_c10d

from tests.entrypoints.serving import RunningServer, free_port, wait_until

FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-model-len", "512", "--weight-transfer", "group")
LIMIT = timedelta(seconds=60)
Tensors = dict[str, torch.Tensor]


def make_group(init_method: str, world_size: int, rank: int, group_name: str, **_: Any) -> Any:
    """As torchrl's `_init_custom_process_group`, of gloo."""
    store, *_ = next(distributed.rendezvous(init_method, rank, world_size, timeout=LIMIT))
    prefixed, backend = distributed.PrefixStore(group_name, store), distributed.Backend("gloo")
    make: Any = distributed_c10d._new_process_group_helper
    group, _ = make(world_size, rank, [], backend, prefixed, group_name=group_name, backend_options=None, timeout=LIMIT)
    distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(world_size)}
    return group


class Replayed:
    """The calls of `SGLangCollectiveTransport`."""

    def __init__(self, url: str, mode: str) -> None:
        self._client, self._mode = httpx.Client(base_url=url, timeout=60, trust_env=False), mode
        self._calls, self._name = ThreadPoolExecutor(1), f"weight_update_group_{uuid.uuid4().hex[:8]}"

    def join(self, tensors: Tensors) -> None:
        port = free_port()
        fields = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": self._name}
        joined = self._calls.submit(self._post, "/init_weights_update_group", fields)
        self._group = make_group(f"tcp://127.0.0.1:{port}", 2, 0, self._name)
        assert joined.result()["success"]

    def update(self, tensors: Tensors) -> None:
        self._post("/pause_generation", {"mode": self._mode})
        wait_until(lambda: sum(each["num_running_reqs"] for each in self._client.get("/get_load").json()) == 0)
        fields = {
            "names": list(tensors),
            "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
            "group_name": self._name,
            "flush_cache": self._mode == "abort",
            "abort_all_requests": False,
        }
        updated = self._calls.submit(self._post, "/update_weights_from_distributed", fields)
        for each in tensors.values():
            distributed.broadcast(each, src=0, group=self._group)
        assert updated.result()["success"]
        self._post("/continue_generation", {"torch_empty_cache": True})

    def _post(self, path: str, body: Any) -> Any:
        reply = self._client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()


class Installed:
    """The scheme itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, url: str, mode: str) -> None:
        module = pytest.importorskip("torchrl.weight_update.llm.sglang_nccl")
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(module, "_init_custom_process_group", make_group)
        scheme = module.SGLangWeightSyncScheme(server_url=url, master_address="127.0.0.1", num_gpus=1, pause_mode=mode)
        self._sender = scheme.create_sender()

    def join(self, tensors: Tensors) -> None:
        self._sender.init_all_workers_group({name: (each.dtype, each.shape) for name, each in tensors.items()})

    def update(self, tensors: Tensors) -> None:
        self._sender.update_weights({name: _OnHost(each) for name, each in tensors.items()})


class _OnHost:
    """A tensor whose copy to a GPU is itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.dtype, self.shape = tensor, tensor.dtype, tensor.shape

    def to(self, device: str) -> torch.Tensor:
        return self._tensor


@pytest.fixture(scope="module")
def trained(folders: list[Path]) -> Iterator[str]:
    server = RunningServer(folders[0], *FLAGS, fake=False)
    yield server.url
    assert server.stop() == 0


def ask(url: str, tokens: int = 12) -> Any:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    reply = httpx.post(f"{url}/generate", json={"input_ids": [5, 6, 7, 8], "sampling_params": params}, timeout=60, trust_env=False)
    return reply.json()


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
@pytest.mark.parametrize("trainer", ["replayed", "installed"])
def test_torchrl_updates_a_server(trainer: str, mode: str, trained: str, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    make: Callable[[str, str], Any] = Replayed if trainer == "replayed" else partial(Installed, monkeypatch)
    scheme, (first, second) = make(trained, mode), [load_file(folder / "model.safetensors") for folder in folders]
    scheme.join(first)
    scheme.update(first)
    expected = ask(trained)["output_ids"]
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, trained, 480) for _ in range(8)]
        wait_until(lambda: httpx.get(f"{trained}/get_load", trust_env=False).json()[0]["num_running_reqs"] == len(running))
        scheme.update(second)
        replies = [each.result()["meta_info"] for each in running]
    assert {reply["finish_reason"]["type"] for reply in replies} == {"abort" if mode == "abort" else "length"}
    assert mode == "abort" or all(len(reply["weight_versions"]) == 2 for reply in replies)
    assert ask(trained)["output_ids"] != expected
    scheme.update(first)
    assert ask(trained)["output_ids"] == expected
