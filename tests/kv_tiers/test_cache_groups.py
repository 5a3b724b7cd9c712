"""Models with windows or recurrent states, in float32: with a device pool of a fifth of what is
asked, over host and disk, the tokens are those without a prefix cache, and of a pool that holds
everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.interfaces.kv_tier import TransferSettings
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.platform import HOST
from frame.core.kv_cache.geometry import group_layers
from frame.core.kv_cache.kv_pool import KVPool
from frame.entrypoints.processes.build_engine import build_rank, build_tiers
from frame.entrypoints.processes.build_scheduler import build_schedulers
from frame.kv_tiers.block_layout import plan_blocks
from frame.kv_tiers.build import TierSettings, check_groups
from frame.kv_tiers.mover import PoolBlockMover
from frame.testing.checkpoints import make_checkpoint
from frame.testing.local_loop import LocalLoop
from tests.core.greedy import greedy, random_prompts
from tests.kv_tiers.mover_rig import list_bytes, make_buffers, wait_for
from tests.kv_tiers.rank_rig import prepare_ranks, run_ranks

PROMPTS = random_prompts([60 + 7 * number % 24 for number in range(6)])
PARAMS = greedy(6)
WORKING_SET = sum(len(prompt) + 8 for prompt in PROMPTS)
MODELS = {"window": "Gemma3ForCausalLM", "sinks": "GptOssForCausalLM", "states": "Qwen3NextForCausalLM", "mamba": "FalconH1ForCausalLM"}
QUICK = {("window", 16), ("states", 16)}
CASES = [
    pytest.param(*case, id="-".join(map(str, case[:2])), marks=() if case[:2] in QUICK else pytest.mark.slow)
    for case in (
        ("window", 1, ("host", "disk")),
        ("window", 16, ("disk",)),
        ("sinks", 16, ("host", "disk")),
        ("states", 1, ("disk",)),
        ("states", 16, ("host", "disk")),
        ("mamba", 16, ("host",)),
    )
]


def prepare_loop(folder: Path, blocks: Path, num_tokens: int, page_size: int, tiers: tuple[str, ...], **more: Any) -> LocalLoop:
    cache = {"max_total_tokens": num_tokens, "page_size": page_size, **more}
    if tiers:
        cache |= {"tiers": tiers, "min_load_tokens": 4}
    prepared = prepare_ranks(folder, blocks, num_tokens, tiers, cache=cache)
    runner = build_rank(prepared.resolved, prepared.registry)
    make_tiers = build_tiers(prepared.resolved, prepared.registry, runner, None)
    scheduler: Any = build_schedulers(prepared.resolved, prepared.registry, runner.capacity.pools, make_group_tiers=make_tiers)
    return LocalLoop(scheduler, runner)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "page_size", "tiers"), CASES)
def test_tokens_are_those_without_a_cache(kind: str, page_size: int, tiers: tuple[str, ...], tmp_path: Path) -> None:
    """With chunks, overlap and preemption; the second round reads what the first one stored."""
    folder = make_checkpoint(MODELS[kind], tmp_path)
    expected = prepare_loop(folder, tmp_path, 4 * WORKING_SET, page_size, (), prefix="none").generate(PROMPTS, PARAMS)
    large = prepare_loop(folder, tmp_path, 4 * WORKING_SET, page_size, ())
    assert [large.generate([prompt], PARAMS)[0] for prompt in PROMPTS] == expected
    loop = prepare_loop(folder, tmp_path / "blocks", 96, page_size, tiers)
    scheduler: Any = loop.scheduler
    scheduler._planner._growth_reserve = 1  # pages that running requests need are not kept free
    assert loop.generate(PROMPTS, PARAMS) == expected
    cached = loop.stats["cached"]
    for _ in range(4):  # a slow disk drops blocks, which a later round stores
        assert [loop.generate([prompt], PARAMS)[0] for prompt in PROMPTS] == expected
        load = scheduler.get_load()
        if (loaded := sum(tier["loaded_tokens"] for tier in load["tiers"])) >= 16 * len(PROMPTS):
            break
    scheduler.check_integrity()
    assert load["tier_failed_loads"] == load["tier_waiting"] == 0
    assert loaded >= 16 * len(PROMPTS)
    assert loop.stats["cached"] - cached >= 16 * len(PROMPTS)
    scheduler.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["window", "states"])
def test_two_ranks_keep_their_shares(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(MODELS[kind], tmp_path)
    expected = prepare_loop(folder, tmp_path, 4 * WORKING_SET, 4, (), prefix="none").generate(PROMPTS, PARAMS)
    prepared = prepare_ranks(folder, tmp_path / "blocks", 96, ("host", "disk"), parallel={"tp": 2})

    def act(loop: LocalLoop) -> dict[str, Any]:
        assert loop.generate(PROMPTS, PARAMS) == expected
        assert [loop.generate([prompt], PARAMS)[0] for prompt in PROMPTS] == expected
        loop.scheduler.check_integrity()
        return loop.scheduler.get_load()

    load = run_ranks(prepared, tmp_path, act)
    assert sum(tier["loaded_tokens"] for tier in load["tiers"]) >= 16 * len(PROMPTS)


def test_a_disk_is_warm_after_a_restart(tmp_path: Path) -> None:
    folder, texts = make_checkpoint(MODELS["states"], tmp_path), []
    for _ in range(2):
        loop = prepare_loop(folder, tmp_path / "blocks", 128, 16, ("disk",))
        texts.append([loop.generate([prompt], PARAMS)[0] for prompt in PROMPTS])
        loaded = loop.scheduler.get_load()["tiers"][0]["loaded_tokens"]
        loop.scheduler.close()
    assert texts[0] == texts[1]
    assert loaded >= 16 * len(PROMPTS)


def test_what_tiers_do_not_keep_is_refused() -> None:
    heads = (CacheTensor((2, 12)),)
    window = group_layers([LayerCache(0, "tokens", heads), LayerCache(1, "window", heads, window=9)], 4, torch.float32)
    encoder = group_layers([LayerCache(0, "tokens", heads), LayerCache(1, "write_once", heads, length=9)], 4, torch.float32)

    def make_settings(**changes: Any) -> TierSettings:
        return TierSettings((), "model", b"secret", "write_through", 1, **changes)

    check_groups(window, make_settings())
    with pytest.raises(ConfigurationError, match="kind write_once, and tiers keep tokens and sidecar and window and snapshot alone"):
        check_groups(encoder, make_settings())
    with pytest.raises(ConfigurationError, match=r"kind window, whose blocks differ between the 2 stages; set parallel\.pp to 1"):
        check_groups(window, make_settings(plan=ParallelPlan(pp=2)))
    transfer = TransferSettings("decode", "127.0.0.1", 1, b"secret", {})
    with pytest.raises(ConfigurationError, match=r"disaggregation\.mode is decode, but the model has a KV cache of kind window"):
        check_groups(window, make_settings(transfer=transfer))


# bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_pages_of_all_groups_come_back(dtype: torch.dtype) -> None:
    """A state of odd size is several blocks; a page of the window is two. Other pages stay."""
    heads = (CacheTensor((2, 12)), CacheTensor((2, 8)))
    layers = [LayerCache(0, "tokens", heads), *(LayerCache(index, "window", heads, window=9) for index in (1, 2))]
    layers += [LayerCache(3, "snapshot", (CacheTensor((5, 7, 19), torch.float32), CacheTensor((13,), torch.uint8)))]
    geometry = group_layers(layers, 4, dtype)
    pool = KVPool(geometry, (9, 7, 5), torch.device("cpu"))
    for tensor in list_bytes(pool):
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    mover, layout = PoolBlockMover(pool, HOST), plan_blocks(geometry, pool.num_pages)
    assert layout.num_pieces[0] == 1
    assert layout.num_pieces[1] == 2
    assert layout.num_pieces[2] > 2
    kinds = ["tokens", "window", "snapshot"]

    def number(tokens: int, window: int, state: int) -> np.ndarray:
        local = (tokens, 9 + window, 9 + 7 + state)
        return np.concatenate([layout.number_blocks(index, np.array([page])) for index, page in enumerate(local)])

    before = [tensor.clone() for tensor in list_bytes(pool)]
    sources, targets = number(3, 6, 2), number(8, 1, 4)
    buffers = make_buffers(mover, len(sources))
    mover.store(1, sources, [buffers])
    wait_for(mover, [1])
    mover.load(2, targets, buffers)
    wait_for(mover, [2])
    layered = [(group.kind, layer.layer) for group in geometry.groups for layer in group.layers]
    owners = [kind for kind, layer in layered for _ in (*pool.layer(layer), *pool.scales(layer))]
    moves = {"tokens": (3, 8), "window": (6, 1), "snapshot": (2, 4)}
    assert set(owners) == set(kinds)
    for owner, tensor, contents in zip(owners, list_bytes(pool), before, strict=True):
        source, target = moves[owner]
        contents[target] = contents[source]
        assert torch.equal(tensor, contents)
