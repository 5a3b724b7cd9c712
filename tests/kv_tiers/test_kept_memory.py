"""The tier `host` in memory that outlives the engine: what a killed engine leaves is read by the
next one, and nothing of it is left when the server ends."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from frame.checkpoint.model_config import find_model
from frame.core.interfaces.kv_tier import KVTierContext
from frame.host import kept_memory
from frame.host.kept_memory import KeptMemory, create_memory, get_path, open_kept
from frame.kv_tiers.block_keys import BlockKeys
from frame.plugins.kv_tiers import HostTierOptions
from frame.plugins.kv_tiers.host import HostTier
from frame.plugins.kv_tiers.kept_pool import KeptPool
from frame.testing.kv_tier.rig import Rig, make_keys
from tests.disaggregation.servers import ask
from tests.entrypoints.chaos.storm import restarts
from tests.entrypoints.serving import RunningServer, wait_until
from tests.plugins.kv_tiers.tier_rig import subject

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is Linux's")
SHARED = Path("/dev/shm")


@pytest.fixture
def memory() -> Iterator[KeptMemory]:
    descriptor = create_memory()
    assert descriptor is not None
    yield KeptMemory(get_path(descriptor))
    os.close(descriptor)


class KeptRig(Rig):
    """The tier of an engine that has `memory`. The end of the object is that of an engine that is
    killed: nothing is closed."""

    def __init__(self, memory: KeptMemory, folder: Path, num_blocks: int = 8, identity: str = "model") -> None:
        self._memory = memory
        super().__init__(subject("host"), folder, num_blocks, identity=identity)

    def _create(self, target: Any, context: KVTierContext, options: object) -> HostTier:
        kept = KVTierContext(
            context.block_bytes, context.identity, context.allocate, map_kept=self._memory.map, kept_bytes=self._memory.num_bytes
        )
        assert isinstance(options, HostTierOptions)
        return HostTier(kept, options)


def test_the_next_engine_reads_what_was_stored(memory: KeptMemory, tmp_path: Path) -> None:
    keys = make_keys(6)
    first = KeptRig(memory, tmp_path)
    first.store(keys[:4])
    first.begin_store(keys[4:])  # filled, and not committed
    second = KeptRig(memory, tmp_path)
    assert second.tier.match(keys) == 4
    second.load_all(keys[:4])
    second.store(make_keys(8, "more"))  # all buffers serve, those of the unfinished store too
    third = KeptRig(memory, tmp_path)
    assert third.count_held(keys) == 0
    third.load_all(make_keys(8, "more"))
    assert first.num_bytes == 0, "the tier allocates other memory"


def test_a_block_counts_from_its_record_on(memory: KeptMemory, tmp_path: Path) -> None:
    """A buffer that is filled anew holds no block until it is committed; one that has changed is
    not served."""
    keys = make_keys(8)
    first = KeptRig(memory, tmp_path)
    first.store(keys)
    first.begin_store(make_keys(2, "more"))  # in the buffers of the least recently used ones
    second = KeptRig(memory, tmp_path)
    assert second.count_held(keys) == 6
    assert second.tier.match(keys) == 6
    memory.map(1 << 15)[-100] ^= 1  # in some block
    third = KeptRig(memory, tmp_path)
    assert third.tier.match(keys) == 6
    assert third.load(keys[:6]) < 6


def test_the_order_of_use_is_kept(memory: KeptMemory, tmp_path: Path) -> None:
    keys = make_keys(8)
    first = KeptRig(memory, tmp_path)
    first.store(keys[4:])
    first.store(keys[:4])
    listed = [key for key, _, _ in KeptPool(KVTierContext(4096, "model", first._allocate), memory.map, 8).list_blocks()]
    assert listed == [*reversed(keys[4:]), *reversed(keys[:4])]  # the first block of a prefix is the most recent
    second = KeptRig(memory, tmp_path)
    second.store(make_keys(4, "more"))
    assert second.tier.match(keys) == 4, "the blocks that were stored first are evicted first"


@pytest.mark.parametrize("change", [{"identity": "other"}, {"num_blocks": 9}])
def test_blocks_of_another_model_or_size_are_not_served(memory: KeptMemory, tmp_path: Path, change: dict[str, Any]) -> None:
    keys = make_keys(3)
    KeptRig(memory, tmp_path).store(keys)
    assert KeptRig(memory, tmp_path, **change).count_held(keys) == 0


def test_blocks_outlive_a_slight_change_of_their_number(memory: KeptMemory, tmp_path: Path) -> None:
    """That of `ratio` follows the device's free memory, which each start measures."""
    keys = make_keys(7)
    KeptRig(memory, tmp_path, num_blocks=7).store(keys)
    second = KeptRig(memory, tmp_path, num_blocks=8)
    second.load_all(keys)
    third = KeptRig(memory, tmp_path, num_blocks=6)
    held = [key for key in keys if third.count_held([key])]
    assert len(held) == 6
    third.load_all(held)
    assert KeptRig(memory, tmp_path, num_blocks=8).count_held(keys) == 6


