"""What a job is answered with, without a process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from frame.entrypoints.media.media_process import Job, Refused, decode
from frame.interfaces.modality import MediaSize
from tests.entrypoints.media.hostile_modality import HostileModality


class TensorModality(HostileModality):
    """Its features are a tensor that no machine holds."""

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {"rows": torch.empty(1 << 50, dtype=torch.uint8).numpy()}


def test_memory_that_torch_does_not_get_is_named(tmp_path: Path) -> None:
    modality = TensorModality(SimpleNamespace(folder=tmp_path))  # type: ignore[arg-type]
    response = decode({"image": modality}, Job("image", b"x", {}), tmp_path)
    assert isinstance(response, Refused) and "takes too much memory" in response.sentence
