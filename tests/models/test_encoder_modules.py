"""Modules of transformers' encoders that are replaced: the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frame.models.encoder_modules import PatchEmbedding, SequenceRuns, replace_modules
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
    assert runs.find(starts) == [(4, 8), (4, 4), (4, 1), (6, 1), (4, 1), (8, 2)]
    assert runs.find(starts) is runs.find(starts)
