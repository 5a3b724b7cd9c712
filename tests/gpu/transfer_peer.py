"""A tier `nixl` in a process of its own: `python -m tests.gpu.transfer_peer prefill|decode PORT`.
It carries out a JSON list from each line of its input, and writes the result as a line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch

from frame.core.interfaces.kv_tier import KVTierContext, KVTierResult, KVTransfer, TransferSettings
from frame.core.interfaces.platform import PlatformContext
from frame.plugins.kv_tiers import NixlTierOptions
from frame.plugins.kv_tiers.nixl import NixlTier
from frame.plugins.platforms.cuda import CudaPlatform
from frame.testing.kv_tier.rig import make_keys

BLOCK_BYTES, NUM_BLOCKS = 2 << 20, 512


def allocate(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


class Peer:
    """Stores and loads the blocks of a number, whose words are that number and their places."""

    def __init__(self, mode: Literal["prefill", "decode"], port: int) -> None:
        platform = CudaPlatform(PlatformContext())
        platform.activate()
        settings = TransferSettings(mode, "127.0.0.1", port, b"s" * 32, {})
        context = KVTierContext(BLOCK_BYTES, "model", allocate, transfer=settings, platform=platform)
        self._tier = NixlTier(context, NixlTierOptions(device_size_gib=NUM_BLOCKS * BLOCK_BYTES / (1 << 30)))
        self._port, self._job = port, 0

    def store(self, number: int, count: int) -> int:
        self._job += 1
        keys = make_keys(count, str(number))
        buffers = self._tier.store(self._job, keys)
        assert buffers is not None
        for place, buffer in enumerate(buffers):
            if buffer is not None:
                buffer.copy_(self._make(number, place))
        torch.cuda.synchronize()
        self._tier.note_copied(self._job)
        self._tier.open_transfer(KVTransfer(str(number), num_blocks=count), keys)
        self._tier.finish(self._job)
        return self._wait().num_blocks

    def change(self, number: int, place: int) -> int:
        """Change a byte of a block that is kept, as a reuse of its memory does."""
        self._tier._leases[str(number)].pinned[place].buffer[7] += 1
        torch.cuda.synchronize()
        return 1

    def load(self, number: int, count: int) -> tuple[int, str, bool, float]:
        """-> blocks, error, whether they are right, seconds."""
        self._job += 1
        keys = make_keys(count, str(number))
        self._tier.open_transfer(KVTransfer(str(number), "127.0.0.1", self._port, count), keys)
        began = time.monotonic()
        buffers = cast("Sequence[torch.Tensor]", self._tier.load(self._job, keys))
        result = self._wait()
        seconds = time.monotonic() - began
        is_right = all(torch.equal(buffer, self._make(number, place)) for place, buffer in enumerate(buffers[: result.num_blocks]))
        self._tier.finish(self._job)
        self._tier.close_transfer(str(number))
        return result.num_blocks, result.error, is_right, seconds

    def describe(self) -> dict[str, float]:
        self._tier.poll()
        return {**self._tier.describe_transfers(), "free": self._tier._pool.num_free}

    def _wait(self) -> KVTierResult:
        end = time.monotonic() + 30
        while not (results := self._tier.poll()):
            assert time.monotonic() < end
            time.sleep(0.0002)
        return results[0]

    def _make(self, number: int, place: int) -> torch.Tensor:
        words = torch.arange(BLOCK_BYTES // 8, device="cuda") * (place + 1) + number
        return words.view(torch.uint8)


def main() -> None:
    peer = Peer(cast("Any", sys.argv[1]), int(sys.argv[2]))
    print('= "ready"', flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("=", json.dumps(getattr(peer, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
