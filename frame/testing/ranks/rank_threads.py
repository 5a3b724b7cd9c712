"""Groups whose ranks are threads of one process, for the suite of collectives."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from frame.core.interfaces.collective import Collective, CollectiveCapabilities, CollectiveContext
from frame.entrypoints.configuration.hardware_probe import probe
from frame.plugins.devices import open_platform
from frame.plugins.loader import load_registry
from frame.testing.conformance import SkipCheck, Subject
from frame.testing.tensors import require_form

PATIENCE = 60.0  # seconds for all ranks of a check
_RANKS = 3

Act = Callable[[Collective, torch.device], Any]


def run_ranks(subject: Subject, act: Act, size: int | None = None, address: str | None = None, *, deterministic: bool = False) -> list[Any]:
    """Make a group of `size` ranks and call `act` on each. -> the results by rank. Raises the first
    rank's error, or AssertionError if a rank hangs."""
    size = count_ranks(subject) if size is None else size
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    done = threading.Barrier(size)

    def run(rank: int, meeting: str) -> None:
        platform = open_platform(f"{get_device(subject)}:{rank}")
        try:
            platform.activate()
            context = CollectiveContext(rank, size, meeting, platform, timeout=20.0, deterministic=deterministic)
            group = subject.target(context, subject.options)
            results[rank] = act(group, platform.device)
            done.wait(PATIENCE)
            group.close()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            done.abort()
            errors.append(error)

    with tempfile.TemporaryDirectory() as folder:
        meeting = address or f"file://{Path(folder) / 'ranks'}"
        has_ended = run_threads(size, lambda rank: run(rank, meeting), PATIENCE)
        first = next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), None)
        if first is not None:
            raise first
        assert has_ended, "a rank hangs"
    return results


def run_threads(size: int, work: Callable[[int], None], seconds: float) -> bool:
    """Call `work` for each rank in a thread of its own; whether all of them ended in time."""
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def get_device(subject: Subject) -> str:
    return subject.setting.device.partition(":")[0]


def count_ranks(subject: Subject) -> int:
    can = subject.record.capabilities
    maximum = can.max_size if isinstance(can, CollectiveCapabilities) else None
    return min(_RANKS, maximum or _RANKS, count_devices(get_device(subject)) or _RANKS)


def require_several(subject: Subject) -> int:
    size = count_ranks(subject)
    if size == 1:
        raise SkipCheck("there is one rank")
    return size


def require_same(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    require_form(result, expected, what, expected.dtype)
    assert torch.equal(result.cpu(), expected), f"{what} is wrong"


def make_tensor(rank: int, dtype: torch.dtype = torch.float32, rows: int = 6) -> torch.Tensor:
    return torch.arange(rows * 4).view(rows, 4).to(dtype) % 7 + 10 * (rank + 1)


def count_devices(name: str) -> int:
    """The number of devices of a platform on this machine; 0: the host, which any number of ranks
    shares."""
    record = load_registry().get("platform", name)
    return len(probe([record]).of(name))
