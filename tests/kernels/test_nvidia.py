"""What launchers ask of a device, as far as it can be answered without a GPU."""

from __future__ import annotations

import torch

from frame.kernels import nvidia


def test_a_device_with_an_index_is_not_asked_for_it() -> None:
    assert nvidia.get_index(torch.device("cuda", 3)) == 3


def test_nothing_waits_on_a_cpu_so_nothing_is_allowed_to() -> None:
    with nvidia.allow_sync(torch.device("cpu")):
        assert not torch.cuda.is_initialized()
