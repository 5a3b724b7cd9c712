"""Sums over ranks, compiled: two streams of one GPU are the ranks."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from tests.kernels.peer_sum import *  # noqa: F403
