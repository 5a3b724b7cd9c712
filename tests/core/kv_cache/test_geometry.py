"""Cache groups of a model's configuration, and of declared layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.kv_cache.geometry import group_layers, kv_geometry
from tests.core.fake_model import fake_model_config

MHA = dataclasses.replace(fake_model_config(), num_layers=3, num_kv_heads=4, num_heads=8, head_dim=16, v_head_dim=8)
MLA = dataclasses.replace(MHA, kind="mla", latent=(32, 8))
KEYS = CacheTensor((2, 16)), CacheTensor((2, 16))
STATE = CacheTensor((6, 3)), CacheTensor((2, 4, 4), torch.float32)


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


def test_one_layer_has_one_cache():
    with pytest.raises(ConfigurationError, match="two different caches for layer 0"):
        group_layers([LayerCache(0, "tokens", KEYS), LayerCache(0, "snapshot", STATE)], 16, torch.float32)
