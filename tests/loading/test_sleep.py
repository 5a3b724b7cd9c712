"""Memory that is released while an engine sleeps, and the tokens after the wake."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from frame import Engine, SamplingParams
from frame.core.interfaces.platform import HOST, PlatformContext
from frame.core.interfaces.runner import MemoryOrder
from frame.entrypoints.offline.engine import EngineError
from frame.host.host_memory import drop_pages
from frame.loading.sleep import SleepingRunner, tag_memory
from frame.plugins.platforms.cpu import CpuPlatform
from frame.testing.checkpoints import make_checkpoint
from tests.core.test_engine import Counting
from tests.entrypoints.serving import wait_until

KEYS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_total_tokens": 8192, "threads": 1, "page_size": 4}
PROMPTS = [[start, *range(20, 360)] for start in range(16)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def resident() -> float:
    """MiB of this process."""
    return float(psutil.Process().memory_info().rss / 2**20)


def run(engine: Engine) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def test_whole_pages_are_dropped() -> None:
    memory = np.ones(64 * mmap.PAGESIZE, np.uint8)
    start = memory.ctypes.data
    dropped = drop_pages(start + 1, memory.nbytes - 2)
    assert memory.nbytes - 2 * mmap.PAGESIZE <= dropped < memory.nbytes
    first = -(start + 1) % mmap.PAGESIZE + 1
    assert memory[:first].all() and not memory[first : first + dropped].any() and memory[first + dropped :].all()
    assert drop_pages(start + 1, 100) == 0
    with pytest.raises(OSError, match="madvise"):
        drop_pages(1 << 60, mmap.PAGESIZE)


def test_pages_of_a_file_keep_their_values(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 64)
    mapped = np.memmap(tmp_path / "file", np.uint8, "r")
    total = int(mapped.sum())
    assert drop_pages(mapped.ctypes.data, mapped.nbytes) == mapped.nbytes
    assert int(mapped.sum()) == total


def test_a_rank_carries_out_orders() -> None:
    platform = CpuPlatform(PlatformContext())
    weights, pool = torch.ones(1 << 20), torch.ones(1 << 20)
    shared = weights[: 1 << 10].view(32, 32).t()  # not one piece of memory
    tensors = {"weights": lambda: [weights, weights, shared], "kv_cache": lambda: [pool]}
    runner = SleepingRunner(Counting(), platform, tensors)
    beats: list[None] = []
    assert runner.change_memory(MemoryOrder(), lambda: beats.append(None)) == ""
    assert runner.change_memory(MemoryOrder(released=["weights", "kv_cache"]), lambda: beats.append(None)) == ""
    assert len(beats) == 2
    assert weights.all() and float(pool.sum()) < 3 * mmap.PAGESIZE
    assert runner.change_memory(MemoryOrder(mapped=["weights", "kv_cache"]), int) == ""
    assert runner.change_memory(MemoryOrder(released=["weights"], drops_weights=True), int) == ""
    assert float(weights.sum()) < 3 * mmap.PAGESIZE
    assert "the memory could not be changed: KeyError" in runner.change_memory(MemoryOrder(released=["graphs"]), int)
    with tag_memory(True, HOST, "weights"), tag_memory(False, platform, "weights"), tag_memory(True, platform, "kv_cache"):
        assert torch.ones(1)


@pytest.mark.slow
def test_cycles_release_memory_and_change_no_token(tmp_path: Path) -> None:
    """Ten cycles: memory falls each time, and does not grow."""
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    with Engine(str(folder), sleep_mode="wait", **KEYS) as engine:
        expected = run(engine)
        awake: list[float] = []
        for cycle in range(10):
            level = 1 + cycle % 2
            before = resident()
            engine.sleep(level)
            assert before - resident() > 1.0
            assert engine.control("server_info")["released"] == ["weights", "kv_cache"]
            if level == 2:
                engine.wake(["weights"])
                with pytest.raises(EngineError, match="nothing to wake"):
                    engine.wake(["weights"])
                engine.update_weights(folder, f"cycle-{cycle}")
            engine.wake()
            assert run(engine) == expected
            awake.append(resident())
        assert awake[-1] - awake[1] < 3.0
        engine.pause()
        with pytest.raises(EngineError, match="nothing to wake"):
            engine.wake()
        engine.resume()
        with pytest.raises(EngineError, match="is not paused"):
            engine.resume()
        engine.control("check_integrity")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"])
def test_other_models_wake_with_their_weights(tmp_path: Path, architecture: str) -> None:
    """After level 2 only an update brings the weights, and all tensors that are no weights stay."""
    folder = make_checkpoint(architecture, tmp_path)
    keys = KEYS | {"page_size": 16}
    with Engine(str(folder), sleep_mode="wait", **keys) as engine:
        expected = run(engine)
        for _ in range(2):
            engine.sleep(2)
            engine.wake()
            engine.update_weights(folder)
            assert run(engine) == expected


@pytest.mark.slow
def test_two_ranks_sleep(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    with Engine(str(folder), tp=2, sleep_mode="wait", **KEYS) as engine:
        expected = run(engine)
        engine.pause("retract")
        engine.resume()
        for level in (1, 2):
            engine.sleep(level)
            engine.wake()
            if level == 2:
                engine.update_weights(folder)
            assert run(engine) == expected


def test_an_engine_that_is_restarted_is_paused_and_asleep_again(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    with Engine(str(folder), sleep_mode="wait", **KEYS) as engine:
        expected = run(engine)
        engine.pause()
        engine.sleep(tags=["kv_cache"])
        engine._session.collector.fail_jobs("the engine crashed")
        wait_until(lambda: engine.control("server_info")["released"] == ["kv_cache"])
        assert engine.control("server_info")["paused"]
        engine.wake()
        engine.resume()
        assert run(engine) == expected
