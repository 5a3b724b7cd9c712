"""KV pools with random contents, and the jobs of a mover. Used by the tests of the mover on the CPU
and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.kv_cache.geometry import DTYPES, KVGeometry, group_layers, kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.kv_tiers.mover import PoolBlockMover
from tests.core.fake_model import fake_model_config

MHA = replace(fake_model_config(), num_layers=3, num_kv_heads=1, num_heads=2, head_dim=12, v_head_dim=8)
MLA = replace(MHA, kind="mla", latent=(7, 2))
CASES = ("uniform", "mla", "int8", "fp8", "sidecar")
WAIT = 20.0  # seconds


def make_geometry(case: str, page_size: int) -> KVGeometry:
    """The geometry of a case: int8 has scales, sidecar has the keys of an indexer in bytes and
    their scales."""
    if case == "sidecar":
        latent = [LayerCache(layer, "tokens", (CacheTensor((5,)),)) for layer in range(2)]
        keys = [LayerCache(2 + layer, "sidecar", (CacheTensor((7,), torch.uint8), CacheTensor((1,), torch.float32))) for layer in range(2)]
        return group_layers([*latent, *keys], page_size, torch.bfloat16)
    dtype = {"int8": "int8", "fp8": "fp8_e4m3"}.get(case, "bfloat16")
    return kv_geometry(MLA if case == "mla" else MHA, 1, page_size, dtype)


def make_pool(case: str, page_size: int, num_pages: int, device: torch.device | None = None) -> KVPool:
    pool = KVPool(make_geometry(case, page_size), num_pages, device or torch.device("cpu"))
    for tensor in list_bytes(pool):
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, device=tensor.device))
    return pool


def list_bytes(pool: KVPool) -> list[torch.Tensor]:
    """All tensors of the pool, uint8 [pages, bytes]."""
    layers = [layer.layer for group in pool.geometry.groups for layer in group.layers]
    tensors = [tensor for layer in layers for tensor in (*pool.layer(layer), *pool.scales(layer))]
    return [tensor.flatten(1).view(torch.uint8) for tensor in tensors]


def copy_contents(pool: KVPool) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in list_bytes(pool)]


def make_buffers(mover: PoolBlockMover, count: int, device: str = "cpu") -> list[torch.Tensor]:
    return [torch.zeros(mover.block_bytes, dtype=torch.uint8, device=device) for _ in range(count)]


def wait_for(mover: PoolBlockMover, jobs: Sequence[int]) -> None:
    """Poll until these jobs have ended, each once."""
    ended: list[int] = []
    limit = time.monotonic() + WAIT
    while len(ended) < len(jobs):
        assert time.monotonic() < limit, f"{ended} of {jobs} have ended"
        if not (polled := mover.poll()):
            time.sleep(0.0005)
        ended += polled
    assert sorted(ended) == sorted(jobs)


def check_round_trip(
    pool: KVPool, mover: PoolBlockMover, sources: Sequence[int], targets: Sequence[int], devices: tuple[str, str] = ("cpu", "cpu")
) -> None:
    """Store pages twice, load them to other pages: those have the bytes, and no other page has
    changed. devices: of the buffers of the two stores."""
    before, noted = copy_contents(pool), list[int]()
    mover.on_stored = noted.append
    first, second = (make_buffers(mover, len(sources), device) for device in devices)
    mover.store(1, np.array(sources, np.int32), [first, second])
    wait_for(mover, [1])
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(first, second, strict=True))
    for tensor in list_bytes(pool):
        tensor[list(sources)] = 0
    mover.load(2, np.array(targets, np.int32), second)
    wait_for(mover, [2])
    assert noted == [1]
    for tensor, contents in zip(list_bytes(pool), before, strict=True):
        expected = contents.clone()
        expected[list(sources)] = 0
        expected[list(targets)] = contents[list(sources)]
        assert torch.equal(tensor, expected)


__all__ = ["CASES", "DTYPES", "check_round_trip", "copy_contents", "list_bytes", "make_buffers", "make_pool", "wait_for"]
