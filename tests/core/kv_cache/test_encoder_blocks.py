"""A `write_once` group: its pages in the pool, its memory, and the writes of its page table."""

from __future__ import annotations

import numpy as np
import torch

from frame.core.interfaces.build import Limits
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.kv_cache.capacity import plan_pools
from frame.core.kv_cache.encoder_blocks import EncoderBlocks
from frame.core.kv_cache.geometry import group_layers
from frame.core.kv_cache.kv_pool import KVPool

TENSORS = (CacheTensor((2, 8)), CacheTensor((2, 8)))
LAYERS = [LayerCache(2, "write_once", TENSORS, length=10), LayerCache(0, "tokens", TENSORS), LayerCache(1, "window", TENSORS, 4)]


def test_the_group_is_the_last_one_with_pages() -> None:
    geometry = group_layers(LAYERS, 4, torch.float32)
    assert [group.kind for group in geometry.groups] == ["tokens", "window", "write_once"]
    assert geometry.count_bytes(2) == 3 * 4 * geometry.bytes_per_token  # three pages hold ten positions
    pools = plan_pools(geometry, Limits(8, 64, 32, 4), 64)
    assert [(pool.kind, pool.num_pages, pool.page_size) for pool in pools][-1] == ("write_once", 5, 0)
    pool = KVPool(geometry, (17, 17, 5), torch.device("cpu"))
    assert [part.shape for part in pool.layer(2)] == [(15, 4, 2, 8)] * 2
    few = plan_pools(geometry, Limits(2, 64, 32, 4), 64)
    assert few[-1].num_pages == 3  # no more blocks than running requests


def test_a_block_is_pages_in_a_row() -> None:
    geometry = group_layers(LAYERS, 4, torch.float32)
    blocks = EncoderBlocks(geometry, geometry.groups[2], 4, torch.device("cpu"))
    writes = blocks.expand_writes(np.array([[2, 0, 1], [0, 0, 4]], np.int32))
    assert writes.tolist() == [[2, 0, 3], [2, 1, 4], [2, 2, 5], [0, 0, 12], [0, 1, 13], [0, 2, 14]]
    assert blocks.expand_writes(np.empty((0, 3), np.int32)).shape == (0, 3)
