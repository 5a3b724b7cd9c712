"""Trainers and engines that are killed in each phase of an update, under streams: every answer is
that of the old or of the new weights, never of a mixture, and errors have a name.

The server is batch-invariant, so that an answer of some weights has one form.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from frame.rl.weight_client import WeightClient, WeightUpdateError
from tests.entrypoints.fork_server import start_forked
from tests.entrypoints.serving import RunningServer, wait_until

pytestmark = pytest.mark.slow
FLAGS = (
    *("--dtype", "float32", "--enable-deterministic-inference", "--max-model-len", "128", "--max-total-tokens", "2048"),
    *("--weight-transfer", "ipc", "--weight-transfer", "group", "--weight-update-timeout", "3", "--max-restarts", "1000"),
)
PROMPTS = [[7 * number + place for place in range(20 + number)] for number in range(4)]
TOKENS = 90

KILLED = "tests.entrypoints.http.operations.killed_trainer"


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[RunningServer]:
    with RunningServer(folders[0], *FLAGS, fake=False) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: RunningServer, folders: list[Path]) -> list[list[list[int]]]:
    """The answers of the old and of the new weights."""
    old = ask_all(server)
    load(server, folders[1])
    new = ask_all(server)
    load(server, folders[0])
    assert all(first != second for first, second in zip(old, new, strict=True))
    return [old, new]


@pytest.fixture(autouse=True)
def old_weights(server: RunningServer, folders: list[Path], expected: list[list[list[int]]]) -> None:
    """Each test begins with the old weights."""
    load(server, folders[0])
    assert ask_all(server) == expected[0]


def load(server: RunningServer, folder: Path) -> None:
    assert server.post("/update_weights_from_disk", {"model_path": str(folder)}).status_code == 200


def ask(server: RunningServer, prompt: Sequence[int], started: threading.Semaphore | None = None) -> list[int]:
    """The tokens of a stream, which may have to wait for an engine that starts again."""
    params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "stream": True, "sampling_params": params}
    tokens: list[int] = []
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens = event["output_ids"]
                if started is not None and tokens:
                    started.release()
                    started = None
    return tokens


def ask_all(server: RunningServer) -> list[list[int]]:
    """The answers to all prompts, which are computed in one batch."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(partial(ask, server), PROMPTS))


@contextmanager
def streams(server: RunningServer) -> Iterator[list[list[int]]]:
    """The tokens of streams that have begun; they are there after the block."""
    started, found = threading.Semaphore(0), list[list[int]]()
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        futures = [threads.submit(ask, server, prompt, started) for prompt in PROMPTS]
        for _ in PROMPTS:
            assert started.acquire(timeout=60)
        yield found
        found += [future.result() for future in futures]


def update(server: RunningServer, folder: Path, kind: str) -> None:
    with WeightClient(server.url, timeout=60) as client:
        if kind == "group":
            client.join_group()
        client.update(load_file(folder / "model.safetensors"), f"by {kind}", bucket_bytes=100_000)


PHASES = {
    "ipc": ("begin", "part", "later", "commit"),
    "group": ("rendezvous", "joined", "begin", "part", "later", "commit"),
}


BETWEEN = {("ipc", "part"), ("ipc", "later"), ("group", "begin"), ("group", "later")}
OF_THE_OTHER_KIND = {("ipc", "commit"), ("group", "joined")}  # as ("group", "commit") and ("group", "rendezvous")


def marks_of(kind: str, phase: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.soak] * ((kind, phase) in BETWEEN) + [pytest.mark.exhaustive] * ((kind, phase) in OF_THE_OTHER_KIND)


