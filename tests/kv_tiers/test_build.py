"""How tiers are built: the identity of blocks, the refused models, and what is closed after a
failure."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.interfaces.kv_tier import KVTierCapabilities, KVTierContext
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.platform import HOST, Platform, PlatformContext, SupportsPinning
from frame.core.interfaces.plugin import Anything
from frame.core.kv_cache.geometry import group_layers
from frame.core.kv_cache.kv_pool import KVPool
from frame.entrypoints.configuration.prepare import prepare
from frame.kv_tiers.block_keys import MAX_BLOCKS
from frame.kv_tiers.build import (
    ChosenTier,
    ControllerBuilder,
    TierSettings,
    allocate,
    check_tiers,
    describe_blocks,
    digest_model,
    divide_options,
    open_tiers,
    prepare_tiers,
)
from tests.kv_tiers.mover_rig import make_geometry, make_pool
from tests.plugins.fake_platform import FakePlatform


def test_a_tier_without_capabilities_is_local() -> None:
    """It may be a plugin of a package that registers no record of them."""
    prepared = prepare(FrameConfig.model_validate({"execution": {"device": "cpu"}, "cache": {"tiers": ["host"]}}))
    settings = prepare_tiers(prepared.resolved, lambda name: Anything(), prepared.registry.create)
    assert [tier.capabilities for tier in settings.tiers] == [KVTierCapabilities()]


def digest(folder: Path, **sections: dict[str, object]) -> str:
    values: dict[str, dict[str, object]] = {"model": {"path": str(folder), "dtype": "float32"}, "execution": {"device": "cpu"}}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return digest_model(prepare(FrameConfig.model_validate(values)).resolved)


def test_the_identity_changes_with_what_computes_keys_and_values(tmp_path: Path) -> None:
    import frame.models

    folder = tmp_path / "model"
    shutil.copytree(Path(frame.models.__file__).parent / "frame_tiny", folder)
    first = digest(folder)
    assert digest(folder) == first
    others = {digest(folder, model={"dtype": "bfloat16"}), digest(folder, cache={"kv_dtype": "int8"}), digest(folder, model={"seed": 3})}
    weights = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    os.utime(weights, ns=(1, 1))
    others.add(digest(folder))
    assert len(others | {first}) == 5
    geometries = [make_geometry(case, size) for case in ("uniform", "mla", "fp8") for size in (1, 16)]
    assert len({describe_blocks(first, geometry) for geometry in geometries}) == 6
    places = [(0, 1, 0, 1), (0, 1, 0, 2), (0, 1, 1, 2), (0, 2, 0, 1), (1, 2, 0, 1)]
    assert len({describe_blocks(first, geometries[0], place) for place in places}) == 5


def test_an_engine_that_starts_after_an_update_has_other_blocks(tmp_path: Path) -> None:
    """Its model's folder is the same, and it loads the weights of another one."""
    import frame.models

    tiny = Path(frame.models.__file__).parent / "frame_tiny"
    shutil.copytree(tiny, tmp_path / "later", copy_function=shutil.copy)  # without the times of the files
    resolved = prepare(FrameConfig.model_validate({"model": {"path": str(tiny)}, "execution": {"device": "cpu"}})).resolved
    assert digest_model(resolved.with_weights(str(tmp_path / "later"), "2")) != digest_model(resolved)


def test_memory_is_pinned_for_the_device_of_the_rank() -> None:
    """The thread that pins it has none."""
    calls: list[str] = []

    class Pinning(FakePlatform, SupportsPinning):
        def activate(self) -> None:
            calls.append("activate")

        def pin_memory(self, memory: torch.Tensor) -> None:
            calls.append("pin")

    def create(context: KVTierContext) -> Any:
        calls.clear()
        context.pin(torch.zeros(8, dtype=torch.uint8))

    pool = make_pool("uniform", 16, 8, torch.device("cpu"))
    settings = TierSettings([ChosenTier("pinned", KVTierCapabilities(), create)], "model", b"secret", "write_through", 1)
    open_tiers(settings, pool, Pinning(PlatformContext())).mover.close()
    assert calls == ["activate", "pin"]


