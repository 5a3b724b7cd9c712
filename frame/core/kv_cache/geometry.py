"""`KVGeometry`: the cache groups of a model on one rank, from its configuration or from declared
layers.

Used where a runner is built. It must not know pools or schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.cache_groups import CacheTensor, GroupKind, LayerCache
from frame.core.interfaces.model import ModelConfig

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
SCALE = torch.float16  # dtype of the scales of an int8 cache


GroupKey = tuple[GroupKind, int | None]  # the kind and the window of a group


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose pages are allocated and freed together."""

    kind: GroupKind
    layers: tuple[LayerCache, ...]
    page_size: int  # tokens; of `snapshot` and `write_once` 0: a page holds the state or the block of one sequence
    pool: int  # index of the group whose pages it uses: its own, or for `sidecar` 0
    window: int | None = None  # tokens
    length: int = 0  # of `write_once`: positions of a block


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The cache groups of one rank. The first group is of kind `tokens`; it may have no layers."""

    groups: tuple[CacheGroup, ...]
    page_size: int  # tokens
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in the pages of the `tokens` group."""
        return self.count_bytes(0)

    @property
    def num_pools(self) -> int:
        """Groups with pages of their own. They come before those that use another group's pages."""
        return sum(group.pool == index for index, group in enumerate(self.groups))

    def count_bytes(self, pool: int) -> int:
        """Bytes of one token in a pool, of one state, or of one block."""
        layers = (layer for group in self.groups if group.pool == pool for layer in group.layers)
        each = sum(self._count_tensor(tensor) for layer in layers for tensor in layer.tensors)
        pages = self.count_block_pages(self.groups[pool])
        return each * pages * self.page_size if pages else each

    def count_block_pages(self, group: CacheGroup) -> int:
        """Pages of `page_size` positions that a block of a `write_once` group takes; 0 for other
        groups."""
        return -(-group.length // self.page_size)

    def dtype_of(self, tensor: CacheTensor) -> torch.dtype:
        return self.dtype if tensor.dtype is None else tensor.dtype

    def has_scales(self, tensor: CacheTensor) -> bool:
        """Whether each row of the last dimension has a scale of its own: keys and values of an int8
        cache."""
        return tensor.dtype is None and self.dtype == torch.int8

    def _count_tensor(self, tensor: CacheTensor) -> int:
        scales = math.prod(tensor.shape[:-1]) * SCALE.itemsize if self.has_scales(tensor) else 0
        return math.prod(tensor.shape) * self.dtype_of(tensor).itemsize + scales


def kv_geometry(model_config: ModelConfig, tp_size: int, page_size: int, kv_dtype: str) -> KVGeometry:
    """The groups on one of `tp_size` ranks of a model whose layers all store keys and values of the
    configured shape, or a latent. KV heads are split over the ranks, or repeated where there are
    fewer heads than ranks; a latent is whole on every rank. An encoder has no layers here: it
    stores no keys."""
    if model_config.kind == "mla" and model_config.latent is not None:
        tensors: tuple[CacheTensor, ...] = (CacheTensor((sum(model_config.latent),)),)
    else:
        heads = max(1, model_config.num_kv_heads // tp_size)
        tensors = CacheTensor((heads, model_config.head_dim)), CacheTensor((heads, model_config.v_head_dim))
    num_layers = 0 if model_config.encoder else model_config.num_layers
    return group_layers((LayerCache(layer, "tokens", tensors) for layer in range(num_layers)), page_size, DTYPES[kv_dtype])


def add_groups(geometry: KVGeometry, kinds: Iterable[GroupKey]) -> KVGeometry:
    """The geometry of a pipeline stage with the groups of all stages, in this order; those that its
    layers do not use are empty."""
    layers = (layer for group in geometry.groups for layer in group.layers)
    return group_layers(layers, geometry.page_size, geometry.dtype, kinds)


def group_layers(layers: Iterable[LayerCache], page_size: int, dtype: torch.dtype, first: Iterable[GroupKey] = ()) -> KVGeometry:
    """Form groups of layers with equal kind and window, those of `first` before others. Raises
    ConfigurationError for two different declarations of one layer."""
    by_index: dict[int, LayerCache] = {}
    for layer in layers:
        if by_index.setdefault(layer.layer, layer) != layer:
            raise ConfigurationError(f"the model declares two different caches for layer {layer.layer}; give each cache its own index")
    members: dict[GroupKey, list[LayerCache]] = {("tokens", None): [], **{key: [] for key in first}}
    for _, layer in sorted(by_index.items()):
        members.setdefault((layer.kind, layer.window), []).append(layer)
    last = ("write_once", "sidecar")  # the prefix cache sees the pools before these
    ordered = sorted(members.items(), key=lambda item: last.index(item[0][0]) + 1 if item[0][0] in last else 0)
    groups = [
        CacheGroup(
            kind,
            tuple(layers_of),
            0 if kind in ("snapshot", "write_once") else page_size,
            0 if kind == "sidecar" else index,
            window,
            max((layer.length for layer in layers_of), default=0),
        )
        for index, ((kind, window), layers_of) in enumerate(ordered)
    ]
    return KVGeometry(tuple(groups), page_size, dtype)
