"""Pages and blocks without a mover, and pieces in a thread."""

from __future__ import annotations

import threading

import numpy as np
import torch

from frame.core.interfaces.platform import PlatformContext
from frame.kv_tiers.copy_thread import CopyThread
from frame.kv_tiers.page_copies import PageCopies
from tests.kv_tiers.mover_rig import list_bytes, make_pool
from tests.plugins.fake_platform import FakePlatform


def test_a_block_has_the_widest_units_first():
    pool = make_pool("int8", 1, 9)
    copies = PageCopies(pool, torch.device("cpu"), 1 << 20)
    block = torch.zeros(copies.layout.block_bytes, dtype=torch.uint8)
    copies.store(np.array([5]), [(block,)])
    expected = sorted((tensor[5] for tensor in list_bytes(pool)), key=lambda page: -min(len(page) & -len(page), 8))
    assert torch.equal(block[: sum(map(len, expected))], torch.cat(expected))


def test_a_thread_runs_all_pieces_and_ends():
    ended, is_done, pieces = [], threading.Event(), list(range(5))

    def run_piece():
        if not pieces:
            return None
        number = pieces.pop(0)
        return lambda: (ended.append(number), is_done.set() if number == 4 else None)

    platform = FakePlatform(PlatformContext())
    thread = CopyThread(platform, platform, run_piece)
    thread.wake()
    assert is_done.wait(20)
    thread.close()
    thread.raise_error()
    assert ended == [0, 1, 2, 3, 4]