@pytest.mark.parametrize("platform", [HOST, FakePlatform(PlatformContext())], ids=["host", "device"])
def test_a_check_opens_the_tiers_of_the_platform_that_will_run(platform: Platform) -> None:
    """One with transfers has its blocks in the memory of the device there."""
    checked: list[Platform | None] = []

    class Checked:
        def __init__(self, context: KVTierContext) -> None:
            checked.append(context.platform)

        def close(self) -> None:
            checked.append(None)

    settings = TierSettings([ChosenTier("one", KVTierCapabilities(), Checked)], "model", b"secret", "write_through", 1)  # type: ignore[arg-type]
    check_tiers(settings, make_geometry("uniform", 16), 8, 0, platform)
    assert checked == [platform, None]


@pytest.mark.parametrize(
    ("plan", "host", "disk", "buffers"),
    [
        (ParallelPlan(), 8, 40, 4),
        (ParallelPlan(tp=2, pp=2), 2, 10, 1),
        (ParallelPlan(tp=4, ep=4, dp=2, dp_attention=True), 2, 20, 1),  # a folder is shared by the groups
        (ParallelPlan(dp=4), 8, 40, 4),  # each replica has its own
    ],
)
def test_ranks_share_the_sizes_of_a_tier(plan: ParallelPlan, host: float, disk: float, buffers: float) -> None:
    memory = KVTierCapabilities(in_memory=True, size="size_gib", ratio="ratio", memory=("size_gib",))
    assert divide_options(memory, {"size_gib": 8, "ratio": None}, plan) == {"size_gib": host, "ratio": None}
    assert divide_options(memory, {"size_gib": 8, "ratio": 2.0}, plan) == {"size_gib": host, "ratio": 2.0}
    files = KVTierCapabilities(persistent=True, shared=True, size="size_gib", memory=("buffer_gib",), folder="folder")
    options = {"size_gib": 40, "buffer_gib": 4, "folder": "/blocks"}
    assert divide_options(files, options, plan) == {"size_gib": disk, "buffer_gib": buffers, "folder": "/blocks"}


def test_the_blocks_of_another_rank_are_counted() -> None:
    def count(can: KVTierCapabilities, **options: float | None) -> tuple[int, int]:
        return ChosenTier("tier", can, lambda context: SimpleNamespace(), options).count_blocks(1 << 20, 100 << 20)

    memory = KVTierCapabilities(in_memory=True, size="size_gib", ratio="ratio", memory=("size_gib",))
    assert count(memory, size_gib=1, ratio=None) == (1024, 1024)
    assert count(memory, size_gib=1, ratio=1.5) == (150, 150)
    files = KVTierCapabilities(shared=True, size="size_gib", memory=("buffer_gib",))
    assert count(files, size_gib=4, buffer_gib=0.5) == (4096, 256), "a load takes half of the buffers"
    assert count(KVTierCapabilities()) == (MAX_BLOCKS, MAX_BLOCKS)


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        ("write_once", ParallelPlan(), "cache.tiers is set, but the model has a KV cache of kind write_once"),
        ("window", ParallelPlan(pp=2), "set parallel.pp to 1, or leave cache.tiers out"),
    ],
)
def test_models_with_other_groups_are_refused(kind: Any, plan: ParallelPlan, message: str) -> None:
    tensors = (CacheTensor((4,)),)
    geometry = group_layers([LayerCache(0, "tokens", tensors), LayerCache(1, kind, tensors, 8)], 4, torch.float32)
    pool = KVPool(geometry, (9,) * geometry.num_pools, torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=message):
        ControllerBuilder(TierSettings([], "", b"", "write_through", 1, plan), pool, HOST).build(0, SimpleNamespace())


def test_a_tier_that_fails_closes_the_others() -> None:
    closed = []

    def fail(context: object) -> None:
        raise ConfigurationError("full")

    first = SimpleNamespace(close=lambda: closed.append("first"))
    chosen = [ChosenTier("first", KVTierCapabilities(), lambda context: first), ChosenTier("second", KVTierCapabilities(), fail)]
    with pytest.raises(ConfigurationError, match="full"):
        ControllerBuilder(TierSettings(chosen, "", b"", "write_through", 1), make_pool("mla", 4, 9), HOST).build(0, SimpleNamespace())
    assert closed == ["first"]


@pytest.mark.parametrize("platform", [HOST, FakePlatform(PlatformContext())])
def test_buffers_are_zero(platform) -> None:
    memory = allocate(platform, 1000)
    assert memory.shape == (1000,)
    assert memory.dtype == torch.uint8
    assert not memory.any()
