"""Greedy tokens of Whisper on a GPU are those of transformers on the CPU: blocks are written
through the staging of the device and read by the decode kernels."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from frame.core.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.local_loop import LocalLoop
from tests.core.greedy import greedy
from tests.tiny_whisper import FIRST, MELS, POSITIONS, load_whisper, make_whisper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_are_those_of_transformers(page_size: int, tmp_path: Path) -> None:
    folder = make_whisper(tmp_path, d_model=128)  # heads of 32
    config = {
        "model": {"path": str(folder), "dtype": "float32"},
        "cache": {"page_size": page_size, "max_total_tokens": 512},
        "scheduler": {"max_running_requests": 8, "chunked_prefill_size": 16},
        "attention": {"backend": "triton"},
        "execution": {"device": "cuda"},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
    numbers, noise, reference = random.Random(7), np.random.default_rng(7), load_whisper(folder)
    prompts = [[FIRST, *(numbers.randrange(6, 384) for _ in range(length))] for length in (3, 30, 3, 1, 17, 25, 8, 2)]
    inputs = [noise.standard_normal((MELS, 2 * POSITIONS), np.float32) for _ in prompts]
    outputs = loop.generate(prompts, greedy(32), [each.tobytes() for each in inputs])
    wrong = 0
    for prompt, given, output in zip(prompts, inputs, outputs, strict=True):
        with torch.no_grad():
            logits = reference(input_features=torch.from_numpy(given)[None], decoder_input_ids=torch.tensor([prompt + output])).logits[0]
        wrong += output != logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert wrong <= 1, "rounding may tip one choice between two tokens"
    loop.scheduler.check_integrity()