def test_no_page_of_memory_is_pinned_twice(memory: KeptMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.plugins.kv_tiers.buffers.PIECE_BYTES", 1 << 17)
    pinned: list[torch.Tensor] = []
    context = KVTierContext(mmap.PAGESIZE + mmap.PAGESIZE // 4, "model", torch.empty, pin=pinned.append)
    KeptPool(context, memory.map, 100)._thread.join()
    assert len(pinned) > 3
    assert all(each.data_ptr() % mmap.PAGESIZE == 0 for each in pinned)
    assert sum(each.nbytes for each in pinned) == 100 * context.block_bytes


def test_nothing_is_kept_after_a_flush(memory: KeptMemory, tmp_path: Path) -> None:
    """Keys of blocks that are stored afterwards are the process's own."""
    first = KeptRig(memory, tmp_path)
    first.store(make_keys(3))
    first.tier.clear()
    first.store(make_keys(3, "later"))
    second = KeptRig(memory, tmp_path)
    assert second.count_held([*make_keys(3), *make_keys(3, "later")]) == 0
    second.store(make_keys(3))
    assert KeptRig(memory, tmp_path).count_held(make_keys(3)) == 3


def test_private_cache_keys_have_keys_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of media and adapters mean something else in the next engine."""
    tokens = np.array([1, 2, 3, 4, -5, 6, 7, 8], np.int32)
    chains = []
    for name in (b"one", b"two"):
        monkeypatch.setattr("frame.kv_tiers.block_keys._PROCESS", name)
        chain = BlockKeys(b"root", 2)
        chain.extend(tokens[:3])
        chain.extend(tokens)
        chains.append(chain.keys)
    assert chains[0][:2] == chains[1][:2]
    assert not set(chains[0][2:]) & set(chains[1])


def test_the_memory_of_another_process_is_opened_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(kept_memory.VARIABLE, raising=False)
    assert open_kept() is None
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setenv(kept_memory.VARIABLE, get_path(file.fileno()))
        with pytest.raises(OSError, match="another file"):
            open_kept()


def test_the_memory_of_another_server_is_not_opened(memory: KeptMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a process in another container may have the same number and descriptor."""
    path = get_path(memory._file)
    monkeypatch.setattr(kept_memory, "_NAME", "frame-kept-other")
    assert get_path(memory._file) != path
    with pytest.raises(OSError, match="another file"):
        KeptMemory(get_path(memory._file))


def test_another_process_sees_the_memory(memory: KeptMemory) -> None:
    memory.map(100)[7] = 42
    descriptor = memory._file
    code = "from frame.host.kept_memory import open_kept; m = open_kept(); print(m.secret.hex(), m.map(100)[7])"
    environment = {**os.environ, kept_memory.VARIABLE: get_path(descriptor)}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [memory.secret.hex(), "42"]
    assert torch.count_nonzero(torch.from_numpy(memory.map(100))) == 1


FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--page-size", "16", "--max-total-tokens", "32768")
TIER = ("--cache-tiers", "host", "--set", "plugins.options.kv_tier/host.size_gib=0.25")


def _measure(server: RunningServer, prompt: list[int]) -> tuple[float, str, int]:
    """-> seconds to the first token, the text, and the cached tokens."""
    began = time.perf_counter()
    value = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0}, timeout=120).json()
    details = value["usage"]["prompt_tokens_details"]
    return time.perf_counter() - began, value["choices"][0]["text"], details["cached_tokens"]


@pytest.mark.slow
def test_an_engine_that_was_killed_is_warm() -> None:
    """The first token of a prompt of 4096 tokens comes in a third of the time; nothing is left
    after SIGKILL of the server."""
    before = set(SHARED.iterdir())
    prompts = [[7 + (number * 31 + index * index * 3 + index * number) % 900 for index in range(4096)] for number in range(2)]
    with RunningServer(Path(find_model("frame-tiny")), *FLAGS, *TIER, fake=False) as server:
        cold = [_measure(server, prompt) for prompt in prompts]
        wait_until(lambda: server.get("/server_info")["tiers"][0]["stored_tokens"] >= 8192)
        server.children()["scheduler"].kill()
        wait_until(lambda: restarts(server) == 1)
        assert _measure(server, [7, 8, 9])[2] == 0
        warm = [_measure(server, prompt) for prompt in prompts]
        assert [text for _, text, _ in warm] == [text for _, text, _ in cold]
        assert all(cached == 4095 for _, _, cached in warm)
        assert min(seconds for seconds, _, _ in warm) <= min(seconds for seconds, _, _ in cold) / 3
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    assert set(SHARED.iterdir()) <= before


@pytest.mark.soak
def test_recovered_texts_are_equal_in_bfloat16() -> None:
    """Three kills under 16 streams: requests read the keys and values of their prompt and of their
    output, which are not computed otherwise a second time."""
    flags = [*(flag if flag != "float32" else "bfloat16" for flag in FLAGS), *TIER, "--min-load-tokens", "4"]
    bodies = [
        {
            "prompt": [7 + (n * 31 + i * i * 3 + i * n) % 900 for i in range(60 + 10 * n)],
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
        }
        for n in range(16)
    ]
    for body in bodies:
        body |= {"stream": True, "return_token_ids": True}
    with RunningServer(Path(find_model("frame-tiny")), *flags, fake=False) as server, ThreadPoolExecutor(16) as pool:
        expected = list(pool.map(partial(ask, server), bodies))
        server.post("/flush_cache", {})
    with RunningServer(Path(find_model("frame-tiny")), *flags, fake=False) as server, ThreadPoolExecutor(16) as pool:
        running = [pool.submit(ask, server, body) for body in bodies]
        for number in range(3):
            done = server.metric("frame_generation_tokens_total")
            wait_until(lambda done=done: server.metric("frame_generation_tokens_total") >= done + 500, 120.0)
            server.children()["scheduler"].kill()
            wait_until(lambda number=number: restarts(server) == number + 1)
            wait_until(server.ready, 60.0)
        results = [each.result() for each in running]
        assert server.get("/server_info")["tiers"][0]["loaded_tokens"] > 1000
    assert sum(one[1] == other[1] for one, other in zip(results, expected, strict=True)) >= 15
