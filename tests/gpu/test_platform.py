"""The platform `cuda` on a GPU."""

from __future__ import annotations

import pytest
import torch

from frame.core.interfaces.platform import SupportsSleep
from frame.plugins.devices import capture_graph, open_platform
from frame.plugins.platforms.cuda import CudaPlatform

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


@pytest.mark.alone
def test_tagged_memory_is_released() -> None:
    pytest.importorskip("torch_memory_saver")
    platform = open_platform("cuda")
    assert isinstance(platform, SupportsSleep)
    with platform.tag_allocations("weights"):
        weights = torch.arange(64 << 20, device="cuda", dtype=torch.int32)
    with platform.tag_allocations("kv_cache"):
        pool = torch.ones(64 << 20, device="cuda", dtype=torch.int32)
    graph = capture_graph(platform, lambda: pool.add_(weights))
    addresses, before = (weights.data_ptr(), pool.data_ptr()), platform.measure_memory().free
    platform.release_tag("weights", [weights], keeps_values=True)
    platform.release_tag("kv_cache", [pool], keeps_values=False)
    assert platform.measure_memory().free - before >= 0.9 * (weights.nbytes + pool.nbytes)
    platform.map_tag("weights", [weights])
    platform.map_tag("kv_cache", [pool])
    assert (weights.data_ptr(), pool.data_ptr()) == addresses
    assert int(pool.abs().max()) == 0 and int(weights[-1]) == (64 << 20) - 1
    graph.replay()
    platform.synchronize()
    assert torch.equal(pool, weights)


def test_dropped_weights_are_zeros_and_what_lies_beside_them_stays() -> None:
    pytest.importorskip("torch_memory_saver")
    platform = open_platform("cuda")
    assert isinstance(platform, CudaPlatform)
    with platform.tag_allocations("weights"):
        weights = torch.ones(64 << 20, device="cuda", dtype=torch.int32)
        table = torch.arange(1 << 20, device="cuda")
    with platform.tag_allocations("kv_cache"):
        pool = torch.ones(1 << 20, device="cuda")
    platform.release_tag("weights", [weights], keeps_values=False)
    assert sum(len(copy) for _, copy in platform._copy._parts) < weights.nbytes  # pieces of earlier tests stay allocated
    platform.map_tag("weights", [weights])
    assert not weights.any() and torch.equal(table.cpu(), torch.arange(1 << 20)) and bool(pool.all())
