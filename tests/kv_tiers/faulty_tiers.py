"""Tiers that fail as a file says: its first word is the fault, its second one the seconds that a
slow load takes. Used by the servers of the fault runs, and `FaultFile` by the runs."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

from frame.core.interfaces.kv_tier import KVTierContext
from frame.plugins.kv_tiers.disk import DiskTier
from frame.plugins.kv_tiers.host import HostTier
from frame.plugins.kv_tiers.nixl import NixlTier
from frame.plugins.kv_tiers.threaded_tier import BlockError

VARIABLE = "FAULT_FILE"  # of the environment
LOADS = ("load", "short", "disk_flip", "slow")
CODES = {"store": errno.EIO, "full": errno.ENOSPC, "read_only": errno.EROFS}


class FaultFile:
    """The file, as a run writes it."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._seconds = path, seconds

    def set_fault(self, name: str) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(f"{name} {self._seconds}", encoding="utf-8")
        new.replace(self._path)

    def count_faults(self) -> int:
        """Blocks that have failed."""
        counts = self._path.with_suffix(".count")
        return counts.stat().st_size if counts.exists() else 0


def read_fault() -> tuple[str, float]:
    path = os.environ.get(VARIABLE)
    name, _, seconds = (Path(path).read_text(encoding="utf-8") if path else "").partition(" ")
    return name, float(seconds or 0)


def count_fault() -> None:
    """Take note of a block that fails."""
    with Path(os.environ[VARIABLE]).with_suffix(".count").open("ab") as file:
        file.write(b".")


class FaultyDisk(DiskTier):
    def _move_block(self, job: Any, index: int) -> None:
        name, seconds = read_fault()
        path = self._files._locate(job.keys[index])
        if job.is_store and name in CODES:
            count_fault()
            raise BlockError(f"cannot write: {os.strerror(CODES[name])}") from OSError(CODES[name], "")
        if not job.is_store and name in LOADS and path.exists():
            count_fault()
            if name == "load":
                path.unlink()
            elif name == "short":
                os.truncate(path, path.stat().st_size // 2)
            elif name == "disk_flip":
                content = bytearray(path.read_bytes())
                content[-7] ^= 16
                path.write_bytes(content)
            elif name == "slow":
                time.sleep(seconds)
        super()._move_block(job, index)


class FaultyHost(HostTier):
    def _move_block(self, job: Any, index: int) -> None:
        if read_fault()[0] == "host_flip" and not job.is_store and job.blocks[index] is not None:
            count_fault()
            job.buffers[index].numpy()[-7] ^= 16
        super()._move_block(job, index)


class FaultyNixl(NixlTier):
    def __init__(self, context: KVTierContext, options: Any = None) -> None:
        super().__init__(context, options)
        read = self._agent.read

        def flip(agent: Any, local: Any, remote: Any, is_closed: Any) -> None:
            read(agent, local, remote, is_closed)
            name, seconds = read_fault()
            if name in ("slow", "wire_flip"):
                count_fault()
            if name == "slow":
                time.sleep(seconds)
            if name == "wire_flip":
                for job in self._jobs.values():
                    for buffer in job.buffers:
                        if buffer is not None and buffer.data_ptr() in local[:, 0]:
                            buffer.numpy()[-7] ^= 16

        self._agent.read = flip  # type: ignore[method-assign]
