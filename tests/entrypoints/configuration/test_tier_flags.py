"""Flags of other servers for KV cache tiers: what they stand for, and which contradict others."""

from __future__ import annotations

import pytest

from frame.core.errors import ConfigError
from frame.entrypoints.configuration.sources import from_keywords, load_config
from frame.entrypoints.configuration.tier_flags import TIER_FLAGS


def load(**flags):
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    return load_config(flags=named, environ={})


@pytest.mark.parametrize(
    ("flags", "tiers", "options"),
    [
        ({"enable_hierarchical_cache": True}, ("host",), {}),
        ({"enable_hierarchical_cache": True, "hicache_size": "4"}, ("host",), {"size_gib": 4.0}),
        ({"enable_hierarchical_cache": True, "hicache_ratio": "2.5"}, ("host",), {"ratio": 2.5}),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, ("host", "disk"), {}),
        ({"kv_offloading_size": "8"}, ("host",), {"size_gib": 8.0}),
        ({"kv_offloading_size": "8", "hicache_size": "8"}, ("host",), {"size_gib": 8.0}),
        ({"cache_tiers": "host,disk", "hicache_size": "4"}, ("host", "disk"), {"size_gib": 4.0}),
        ({"cache_tiers": "disk,host", "enable_hierarchical_cache": True}, ("disk", "host"), {}),
    ],
)
def test_what_flags_stand_for(flags, tiers, options):
    keywords = {name: value.split(",") if name == "cache_tiers" else value for name, value in flags.items()}
    for config in (load(**flags).config, from_keywords({}, **keywords).config):
        assert config.cache.tiers == tiers
        assert config.plugins.options.get("kv_tier/host", {}) == options


def test_the_write_policy_has_the_name_of_sglang():
    assert load(hicache_write_policy="write_through_selective").config.cache.write_policy == "write_through_selective"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"hicache_size": "4", "hicache_ratio": "2"}, "--hicache-size and flag --hicache-ratio contradict"),
        ({"hicache_size": "4", "kv_offloading_size": "5"}, "--hicache-size and flag --kv-offloading-size contradict"),
        ({"hicache_ratio": "4", "kv_offloading_size": "5"}, "--hicache-ratio and flag --kv-offloading-size contradict"),
        ({"cache_tiers": "disk", "enable_hierarchical_cache": True}, "--enable-hierarchical-cache and flag --cache-tiers disk contradict"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend needs flag --enable-hierarchical-cache"),
        ({"enable_hierarchical_cache": True, "hicache_storage_backend": "nixl"}, "--hicache-storage-backend is 'nixl'"),
        ({"kv_offloading_size": "0"}, "--kv-offloading-size is '0'"),
        ({"hicache_size": "lots"}, "--hicache-size is 'lots'; it should be a number"),
        ({"hicache_sizes": "1"}, "did you mean 'hicache-size'"),
    ],
)
def test_flags_that_are_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        load(**flags)
    if "hicache_sizes" not in flags:
        with pytest.raises(ConfigError, match="keyword"):
            from_keywords({}, **flags)


def test_the_source_of_a_value():
    loaded = load(kv_offloading_size="8")
    assert loaded.source("cache.tiers") == "flag --kv-offloading-size"
    assert set(TIER_FLAGS) >= {"enable-hierarchical-cache", "hicache-size", "hicache-ratio", "hicache-storage-backend"}
