"""Blocks from GPU to GPU: two processes on one card, and on two cards of one host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.checkpoint.model_config import find_model
from tests.disaggregation.servers import SECRET, DividingRouter, ask, make_body
from tests.entrypoints.serving import RunningServer, free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("nixl_cu13")
ROOT = Path(__file__).parents[2]
COUNT, NUM_BLOCKS, BLOCK_BYTES = 256, 512, 2 << 20  # blocks of a prompt; see transfer_peer
MIN_RATE = 20e9  # bytes a second of acquire, read and check; a copy from page-locked memory has 55e9


def see(card: int) -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[card] if visible else str(card)}


class Peer:
    """A process of `transfer_peer`."""

    def __init__(self, mode: str, port: int, card: int) -> None:
        command = [sys.executable, "-m", "tests.gpu.transfer_peer", mode, str(port)]
        env = {**os.environ, **see(card), "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)

    def ask(self, *words: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("= "):
            assert line, "the process has ended"
        return json.loads(line[2:])


@pytest.fixture(scope="module", params=[0, 1], ids=["one card", "two cards"])
def card(request: pytest.FixtureRequest) -> int:
    """Of the decode server."""
    if request.param >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    return int(request.param)


@pytest.fixture
def peers(card: int) -> Iterator[tuple[Peer, Peer]]:
    port = free_port()
    both = Peer("prefill", port, 0), Peer("decode", port, card)
    try:
        assert [peer.read() for peer in both] == ["ready"] * 2
        yield both
    finally:
        for peer in both:
            peer.process.kill()
            peer.process.wait()


def test_blocks_go_from_gpu_to_gpu(peers: tuple[Peer, Peer]) -> None:
    prefill, decode = peers
    rates = []
    for number in range(4):
        assert prefill.ask("store", number, COUNT) == COUNT
        count, error, is_right, seconds = decode.ask("load", number, COUNT)
        assert (count, error, is_right) == (COUNT, "", True)
        rates.append(COUNT * BLOCK_BYTES / seconds)
    print(f"GB/s {[round(rate / 1e9, 1) for rate in rates]} {decode.ask('describe')}")
    assert max(rates) >= MIN_RATE


def test_a_block_that_changes_is_not_served(peers: tuple[Peer, Peer]) -> None:
    """As it does when a lease ends while its blocks are read and their memory is used again."""
    prefill, decode = peers
    prefill.ask("store", 1, 8)
    prefill.ask("change", 1, 5)
    count, error, is_right, _ = decode.ask("load", 1, 8)
    assert (count, is_right) == (5, True)
    assert "has changed" in error


def test_a_peer_that_is_gone(peers: tuple[Peer, Peer]) -> None:
    """Its blocks fail, and the buffers of reads that had begun are not used for a while."""
    prefill, decode = peers
    prefill.ask("store", 1, 8)
    assert decode.ask("load", 1, 8)[0] == 8
    prefill.ask("store", 2, COUNT)
    prefill.process.kill()
    prefill.process.wait()
    count, error, _, _ = decode.ask("load", 2, COUNT)
    assert count == 0
    assert error
    assert decode.ask("describe")["free"] in (NUM_BLOCKS, NUM_BLOCKS - COUNT)


def test_divided_requests_are_those_of_one_server(card: int) -> None:
    flags = ("--dtype", "float32", "--page-size", "16", "--max-model-len", "512", "--max-total-tokens", "16384")
    size = "plugins.options.kv_tier/nixl.device_size_gib=0.5"
    parts = ("--disaggregation-port", str(free_port()), "--min-load-tokens", "16", "--set", size)
    modes = {"whole": (0, ()), "prefill": (0, (*parts, "--disaggregation-mode", "prefill"))}
    modes["decode"] = card, (*parts, "--disaggregation-mode", "decode")

    def start(mode: str) -> RunningServer:
        place, more = modes[mode]
        return RunningServer(Path(find_model("frame-tiny")), *flags, *more, fake=False, env={**SECRET, **see(place)})

    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        started = [pool.submit(start, mode) for mode in modes]
        whole, prefill, decode = (stack.enter_context(each.result()) for each in started)
        router = stack.enter_context(DividingRouter([prefill.url], [decode.url]))
        for number in range(12):
            body = make_body(number, temperature=0, max_tokens=8)
            assert ask(router, body)[:3] == ask(whole, body)[:3]
        assert decode.metric("frame_kv_transfer_bytes_total") > 0
        assert decode.metric("frame_kv_transfer_failures_total") == 0
