"""Greedy tokens of Whisper on a GPU are those of transformers on the CPU: blocks are written
through the staging of the device and read by the decode kernels."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.local_loop import LocalLoop
from tests.core.greedy import greedy
from tests.tiny_whisper import FIRST, MELS, POSITIONS, load_whisper, make_items, make_whisper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


COUNT = 8
NEAR = 0.1  # between logits; float16 may tip a choice between tokens that are closer
NUMBERS, NOISE = random.Random(7), np.random.default_rng(7)
PROMPTS = [[FIRST, *(NUMBERS.randrange(6, 384) for _ in range(length))] for length in (3, 30, 3, 1, 17, 25, 8, 2)]
INPUTS = [NOISE.standard_normal((MELS, 2 * POSITIONS), np.float32) for _ in PROMPTS]


def generate(folder: Path, page_size: int, maximum: int) -> list[list[int]]:
    """`maximum`: rows of the largest decode graph."""
    config = {
        "model": {"path": str(folder), "dtype": "float16"},
        "cache": {"page_size": page_size, "max_total_tokens": 512},
        "scheduler": {"max_running_requests": COUNT, "chunked_prefill_size": 16},
        "attention": {"backend": "triton"},
        "execution": {"device": "cuda", "cuda_graph_max_bs": maximum},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    assert (runner.decode_graphs is not None) == bool(maximum)
    loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
    outputs = loop.generate(PROMPTS, greedy(32), make_items(folder, INPUTS))
    loop.scheduler.check_integrity()
    return outputs


@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_are_those_of_transformers(page_size: int, tmp_path: Path) -> None:
    """Of plain steps, and of captured decodes."""
    folder = make_whisper(tmp_path, d_model=128)  # heads of 32
    reference = load_whisper(folder)
    found = [generate(folder, page_size, maximum) for maximum in (0, COUNT)]
    for outputs in found:
        wrong = 0
        for prompt, given, output in zip(PROMPTS, INPUTS, outputs, strict=True):
            ids = torch.tensor([prompt + output])
            with torch.no_grad():
                logits = reference(input_features=torch.from_numpy(given)[None], decoder_input_ids=ids).logits[0, len(prompt) - 1 : -1]
            behind = logits.max(-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            wrong += bool(behind.max() > NEAR)
        assert wrong <= 1
    same = sum(plain == captured for plain, captured in zip(*found, strict=True))
    assert same >= COUNT - 2, f"{same} of {COUNT} rows are the same"
