"""The tier `nixl` of prefill servers in processes of their own, which tests stop and kill:
`python -m tests.plugins.kv_tiers.prefill_peers PORT` starts one for each line of its input, and
writes its process id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Literal

import torch

from frame.core.interfaces.kv_tier import KVTierContext, KVTransfer, TransferSettings
from frame.plugins.kv_tiers import NixlTierOptions
from frame.plugins.kv_tiers.nixl import NixlTier
from frame.testing.kv_tier.rig import make_block, make_keys

BLOCK_BYTES, NUM_BLOCKS = 1 << 20, 8
LEASES = ("one", "two")
KEYS = make_keys(2)  # of each lease


def open_tier(mode: Literal["prefill", "decode"], port: int) -> NixlTier:
    transfer = TransferSettings(mode, "127.0.0.1", port, b"s" * 32, {})
    context = KVTierContext(BLOCK_BYTES, "model", lambda size: torch.zeros(size, dtype=torch.uint8), transfer=transfer)
    return NixlTier(context, NixlTierOptions(size_gib=(NUM_BLOCKS + 0.5) * BLOCK_BYTES / (1 << 30)))


class PrefillPeers:
    """Starts servers at a port, one after the other; each keeps the blocks of `KEYS` for
    `LEASES`."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "tests.plugins.kv_tiers.prefill_peers", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._started: list[int] = []
        self.port = port

    def start(self) -> int:
        """-> the process id of a server that has stored its blocks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("start", file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        while line and not line.startswith("pid "):
            line = self._process.stdout.readline()
        self._started.append(int(line.split()[1]))
        return self._started[-1]

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self._started.remove(pid)

    def __enter__(self) -> PrefillPeers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pid in [*self._started]:
            self.kill(pid)
        self._process.communicate()


def serve(port: int) -> None:
    tier = open_tier("prefill", port)
    while tier._pool.num_free < NUM_BLOCKS:
        time.sleep(0.001)
    buffers = tier.store(1, KEYS)
    assert buffers is not None
    for key, buffer in zip(KEYS, buffers, strict=True):
        assert buffer is not None
        buffer.copy_(torch.from_numpy(make_block(key, BLOCK_BYTES)))
    for lease in LEASES:
        tier.open_transfer(KVTransfer(lease, num_blocks=len(KEYS)), KEYS)
    tier.finish(1)
    while not tier.poll():
        time.sleep(0.001)
    print("pid", os.getpid(), flush=True)
    while True:
        tier.poll()
        time.sleep(0.05)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    for _ in sys.stdin:
        if not os.fork():
            serve(int(sys.argv[1]))


if __name__ == "__main__":
    main()
