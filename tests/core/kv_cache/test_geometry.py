"""Cache groups: of a model's configuration, and of the layers that its modules declare."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from frame.core.errors import ConfigurationError
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.kv_cache.geometry import group_layers, kv_geometry, model_geometry
from frame.core.kv_cache.kv_pool import KVPool
from tests.core.fake_model import fake_model_config

MHA = dataclasses.replace(fake_model_config(), num_layers=3, num_kv_heads=4, num_heads=8, head_dim=16, v_head_dim=8)
MLA = dataclasses.replace(MHA, kind="mla", latent=(32, 8))
KEYS = CacheTensor((2, 16)), CacheTensor((2, 16))
STATE = CacheTensor((6, 3)), CacheTensor((2, 4, 4), torch.float32)


class Layer(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_heads_by_rank(tp, heads):
    geometry = kv_geometry(MHA, tp, 16, "bfloat16")
    (group,) = geometry.groups
    assert [layer.layer for layer in group.layers] == [0, 1, 2]
    assert {tensor.shape for layer in group.layers for tensor in layer.tensors} == {(heads, 16), (heads, 8)}
    assert geometry.bytes_per_token == 3 * heads * (16 + 8) * 2


def test_a_latent_is_whole_on_every_rank():
    for tp in (1, 4):
        geometry = kv_geometry(MLA, tp, 16, "fp8_e4m3")
        assert geometry.groups[0].layers[0].tensors == (CacheTensor((40,)),)
        assert geometry.bytes_per_token == 3 * 40


def test_an_encoder_stores_nothing():
    geometry = kv_geometry(dataclasses.replace(MHA, encoder=True), 1, 16, "float32")
    assert (geometry.bytes_per_token, geometry.num_pools) == (0, 1)


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


def test_one_layer_has_one_cache():
    with pytest.raises(ConfigurationError, match="two different caches for layer 0"):
        group_layers([LayerCache(0, "tokens", KEYS), LayerCache(0, "snapshot", STATE)], 16, torch.float32)
