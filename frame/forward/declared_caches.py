"""`model_geometry`: the cache groups that the layers of a model declare.

Used where a runner is built. Must not know pools or schedulers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from frame.core.interfaces.attention_spec import AttentionSpec
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.interfaces.device_drafter import DraftModel
from frame.core.interfaces.model import Model
from frame.core.kv_cache.geometry import KVGeometry, group_layers


def model_geometry(model: Model | DraftModel | torch.nn.Module, uniform: KVGeometry, drafter: DraftModel | None = None) -> KVGeometry:
    """The groups that the modules of `model` declare; those of `uniform` if none declares any. The
    layers of a drafter's model are added to them."""
    layers, added = _list_layers(model), [] if drafter is None else _list_layers(drafter)
    if not layers and not added:
        return uniform
    layers = layers or [layer for group in uniform.groups for layer in group.layers]
    return group_layers(layers + added, uniform.page_size, uniform.dtype)


def find_free_layer(model: Model | torch.nn.Module, num_layers: int) -> int:
    """The first index that a drafter's layers may have: after all layers of the model and their
    caches, of which a layer may have two."""
    return max(num_layers, *(layer.layer + 1 for layer in _list_layers(model)), 0)


def _list_layers(model: Model | DraftModel | torch.nn.Module) -> list[LayerCache]:
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return [declared for module in modules for declared in _declared(module)]


def _declared(module: Any) -> Iterable[LayerCache]:
    """The caches that a module declares: by its attribute `cache`, and as an attention layer."""
    cache, spec = getattr(module, "cache", None), getattr(module, "spec", None)
    if isinstance(cache, LayerCache):
        yield cache
    elif isinstance(spec, AttentionSpec) and spec.causal:
        yield _attention_cache(spec, getattr(module, "kv_lora_rank", None), getattr(module, "qk_rope_head_dim", 0))


def _attention_cache(spec: AttentionSpec, rank: int | None, rope: int) -> LayerCache:
    if rank is not None:
        tensors: tuple[CacheTensor, ...] = (CacheTensor((rank + rope,)),)
    else:
        tensors = CacheTensor((spec.num_kv_heads, spec.head_dim)), CacheTensor((spec.num_kv_heads, spec.v_head_dim))
    return LayerCache(spec.layer, "tokens" if spec.sliding_window is None else "window", tensors, spec.sliding_window)
