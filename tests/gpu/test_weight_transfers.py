"""Tensors of a trainer's process on the same GPU, through CUDA IPC."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from frame import Engine, SamplingParams
from frame.rl.weight_client import WeightClient
from tests.entrypoints.serving import RunningServer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KEYS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128, "max_total_tokens": 2048}
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPT = list(range(20, 60))
BODY = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
TRAINER = """
import sys
from safetensors.torch import load_file
from frame.rl import WeightClient
client = WeightClient(sys.argv[1])
if sys.argv[3] == "group":
    client.join_group(device="cuda" if sys.argv[4] == "cuda" else "cpu")
for number in range(3):
    tensors = {name: tensor.to(sys.argv[4]) for name, tensor in load_file(sys.argv[2] + "/model.safetensors").items()}
    client.update(tensors, f"step-{number}", bucket_bytes=100_000)
"""


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[int]:
    with Engine(str(folders[1]), **KEYS) as engine:
        tokens: list[int] = engine.generate(PROMPT, PARAMS).token_ids
    return tokens


@pytest.fixture
def server(folders: list[Path]) -> Iterator[RunningServer]:
    flags = ("--dtype", "bfloat16", "--max-model-len", "128", "--max-total-tokens", "2048")
    with RunningServer(folders[0], *flags, "--weight-transfer", "ipc", "--weight-transfer", "group", fake=False) as running:
        yield running


@pytest.mark.parametrize(("kind", "device"), [("ipc", "cuda"), ("ipc", "cpu"), ("group", "cpu")])
def test_a_trainer_in_another_process(kind: str, device: str, server: RunningServer, folders: list[Path], expected: list[int]) -> None:
    """With CUDA graphs on: their addresses stay. NCCL takes a GPU for each rank; two cards have a
    script."""
    arguments = [sys.executable, "-c", TRAINER, server.url, str(folders[1]), kind, device]
    assert subprocess.run(arguments, check=False).returncode == 0
    assert server.post("/generate", BODY).json()["output_ids"] == expected


def test_an_engine_in_the_trainers_process(folders: list[Path], expected: list[int]) -> None:
    """Host memory: a process cannot open its own handles of CUDA IPC."""
    with Engine(str(folders[0]), **KEYS, weight_transfer=["ipc"]) as engine:
        WeightClient(engine).update(load_file(folders[1] / "model.safetensors"), "new")
        assert engine.generate(PROMPT, PARAMS).token_ids == expected
