"""Vectors on a GPU are those of the CPU: encoders, decoders, pairs, with steps in flight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from frame.testing.checkpoints import make_checkpoint
from tests.pooling.test_pooling import LENGTHS, NORMALIZE, as_sentence_folder, make_loop, prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [("BertModel", "mean"), ("RobertaModel", "max"), ("BertModel", "cls"), ("Qwen3Model", "last"), ("LlamaModel", "mean")],
)
def test_vectors(architecture: str, mode: str, tmp_path: Path) -> None:
    folder = as_sentence_folder(make_checkpoint(architecture, tmp_path), mode, NORMALIZE)
    want, loop = make_loop(folder).pool(prompts()), make_loop(folder, execution={"device": "cuda"})
    np.testing.assert_allclose(loop.pool(prompts()), want, atol=5e-4)
    np.testing.assert_allclose(loop.pool(prompts()), want, atol=5e-4)
    loop.scheduler.check_integrity()


def test_pairs(tmp_path: Path) -> None:
    folder = make_checkpoint("BertForSequenceClassification", tmp_path, num_labels=1)
    second_text_starts = [length // 2 for length in LENGTHS]
    want = make_loop(folder).pool(prompts(), second_text_starts)
    np.testing.assert_allclose(make_loop(folder, execution={"device": "cuda"}).pool(prompts(), second_text_starts), want, atol=1e-4)
