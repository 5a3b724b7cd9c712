"""What processes hold, and what is said of it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.processes.resource_monitor import ResourceMonitor, Usage, UsageLimits, read_usage, start_monitor

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")


@LINUX
def test_what_this_process_holds() -> None:
    before = read_usage(os.getpid())
    assert before is not None
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    kept, file = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), os.open(os.devnull, os.O_RDONLY)
    kept.write(b"x" * len(kept))  # memory of its own: an allocator may have as much at hand
    after = read_usage(os.getpid())
    assert after is not None
    assert after.memory - before.memory > len(kept) // 2
    assert (after.threads, after.files) == (before.threads + 1, before.files + 1)
    kept.close()
    os.close(file)
    stop.set()
    thread.join()


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert read_usage(process.pid) is None


def test_swapped_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "7/fd").mkdir(parents=True)
    (tmp_path / "7/status").write_text("RssAnon:\t10 kB\nRssFile:\t99 kB\nRssShmem:\t5 kB\nVmSwap:\t100 kB\nThreads:\t2\n")
    assert read_usage(7, tmp_path) == Usage(115 * 1024, 2, 0)


class Watched:
    def __init__(self, limits: UsageLimits) -> None:
        self.usage: Usage | None = Usage(memory=10**9, threads=10, files=10)
        self.lines: list[str] = []
        self.watch = ResourceMonitor(limits, self.lines.append, lambda pid: self.usage)


def test_a_limit_is_told_of_once_before_it_is_passed() -> None:
    watched = Watched(UsageLimits(memory=2 * 10**9))
    look = watched.watch.check_process
    assert look("engine", 1) is None
    assert watched.lines == []
    watched.usage = Usage(memory=17 * 10**8)
    assert [look("engine", 1), look("engine", 1)] == [None, None]
    assert watched.lines == ["the engine process holds 1.70 GB of memory, 85% of server.max_process_memory (2.00 GB)"]
    assert look("engine", 2) is None  # its successor
    assert look("detokenizer", 3) is None
    assert len(watched.lines) == 3
    watched.usage = Usage(memory=21 * 10**8)
    assert look("engine", 2) == "the engine process holds 2.10 GB of memory, more than server.max_process_memory (2.00 GB)"
    assert watched.watch.usage["engine"].memory == 21 * 10**8
    watched.usage = None
    assert look("engine", 2) is None
    assert "engine" not in watched.watch.usage


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (UsageLimits(threads=9), "10 threads, more than server.max_process_threads (9)"),
        (UsageLimits(files=9), "10 open files, more than server.max_process_files (9)"),
        (UsageLimits(device_memory=6 * 10**8), "700 MB of device memory, more than server.max_device_memory (600 MB)"),
        (UsageLimits(memory=10**8, threads=9), "1.00 GB of memory, more than server.max_process_memory (100 MB)"),
    ],
)
def test_every_limit_has_its_words(limits: UsageLimits, sentence: str) -> None:
    watched = Watched(limits)
    assert watched.usage is not None
    assert watched.watch.check_process("engine", 1, 7 * 10**8) == f"the engine process holds {sentence}"
    assert watched.watch.usage == {"engine": replace(watched.usage, device_memory=7 * 10**8)}


@LINUX
def test_a_limit_below_what_the_start_needs_is_refused() -> None:
    kept = b"x" * (64 << 20)
    with pytest.raises(ConfigurationError, match="more than server.max_process_memory .67 MB., before it has served any request"):
        start_monitor({"engine": os.getpid()}, ServerSection(max_process_memory=len(kept)))
    assert start_monitor({"engine": os.getpid()}, ServerSection()).usage["engine"].memory > len(kept)


def test_an_excess_of_the_main_process_is_reported_once() -> None:
    watched = Watched(UsageLimits(memory=10**9))
    watched.usage = Usage(memory=9 * 10**8)
    watched.watch.check_main_process()
    watched.usage = Usage(memory=11 * 10**8)
    for _ in range(2):
        watched.watch.check_main_process()
    near, over = watched.lines
    assert near == "the main process holds 900 MB of memory, 90% of server.max_process_memory (1.00 GB)"
    assert over.startswith("the main process holds 1.10 GB of memory, more than server.max_process_memory (1.00 GB); the main process is")
