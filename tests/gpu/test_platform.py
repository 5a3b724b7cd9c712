"""The platform `cuda` on a GPU."""

from __future__ import annotations

import pytest
import torch

from frame.plugins.devices import capture_graph, open_platform

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_borrowed_memory_is_the_same(dtype: torch.dtype) -> None:
    owner = torch.arange(48, device="cuda").to(dtype).view(4, 12)[:, 3:9].unflatten(1, (2, 3))
    lent = open_platform("cuda").borrow(owner)
    assert lent.data_ptr() == owner.data_ptr() and lent.stride() == owner.stride() and lent.dtype is dtype
    assert torch.equal(lent, owner)


def test_a_graph_replays_with_the_same_addresses() -> None:
    platform = open_platform("cuda")
    x, y = torch.ones(8, device=platform.device), torch.empty(8, device=platform.device)
    torch.add(x, 1, out=y)
    graph = capture_graph(platform, lambda: torch.add(x, 1, out=y))
    x.fill_(41)
    graph.replay()
    platform.synchronize()
    assert y.tolist() == [42] * 8


def test_waiting_for_the_device_is_found() -> None:
    platform, x = open_platform("cuda"), torch.ones(8, device="cuda")
    with platform.check_synchronisation(is_allowed=False):
        with pytest.raises(RuntimeError):
            x.sum().item()
        with platform.check_synchronisation(is_allowed=True):
            assert x.sum().item() == 8
    memory = platform.measure_memory()
    assert 0 < memory.free < memory.total and memory.peak > 0 and memory.reserved == platform.count_reserved()