@pytest.mark.parametrize(
    ("kind", "phase"),
    [pytest.param(kind, phase, marks=marks_of(kind, phase)) for kind, phases in PHASES.items() for phase in phases],
)
def test_a_trainer_is_killed(kind: str, phase: str, server: RunningServer, folders: list[Path], expected: list[list[list[int]]]) -> None:
    command = [sys.executable, "-m", KILLED, server.url, str(folders[1] / "model.safetensors"), kind, phase]
    with streams(server) as found:
        trainer = start_forked(command, {}) or subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert trainer.stderr is not None
        errors = trainer.stderr.read()
        assert trainer.wait(60) == -signal.SIGKILL, errors
    assert found == expected[0], "streams end with the weights that they began with"

    def is_updated() -> bool:
        try:
            update(server, folders[1], kind)
        except WeightUpdateError as error:
            print(error)  # shown where the test fails
            time.sleep(0.1)  # an attempt takes processor time of both sides
            return False
        return True

    wait_until(is_updated, 60)
    assert ask_all(server) == expected[1]


def test_two_trainers_at_once(server: RunningServer, folders: list[Path], expected: list[list[list[int]]]) -> None:
    """At least one of them updates; the others get a sentence."""
    outcomes: list[Any] = []

    def train(kind: str, folder: Path) -> None:
        try:
            update(server, folder, kind)
            outcomes.append(kind)
        except WeightUpdateError as error:
            outcomes.append(str(error))

    with streams(server):
        trainers = [threading.Thread(target=train, args=(kind, folders[1])) for kind in ("ipc", "group", "ipc", "group")]
        for trainer in trainers:
            trainer.start()
        for trainer in trainers:
            trainer.join()
    assert {"ipc", "group"} & set(outcomes), outcomes
    assert all(each in ("ipc", "group") or "in progress" in each or "another update" in each for each in outcomes), outcomes
    assert ask_all(server) == expected[1]


def test_a_folder_that_is_cut_off(server: RunningServer, folders: list[Path], expected: list[list[list[int]]], tmp_path: Path) -> None:
    """A trainer that was killed while it wrote its checkpoint."""
    data = (folders[1] / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text((folders[1] / "config.json").read_text())
    with streams(server) as found:
        for size in (0, 7, len(data) // 2, len(data) - 1):
            (tmp_path / "model.safetensors").write_bytes(data[:size])
            reply = server.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
            assert reply.status_code == 400 and "model.safetensors" in reply.json()["error"]["message"], reply.text
    assert found == expected[0]


# disk: test_weight_updates.py too; group: the tensors are kept as those of ipc are
@pytest.mark.parametrize("kind", [pytest.param("disk", marks=pytest.mark.soak), "ipc", pytest.param("group", marks=pytest.mark.exhaustive)])
def test_an_engine_is_killed_between_an_update_and_the_next_step(
    kind: str, folders: list[Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    """It comes back with the new weights: those of the folder, or the copy of the tensors."""
    with RunningServer(folders[0], *FLAGS, "--keep-updates", str(tmp_path), fake=False) as server:
        with streams(server) as found:
            assert server.post("/pause_generation", {"mode": "retract"}).status_code == 200
            load(server, folders[1]) if kind == "disk" else update(server, folders[1], kind)
            server.children()["scheduler"].kill()
            wait_until(lambda: any("engine ready again" in line for line in server.lines), 60)
            assert server.post("/continue_generation", {}).status_code == 200
        for tokens, old, new in zip(found, *expected, strict=True):
            assert len(tokens) == TOKENS and tokens[0] == old[0] and tokens not in (old, new)
        assert ask_all(server) == expected[1]


def test_wrong_tensors(server: RunningServer, folders: list[Path], expected: list[list[list[int]]]) -> None:
    """A wrong name, shape or type, in the first part, by both kinds."""
    tensors, name = load_file(folders[1] / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    wrong = {
        "which the model does not have": {**tensors, "model.other": torch.ones(2)},
        "has the shape": {**tensors, name: tensors[name][:-1]},
        "is stored as int8": {**tensors, name: tensors[name].to(torch.int8)},
    }
    with streams(server) as found:
        for kind in ("ipc", "group"):
            client = WeightClient(server.url, timeout=60)
            if kind == "group":
                client.join_group()
            for sentence, each in wrong.items():
                with pytest.raises(WeightUpdateError, match=sentence):
                    client.update(each, "wrong")
            client.close()
    assert found == expected[0]
