"""Modules of transformers' encoders that are replaced: the same results."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frame.models.encoder_modules import PatchEmbedding, PlannedShapes, SequenceRuns, _attend, replace_modules
from tests.models.harness import open_session
from tests.models.media_checkpoints import make_media_checkpoint
from tests.models.media_inputs import make_items


@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"])
def test_an_image_is_encoded_without_convolutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    folder = make_media_checkpoint(tmp_path, architecture)
    session = open_session(folder, encoders=True)

    def convolve(*arguments: Any) -> None:
        raise AssertionError("patches are convolved")

    monkeypatch.setattr(nn.Conv3d, "_conv_forward", convolve)
    session.model.encoders.encode("image", make_items(folder, "image")[:1])  # type: ignore[attr-defined]


def test_a_kernel_that_covers_a_patch_is_a_product() -> None:
    torch.manual_seed(0)
    plain, padded = nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4), padding=1)
    patches, images = torch.randn(5, 3, 2, 4, 4), torch.randn(2, 3, 4, 8, 8)
    expected = plain(patches), plain(images), padded(patches)
    modules = nn.ModuleList([plain, padded])
    replace_modules(modules, torch.device("cpu"))
    assert (type(plain), type(padded)) == (PatchEmbedding, nn.Conv3d)
    for ours, theirs in zip((plain(patches), plain(images), padded(patches)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_images_of_one_length_are_attended_to_in_powers_of_two() -> None:
    lengths = [4] * 13 + [6] + [4] + [0] + [8] * 2
    starts = torch.tensor([0, *lengths]).cumsum(0)
    runs = SequenceRuns()
    assert runs.find(starts) == [(length, count, False) for length, count in ((4, 8), (4, 4), (4, 1), (6, 1), (4, 1), (8, 2))]
    assert runs.find(starts) is runs.find(starts)


def test_a_shape_is_planned_once_a_plan_pays() -> None:
    shapes, entries = PlannedShapes(), 27 * 16 * 72
    # 13 ms are lost for each image of 8,160 positions, and a plan takes 70
    assert [shapes.is_planned(8160, 1, entries) for _ in range(8)] == [False] * 6 + [True] * 2
    assert not any(shapes.is_planned(length, 1, entries) for length in range(4000, 8000))  # sizes that do not come again
    assert shapes.is_planned(8160, 1, entries)
    with ThreadPoolExecutor(1) as other:  # plans are a thread's own
        assert not other.submit(shapes.is_planned, 8160, 1, entries).result()


def test_plans_are_bounded() -> None:
    shapes = PlannedShapes()
    planned = [shapes.is_planned(length, 1, 1 << 40) for length in range(1000, 2000) for _ in range(2)]
    assert sum(planned) == 128 and all(planned[1:256:2])
    assert len(shapes._losses) <= 128


def test_the_batch_invariant_mode_plans_nothing() -> None:
    runs = SequenceRuns(deterministic=True)
    runs.num_entries = 1 << 40
    for _ in range(3):
        assert runs.find(torch.tensor([0, 100, 200])) == [(100, 2, False)]


def test_devices_without_flash_attention_use_another_kernel() -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 16, dtype=torch.bfloat16).unbind()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    for is_planned in (False, True):
        assert torch.equal(_attend(query, key, value, is_planned=is_planned), expected)
