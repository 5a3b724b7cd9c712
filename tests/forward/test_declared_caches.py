"""Cache groups of the layers that a model's modules declare."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.forward.declared_caches import model_geometry
from tests.core.fake_model import fake_model_config

MHA = dataclasses.replace(fake_model_config(), num_layers=3, num_kv_heads=4, num_heads=8, head_dim=16, v_head_dim=8)
STATE = CacheTensor((6, 3)), CacheTensor((2, 4, 4), torch.float32)


class Layer(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def test_a_model_without_declarations_has_the_groups_of_its_configuration():
    uniform = kv_geometry(MHA, 1, 16, "float32")
    assert model_geometry(nn.Linear(2, 2), uniform) is uniform


def test_the_layers_of_a_model_form_groups():
    model = nn.ModuleList(
        [
            Layer(cache=LayerCache(0, "snapshot", STATE)),
            Layer(spec=AttentionSpec(1, 4, 2, 16, 16, 0.25)),
            Layer(spec=AttentionSpec(1, 4, 2, 16, 16, 0.25)),  # reads the keys of the layer before
            Layer(cache=LayerCache(2, "sidecar", (CacheTensor((8,), torch.uint8),))),
            Layer(spec=AttentionSpec(3, 4, 1, 40, 16, 0.25), kv_lora_rank=32, qk_rope_head_dim=8),
            Layer(spec=AttentionSpec(4, 4, 2, 16, 16, 0.25, causal=False)),
        ]
    )
    geometry = model_geometry(model, kv_geometry(MHA, 1, 4, "bfloat16"))
    tokens, state, sidecar = geometry.groups
    formed = [(group.kind, group.page_size, group.pool) for group in geometry.groups]
    assert formed == [("tokens", 4, 0), ("snapshot", 0, 1), ("sidecar", 4, 0)]
    assert [layer.layer for group in (tokens, state, sidecar) for layer in group.layers] == [1, 3, 0, 2]
    assert geometry.num_pools == 2
    assert geometry.bytes_per_token == (2 * 2 * 16 + 40) * 2 + 8
    assert geometry.count_bytes(1) == 6 * 3 * 2 + 2 * 4 * 4 * 4
    pool = KVPool(geometry, (5, 3), torch.device("cpu"))
    assert [tensor.shape for tensor in pool.layer(0)] == [(4, 6, 3), (4, 2, 4, 4)]  # and the page that padding writes to
    assert pool.layer(0)[1].dtype == torch.float32
    assert pool.layer(2)[0].shape == (5, 4, 8)
    assert pool.num_bytes == 5 * 4 * geometry.bytes_per_token + 4 * geometry.count_bytes(1)
