"""The engine or a rank is killed under streams with adapters, in half of the rounds during a load:
every answer is that of the adapter that the request names. Loads without end leave nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file

from frame.entrypoints.engine_client.adapter_spool import PREFIX
from tests.entrypoints.chaos.storm import Storm, restarts
from tests.entrypoints.serving import RunningServer, list_children, wait_until

NAMES = ["a0", "a1", "a2", "a3"]
FLAGS = (
    *("--max-model-len", "256", "--max-total-tokens", "4096", "--max-running-requests", "8", "--dtype", "float32", "--threads", "1"),
    *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "8", "--max-lora-rank", "16", "--max-restarts", "10000"),
)


def write_adapter(base: Path, folder: Path, seed: int) -> Path:
    """An adapter of rank 4 whose answers differ from those of every other seed and of the base."""
    config, draw = json.loads((base / "config.json").read_text()), torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in {"gate_proj": (hidden, inner), "down_proj": (inner, hidden)}.items():
            prefix = f"base_model.model.model.layers.{layer}.mlp.{name}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(4, inputs, generator=draw) * inputs**-0.5
            tensors[f"{prefix}B.weight"] = torch.randn(outputs, 4, generator=draw)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["gate_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


class Weather:
    """A server with adapters, and what its requests answer when nothing happens."""

    def __init__(self, base: Path, folder: Path, *flags: str) -> None:
        self.base, self.folder, self.loads = base, folder, 0
        modules = [f"{name}={write_adapter(base, folder / name, seed)}" for seed, name in enumerate(NAMES)]
        spools = folder / "tmp"
        spools.mkdir()
        flags = ("--lora-modules", ",".join(modules), "--lora-folders", str(folder), *flags)
        self.server = RunningServer(base, *FLAGS, *flags, fake=False, env={"TMPDIR": str(spools)})
        self.storm = Storm(16, 32)
        for number, body in enumerate(self.storm.bodies):
            body.update(temperature=0.0, n=1)
            body.pop("logprobs", None)
            body.pop("stop", None)
            if name := [None, *NAMES][number % 5]:
                body["model"] = name
        self.calm = self.storm(self.server)
        self.progress = self.storm.progress
        assert not any(reply.error for reply in self.calm)
        body = {"prompt": [5, 6, 7, 8], "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
        answers = [self.server.post("/v1/completions", body | ({"model": name} if name else {})).json() for name in [None, *NAMES]]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1 + len(NAMES)

    def strike(self, pick: Callable[[], psutil.Process], share: float, *, loads: bool) -> None:
        """The storm again; when it is done to this share, a process is killed, if `loads` while an
        adapter is loaded."""
        before, answers = restarts(self.server), list[httpx.Response]()
        name, path = f"more{self.loads}", ""
        if loads:
            self.loads += 1
            path = str(write_adapter(self.base, self.folder / name, 1000 + self.loads))
        loading = threading.Thread(target=lambda: answers.append(self.load(name, path)))

        def kill() -> None:
            if loads:
                loading.start()
            pick().send_signal(signal.SIGKILL)

        replies = self.storm(self.server, int(share * self.progress), kill)
        for number, (reply, expected) in enumerate(zip(replies, self.calm, strict=True)):
            assert reply == expected, (number, self.storm.bodies[number])
        wait_until(lambda: restarts(self.server) > before, 60)
        wait_until(self.server.ready, 120)
        if loads:
            loading.join(120)
            if answers[0].status_code != 200:
                assert answers[0].json()["error"]["message"], answers[0].text
                assert self.load(name, path).status_code == 200
            assert self.server.post("/v1/unload_lora_adapter", {"lora_name": name}).status_code == 200
        self.check()

    def load(self, name: str, path: str) -> httpx.Response:
        return self.server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def check(self, versions: int = len(NAMES)) -> None:
        """Nothing runs, and pages and adapters are where they belong."""
        wait_until(lambda: self.server.get("/server_info")["outstanding"] == 0)
        assert self.server.post("/check_integrity", {}).status_code == 200
        assert self.server.post("/flush_cache", {}).status_code == 200
        wait_until(lambda: self.server.metric("frame_adapter_versions") == versions)
        assert self.server.get("/server_info")["used_pages"] == 0
        wait_until(lambda: self.server.metric("frame_adapters_running") == 0)
        assert self.server.metric("frame_adapter_requests_waiting") == 0
        assert self.server.metric("frame_adapters_loaded") <= versions
        assert len(self.list_copies()) == versions

    def list_copies(self) -> list[Path]:
        """Copies of adapters that the server keeps."""
        return [copy for spool in (self.folder / "tmp").glob(f"{PREFIX}*") for copy in spool.iterdir()]

    def find(self, role: str) -> psutil.Process:
        return next(child for child in list_children(self.server.process.pid) if role in child.cmdline())


def open_weather(base: Path, tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[Weather]:
    weather = Weather(base, tmp_path_factory.mktemp("adapters"), *flags)
    with weather.server:
        yield weather


@pytest.fixture(scope="module")
def weather(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weather]:
    yield from open_weather(checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def ranks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weather]:
    yield from open_weather(checkpoint, tmp_path_factory, "--tp", "2")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [2, pytest.param(int(os.environ.get("FRAME_ROUNDS", "50")), marks=pytest.mark.soak)])
def test_the_engine_is_killed(weather: Weather, rounds: int) -> None:
    for number in range(rounds):
        weather.strike(lambda: weather.find("scheduler"), number * 7 % 10 / 10, loads=number % 2 == 1)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_rank_is_killed(ranks: Weather) -> None:
    for number in range(int(os.environ.get("FRAME_ROUNDS", "20"))):
        ranks.strike(lambda: ranks.find("follower"), number * 7 % 10 / 10, loads=number % 2 == 1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("loads", [60, pytest.param(10_000, marks=pytest.mark.soak)])
def test_loads_leave_nothing(weather: Weather, loads: int, tmp_path: Path) -> None:
    """Loads, loads of the same name again, requests and unloads; also of more adapters than host
    memory has room for."""
    folders = [str(write_adapter(weather.base, weather.folder / f"{tmp_path.name}-{seed}", 50 + seed)) for seed in range(6)]
    engine, held = weather.find("scheduler"), dict[str, Any]()
    for number in range(loads):
        name = f"n{number % 5}"
        assert weather.load(name, folders[number % 6]).status_code == 200
        if number % 16 == 0:
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0.0}
            assert weather.server.post("/v1/completions", body).status_code == 200
        if number % 2:
            assert weather.server.post("/v1/unload_lora_adapter", {"lora_name": name}).status_code == 200
        if number == loads // 2:
            held = engine.as_dict(["memory_info", "num_fds"])
    for number in range(5):
        weather.server.post("/v1/unload_lora_adapter", {"lora_name": f"n{number}"})
    weather.check()
    assert engine.num_fds() <= held["num_fds"]
    assert engine.memory_info().rss < held["memory_info"].rss + (16 << 20)
