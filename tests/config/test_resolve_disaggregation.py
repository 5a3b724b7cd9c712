"""`disaggregation.mode`: the tier that it chooses, and what is refused before the start."""

from __future__ import annotations

import dataclasses

import pytest
from pydantic import BaseModel

from frame.config.resolve import ResolveError, resolve
from frame.core.interfaces.kv_tier import KVTierCapabilities
from tests.config.test_resolve import LAPTOP, LLAMA, config, names, record, records

CAN = {"ram": KVTierCapabilities(size="size_gib", memory=("size_gib",)), "peers": KVTierCapabilities(size="size_gib", transfers=True)}


class Options(BaseModel):
    size_gib: float = 1.0


def known():
    return records(kv_tier=[dataclasses.replace(record("kv_tier", name), capabilities=can, options=Options) for name, can in CAN.items()])


def settings(mode="prefill", **sections):
    return config(**{"disaggregation": {"mode": mode}, **sections})


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_mode_chooses_the_tier_with_transfers(mode):
    assert names(resolve(settings(mode), LAPTOP, LLAMA, known()))["kv_tier"] == ["peers"]
    further = settings(mode, cache={"tiers": ["ram"]}, plugins={"options": {"kv_tier/peers": {"size_gib": 2}}})
    resolved = resolve(further, LAPTOP, LLAMA, known())
    assert names(resolved)["kv_tier"] == ["ram", "peers"]
    assert resolved.plugins["kv_tier"][1].options == {"size_gib": 2}
    named = settings(mode, cache={"tiers": ["peers", "ram"], "min_load_tokens": 9})
    assert names(resolve(named, LAPTOP, LLAMA, known()))["kv_tier"] == ["peers", "ram"]


@pytest.mark.parametrize(
    ("sections", "sentence", "change"),
    [
        ({"disaggregation": {"port": 5601}}, "disaggregation.port is 5601, but disaggregation.mode is not set", "port: 5600"),
        ({"disaggregation": {}, "cache": {"tiers": ["ram", "peers"]}}, "cache.tiers names peers", "cache.tiers: [ram]"),
        ({"parallel": {"dp": 2}}, "parallel.dp is 2; each of these servers has one engine", "parallel.dp: 1"),
        ({"parallel": {"tp": 2}}, "the engine has 2 ranks", "disaggregation.mode: null"),
        ({"cache": {"write_policy": "write_through_selective"}}, "stores no block at its first use", "cache.write_policy: write_through"),
    ],
)
def test_what_is_refused(sections, sentence, change):
    with pytest.raises(ResolveError) as caught:
        resolve(settings(**sections), LAPTOP, LLAMA, known())
    assert sentence in str(caught.value)
    assert change in str(caught.value)
