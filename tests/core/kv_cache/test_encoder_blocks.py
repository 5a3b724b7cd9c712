"""A `write_once` group: its pages in the pool, its memory, and the writes of its page table."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.build import Limits
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.interfaces.media import EncodeOrder, MediaItem
from frame.core.kv_cache.encoder_blocks import EncoderBlocks
from frame.core.kv_cache.geometry import group_layers
from frame.core.kv_cache.kv_pool import KVPool
from frame.loading.capacity import plan_pools
from frame.media.files import map_features, write_features

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


def test_orders_of_slots_read_files_of_features(tmp_path: Path) -> None:
    """Each item goes to the block of its slot; orders without a slot are for rows."""
    geometry = group_layers(LAYERS, 4, torch.float32)
    blocks = EncoderBlocks(geometry, geometry.groups[2], 4, torch.device("cpu"))
    blocks.table.write_host(blocks.expand_writes(np.array([[2, 0, 1], [0, 0, 4]], np.int32)))
    features = np.arange(2 * 3 * 20, dtype=np.float32).reshape(2, 3, 20)
    items = [MediaItem("audio", b"", [], 10, *write_features(tmp_path, {"input_features": each})) for each in features]
    nothing = np.empty(0, np.int32)
    orders = [EncodeOrder(items[1], nothing, slot=0), EncodeOrder(items[0], nothing, slot=-1), EncodeOrder(items[0], nothing, slot=2)]
    batch = ScheduledBatch(
        step=1, num_decodes=0, slots=np.array([0, 2], np.int32), num_computed=np.zeros(2, np.int32), num_scheduled=np.ones(2, np.int32),
        token_ids=np.zeros(2, np.int32), samples=np.ones(2, bool), new_pages=np.empty((0, 3), np.int32), encodes=orders,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="nothing reads files of features"):
        blocks.list_inputs(batch, np.array([0, 2]))
    blocks.read_features = map_features
    arrays = blocks.list_inputs(batch, np.array([0, 2]))
    assert np.array_equal(arrays["group_features"], features[[1, 0]])
    pages = {0: [12, 13, 14], 2: [3, 4, 5]}
    assert arrays["group_encoded"].tolist() == [[pages[slot][place // 4] * 4 + place % 4 for place in range(10)] for slot in (0, 2)]
    assert "group_features" not in blocks.list_inputs(msgspec.structs.replace(batch, encodes=[]), np.array([0, 2]))
