"""`cache.tiers`: which tiers are chosen, and what is refused before the start."""

from __future__ import annotations

import dataclasses

import pytest
from pydantic import BaseModel

from frame.config.resolution.tiers import GIB
from frame.config.resolve import ResolveError, resolve
from frame.config.selection import UnknownPluginError
from frame.core.errors import PluginError
from frame.core.interfaces.cache import PrefixCacheCapabilities
from frame.core.interfaces.kv_tier import KVTierCapabilities
from tests.config.test_resolve import H200, LAPTOP, LLAMA, config, names, record, records

CAN = KVTierCapabilities(size="size_gib", memory=("size_gib",))


class Options(BaseModel):
    size_gib: float = 1.0


def known(**further):
    return records(
        kv_tier=[dataclasses.replace(record("kv_tier", name), capabilities=CAN, options=Options) for name in ("ram", "far")], **further
    )


def tiers(*chosen, size=None, **cache):
    options = {} if size is None else {"plugins": {"options": {"kv_tier/ram": {"size_gib": size}}}}
    return {"cache": {"tiers": chosen, **cache}, **options}


def test_tiers_are_chosen_in_their_order():
    assert "kv_tier" not in resolve(config(), LAPTOP, LLAMA, known()).plugins
    resolved = resolve(config(**tiers("far", "ram", size=2)), LAPTOP, LLAMA, known())
    assert names(resolved)["kv_tier"] == ["far", "ram"]
    assert [choice.options["size_gib"] for choice in resolved.plugins["kv_tier"]] == [1.0, 2.0]


def test_an_unknown_tier():
    with pytest.raises(UnknownPluginError, match="cache.tiers names an unknown kv_tier 'rum'; did you mean 'ram'"):
        resolve(config(**tiers("rum")), LAPTOP, LLAMA, known())


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (tiers("ram", "ram"), r"cache.tiers has ram twice.\nNearest change: cache.tiers: \[ram\]"),
        (tiers("far", size=1), r"plugins.options has kv_tier/ram, but cache.tiers does not name ram"),
        (tiers(write_policy="write_through_selective"), "cache.write_policy is write_through_selective, but cache.tiers names no tier"),
        (tiers(min_load_tokens=8), "cache.min_load_tokens is 8, but cache.tiers names no tier"),
        (
            tiers("ram", size=1 << 20),
            r"takes 1,048,576.0 GiB of host memory, and this machine has .*\n.*kv_tier/ram.size_gib: ",
        ),
        (
            {**tiers("ram"), "parallel": {"tp": 2, "nnodes": 2, "dist_init_addr": "host:1"}},
            "cache.tiers is set, but the engine's ranks are on 2 hosts",
        ),
        ({**tiers("ram", size=1 << 19), "parallel": {"dp": 2}}, "1,048,576.0 GiB of host memory, for 2 replicas"),
    ],
)
def test_tiers_that_cannot_be_used(sections, words):
    with pytest.raises(ResolveError, match=words):
        resolve(config(**sections), H200, LLAMA, known())


def test_a_wrong_option_is_told_once():
    with pytest.raises(PluginError) as caught:
        resolve(config(**tiers("ram", size="much")), H200, LLAMA, known())
    assert str(caught.value).count("kv_tier/ram.size_gib") == 1


def test_ranks_share_the_memory_of_a_replica():
    size = 0.75 * H200.memory_bytes / GIB
    resolve(config(**tiers("ram", size=size), parallel={"tp": 4}), H200, LLAMA, known())
    with pytest.raises(ResolveError, match="of host memory, for 2 replicas"):
        resolve(config(**tiers("ram", size=size), parallel={"dp": 2}), H200, LLAMA, known())


def test_a_prefix_cache_that_keeps_nothing_has_no_tiers():
    without = dataclasses.replace(record("prefix_cache", "none"), capabilities=PrefixCacheCapabilities(reuses=False))
    with pytest.raises(ResolveError, match="cache.tiers is set, but cache.prefix is none, which keeps no prefixes"):
        resolve(config(**tiers("ram", prefix="none")), LAPTOP, LLAMA, known(prefix_cache=[without]))
