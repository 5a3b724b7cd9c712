"""Pages that fit in memory, and the error if too few fit."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
import torch

from frame.core.interfaces.build import Limits
from frame.core.interfaces.cache_groups import CacheTensor, Capacity, LayerCache
from frame.core.interfaces.platform import HOST
from frame.core.kv_cache.geometry import group_layers
from frame.host.host_memory import measure_host_memory
from frame.loading.capacity import CPU_SHARE, GIB, CapacityError, Memory, activation_bytes, measure, plan_pages, plan_pools
from tests.core.fake_model import fake_model_config

LIMITS = Limits(max_running_requests=4, max_tokens_per_step=64, max_context=4096, page_size=16)
KEYS = CacheTensor((8, 128)), CacheTensor((8, 128))
GEOMETRY = group_layers((LayerCache(layer, "tokens", KEYS) for layer in range(32)), 16, torch.bfloat16)  # 128 KiB a token
EACH = 32 * 2 * 8 * 256
MIB = 1024**2


def gpu(total=80, weights=16, activations=2):
    return Memory(total * GIB, (total - weights) * GIB, weights * GIB, activations * GIB)


def plan(memory, fraction=0.9, tokens=None, is_cpu=False):
    return plan_pages(GEOMETRY, LIMITS, replace(memory, is_shared=is_cpu), fraction, tokens)


def test_bytes_of_a_token():
    assert GEOMETRY.bytes_per_token == EACH == 128 * 1024


def test_a_gpu_uses_the_memory_fraction():
    pages = plan(gpu())
    left = int(80 * GIB * 0.9) - 18 * GIB - 768 * 1024**2
    assert pages == left // EACH // 16 + 1
    assert Capacity(pages, 16, EACH).max_total_tokens == (pages - 1) * 16
    assert plan(gpu(), 0.8) < pages


def test_max_total_tokens_is_used_and_checked():
    assert plan(gpu(), 0.1, 4096) == 4096 // 16 + 1
    with pytest.raises(CapacityError, match=r"at least 9999999 tokens are needed; try cache.max_total_tokens: \d+$") as error:
        plan(gpu(), 0.9, 9_999_999)
    fitting = int(str(error.value).rsplit(" ", 1)[1])
    assert plan(gpu(), 0.9, fitting) == fitting // 16 + 1


def test_too_little_memory_shows_the_arithmetic_and_a_remedy():
    with pytest.raises(CapacityError) as error:
        plan(gpu(), 0.2)
    text = str(error.value)
    assert "0.2 of 80.00 GiB - 16.00 GiB in use (weights, other processes) - 2.75 GiB activations = -2.75 GiB" in text
    assert text.count("\n") == 0
    fraction = float(text.rsplit("cache.mem_fraction: ", 1)[1])
    assert plan(gpu(), fraction) > 1
    with pytest.raises(CapacityError, match=r"try parallel\.tp"):
        plan(gpu(weights=79), 0.9)


def test_a_cpu_uses_a_small_share_and_at_most_what_requests_need():
    memory = Memory(64 * GIB, 40 * GIB, 1 * GIB, 0)
    wanted = 65_536  # more than 4 requests of 4,096
    assert plan(memory, 0.5, is_cpu=True) == wanted // 16 + 1
    small = Memory(8 * GIB, 8 * GIB, 1 * GIB, 0)
    assert plan(small, 0.9, is_cpu=True) == int(8 * GIB * CPU_SHARE) // EACH // 16 + 1


def test_measure_this_machine():
    memory = measure(HOST, 10, 20, ranks=2)
    assert 0 < memory.free <= memory.total
    assert (memory.weights, memory.activations) == (10, 20)
    assert activation_bytes(fake_model_config(), LIMITS, torch.float32) > 0


def group(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_memory_in_use_within_a_control_group_counts(tmp_path):
    group(tmp_path, {"memory.max": "max\n"})
    own = tmp_path / "box"
    group(own, {"memory.max": f"{8 * MIB}\n", "memory.current": f"{6 * MIB}\n", "memory.stat": f"anon 9\ninactive_file {MIB}\n"})
    (tmp_path / "self").write_text("0::/box\n")
    assert measure_host_memory(tmp_path, tmp_path / "self") == (8 * MIB, 3 * MIB)


def test_the_tightest_of_the_groups_above_counts(tmp_path):
    group(tmp_path / "a", {"memory.max": f"{4 * MIB}", "memory.current": f"{5 * MIB}"})
    group(tmp_path / "a" / "b", {"memory.max": f"{6 * MIB}", "memory.current": f"{MIB}"})
    (tmp_path / "self").write_text("0::/a/b\n")
    assert measure_host_memory(tmp_path, tmp_path / "self") == (4 * MIB, 0)


def test_control_groups_of_version_1(tmp_path):
    files = {
        "memory.limit_in_bytes": f"{8 * MIB}", "memory.usage_in_bytes": f"{4 * MIB}", "memory.stat": f"total_inactive_file {2 * MIB}",
    }  # fmt: skip
    group(tmp_path / "memory", files)
    (tmp_path / "self").write_text("3:cpu,cpuacct:/x\n4:memory:/docker/12ab\n0::/\n")  # a path that the container does not see
    assert measure_host_memory(tmp_path, tmp_path / "self") == (8 * MIB, 6 * MIB)


def test_without_control_groups_the_machine_counts(tmp_path):
    total, available = measure_host_memory(tmp_path, tmp_path / "none")
    assert 0 < available <= total == psutil.virtual_memory().total


WINDOW_LAYERS = [LayerCache(layer, "window", KEYS, 256) for layer in range(8, 32)]
STATE_LAYERS = [LayerCache(layer, "snapshot", (CacheTensor((64, 128, 128), torch.float32),)) for layer in range(8, 32)]
TOKEN_LAYERS = [LayerCache(layer, "tokens", KEYS) for layer in range(8)]


def count_bytes(geometry, pages):
    pools = plan_pools(geometry, LIMITS, (pages - 1) * 16)
    held = [pool.num_pages * max(1, pool.page_size) * geometry.count_bytes(index) for index, pool in enumerate(pools, 1)]
    return (pages - 1) * 16 * geometry.bytes_per_token + sum(held), pools


@pytest.mark.parametrize("layers", [WINDOW_LAYERS, STATE_LAYERS], ids=["window", "states"])
def test_cache_groups_share_the_memory(layers):
    geometry = group_layers([*TOKEN_LAYERS, *layers], 16, torch.bfloat16)
    limits = replace(LIMITS, max_running_requests=512)
    pages = plan_pages(geometry, LIMITS, gpu(), 0.9, None)
    left = int(80 * GIB * 0.9) - 18 * GIB - 768 * 1024**2
    used, pools = count_bytes(geometry, pages)
    assert left - 16 * geometry.bytes_per_token <= used <= left
    assert pages > 3 * plan(gpu())  # a quarter of the layers stores every token
    if layers is WINDOW_LAYERS:
        assert pools[0].num_pages * 16 >= LIMITS.max_running_requests * 256
    else:
        assert pools[0].num_pages == 2 * LIMITS.max_running_requests + 1
        many = plan_pages(geometry, limits, gpu(), 0.9, None)
        states = plan_pools(geometry, limits, (many - 1) * 16)[0].num_pages
        assert 0.3 < states * geometry.count_bytes(1) / left < 0.36


def test_max_total_tokens_and_too_little_memory_with_cache_groups():
    geometry = group_layers([*TOKEN_LAYERS, *WINDOW_LAYERS], 16, torch.bfloat16)
    assert plan_pages(geometry, LIMITS, gpu(), 0.1, 4096) == 4096 // 16 + 1
    assert plan_pages(geometry, LIMITS, gpu(), 0.1, 15) == plan(gpu(), 0.1, 15) == 2  # less than a page is one
    with pytest.raises(CapacityError, match="does not fit.*mem_fraction"):
        plan_pages(geometry, LIMITS, gpu(), 0.2345, None)
    with pytest.raises(CapacityError, match="max_total_tokens"):
        plan_pages(geometry, LIMITS, gpu(), 0.9, 10**7)


def test_layers_without_tokens_bound_the_tokens_by_the_requests():
    geometry = group_layers(WINDOW_LAYERS, 16, torch.bfloat16)
    assert geometry.bytes_per_token == 0
    assert plan_pages(geometry, LIMITS, gpu(), 0.9, None) == 65_536 // 16 + 1
