"""The fp8 kernels, compiled, and what PyTorch multiplies beside them."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from tests.kernels.fp8 import *  # noqa: F403
