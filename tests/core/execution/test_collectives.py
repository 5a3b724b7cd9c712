"""Groups of ranks: a group of one does nothing; gloo adds, gathers and broadcasts between threads
and gives up on absentees."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from frame.core.execution.collectives import LocalGroup, TorchGroup, connect

CPU = torch.device("cpu")


def test_one_rank_is_a_local_group(tmp_path: Path) -> None:
    group = connect(0, 1, tmp_path, CPU)
    assert isinstance(group, LocalGroup)
    x = torch.randn(2, 3)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.broadcast(x) is x
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_ranks(tmp_path: Path, dtype: torch.dtype) -> None:
    done = threading.Barrier(3, timeout=30)

    def act(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        group = connect(rank, 3, tmp_path, CPU, timeout=30)
        assert isinstance(group, TorchGroup)
        x = torch.full((2, 4), float(rank + 1), dtype=dtype)
        results = (
            group.all_reduce(x.t().clone()),
            group.all_gather(x),
            group.all_gather(x, 0),
            group.broadcast(torch.full((3,), float(rank), dtype=dtype), 2),
        )
        done.wait()
        group.close()
        return results

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(act, range(3)))
    for total, wide, tall, sent in ranks:
        assert torch.equal(total, torch.full((4, 2), 6.0, dtype=dtype))
        assert wide[0].tolist() == [1.0] * 4 + [2.0] * 4 + [3.0] * 4
        assert tall[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
        assert sent.tolist() == [2.0] * 3


def test_a_rank_that_stays_away_ends_the_wait(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        connect(0, 2, tmp_path, CPU, timeout=0.5)


RANK = """
import os, sys, torch
from pathlib import Path
from frame.core.execution.collectives import connect
torch.set_num_threads(1)
group = connect(1, 2, Path(sys.argv[1]), torch.device("cpu"), timeout=30)
group.all_reduce(torch.ones(1000))
if sys.argv[2] == "dies":
    os._exit(9)
if sys.argv[2] == "closes":
    group.close()
"""


@pytest.mark.parametrize("ending", ["closes", "forgets", "dies"])
def test_the_end_of_a_rank(tmp_path: Path, ending: str) -> None:
    """A process ends cleanly with and without `close` (a group that outlives the interpreter would
    abort it); when a rank dies, the others' next call raises instead of waiting for the timeout."""
    root = Path(__file__).resolve().parents[3]
    other = subprocess.Popen([sys.executable, "-c", RANK, tmp_path, ending], cwd=root, stderr=subprocess.PIPE)
    group = connect(0, 2, tmp_path, CPU, timeout=30)
    assert group.all_reduce(torch.ones(1000))[0] == 2
    _, errors = other.communicate(timeout=30)
    assert other.returncode == (9 if ending == "dies" else 0), errors.decode()
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        group.all_reduce(torch.ones(1))
    assert time.monotonic() - start < 10
    group.close()
