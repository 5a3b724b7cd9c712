"""`NixlAgent`: NIXL's library behind the few calls that the tier `nixl` needs: register memory,
know a peer, read from its memory. Must not know a key or a block.

The package is `nixl-cu13`; the package `nixl` brings two versions of CUDA. UCX moves the bytes:
between GPUs of one host by CUDA IPC, between hosts by RDMA, between host memories without a GPU.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from frame.core.errors import ConfigurationError
from frame.plugins.kv_tiers.threaded_tier import BlockError

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.0001  # between two looks at a transfer


class UnfinishedReadError(BlockError):
    """A read was given up, and may still write to its memory: see `NixlAgent.has_ended`."""

    def __init__(self, peer: str, transfer: Any) -> None:
        super().__init__("NIXL has not read from the prefill server in time")
        self.peer, self.transfer = peer, transfer


class NixlAgent:
    """This process as NIXL knows it. Threads call its methods at the same time. `device`: the
    number of the GPU whose memory it moves; 0 also for host memory."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: whose memory is moved; None: the host's. Raises ConfigurationError if the library
        cannot be used."""
        self._kind = "DRAM" if device is None or device.type == "cpu" else "VRAM"
        self.device = (device.index or 0) if device is not None else 0
        try:
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it reports each agent
            api: Any = importlib.import_module("nixl_cu13._api")
            logging.getLogger("nixl").setLevel(logging.WARNING)
            config = api.nixl_agent_config(backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
            self._agent: Any = api.nixl_agent(secrets.token_hex(8), config)
            if "UCX" not in self._agent.backends:
                raise RuntimeError("it has no UCX")
        except Exception as error:
            sentence = f"kv_tier/nixl cannot use NIXL ({type(error).__name__}: {error}); install nixl-cu13 anew, or leave out"
            raise ConfigurationError(f"{sentence} disaggregation.mode") from error
        self._registered: list[Any] = []
        self._lock = threading.Lock()
        self._reads: Counter[str] = Counter()  # by peer: those that may write to this process's memory
        self._removed: set[str] = set()  # peers to forget once they have no reads

    @property
    def num_registered(self) -> int:
        """Pieces of memory that peers may read. `describe` changes with it."""
        return len(self._registered)

    def register(self, piece: torch.Tensor) -> None:
        """Let peers read a piece of memory, and this process read into it."""
        self._registered.append(self._agent.register_memory([(piece.data_ptr(), piece.numel(), self.device, "")], self._kind))

    def describe(self) -> bytes:
        """What a peer needs to read this process's registered memory."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, description: bytes) -> str:
        """Know a peer by its description, which came from an authenticated link. -> its name, which
        a process keeps: one that was to be forgotten after its last read is known again. Raises
        BlockError."""
        with self._lock:
            try:
                added = self._agent.add_remote_agent(description)
            except Exception as error:
                raise BlockError(f"NIXL does not take the peer's description: {error}") from error
            name = added.decode() if isinstance(added, bytes) else str(added)
            self._removed.discard(name)
        return name

    def remove_peer(self, name: str) -> None:
        """Forget a peer, once all reads of it have ended. NIXL has no state of the reads of a peer
        that it does not know, and UCX still carries them out."""
        with self._lock:
            self._removed.add(name)
        self._forget_removed(name)

    def is_removing(self, name: str) -> bool:
        """Whether a peer that was removed has reads that have not ended."""
        with self._lock:
            return name in self._removed

    def read(self, peer: str, local: np.ndarray, remote: np.ndarray, is_stopped: Callable[[], bool]) -> None:
        """Read from a peer's memory, and wait for it. local, remote: uint64 [n, 3] of (address,
        bytes, device). Until it returns, the local memory may be written. Raises BlockError, and
        UnfinishedReadError where `is_stopped` before the end."""
        agent, state, transfer = self._agent, "", None
        with self._lock:
            self._reads[peer] += 1
        try:
            places = (agent.get_xfer_descs(each, self._kind) for each in (local, remote))
            transfer = agent.initialize_xfer("READ", *places, peer)
            state = agent.transfer(transfer)
            while state == "PROC" and not is_stopped():
                time.sleep(_POLL_SECONDS)
                state = agent.check_xfer_state(transfer)
        except Exception as error:
            state = "ERR"
            raise BlockError(f"NIXL cannot read from the prefill server: {error}") from error
        finally:
            if state != "PROC":
                self._end_read(peer, transfer)
        if state == "PROC":
            raise UnfinishedReadError(peer, transfer)
        if state != "DONE":
            raise BlockError("NIXL cannot read from the prefill server: the transfer has failed")

    def has_ended(self, read: UnfinishedReadError) -> bool:
        """Whether a read that was given up does not write to its memory any more. It is not asked
        about again then."""
        try:
            if self._agent.check_xfer_state(read.transfer) == "PROC":
                return False
        except Exception as error:  # noqa: BLE001 - the peer is gone
            logging.getLogger(__name__).info("a read that was given up has failed: %s", error)
        self._end_read(read.peer, read.transfer)
        return True

    def _end_read(self, peer: str, transfer: Any) -> None:
        try:
            if transfer is not None:
                self._agent.release_xfer_handle(transfer)
        except Exception as error:  # noqa: BLE001 - it has ended
            logging.getLogger(__name__).info("NIXL cannot release a transfer: %s", error)
        with self._lock:
            self._reads[peer] -= 1
        self._forget_removed(peer)

    def _forget_removed(self, name: str) -> None:
        with self._lock:
            if name not in self._removed or self._reads[name] > 0:
                return
            self._removed.discard(name)
            del self._reads[name]
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:  # noqa: BLE001 - it is gone
                logging.getLogger(__name__).info("NIXL cannot forget a peer: %s", error)

    def close(self) -> None:
        """Withdraw the registered memory."""
        for each in self._registered:
            try:
                self._agent.deregister_memory(each)
            except Exception as error:  # noqa: BLE001 - the process ends
                logging.getLogger(__name__).info("NIXL cannot withdraw memory: %s", error)
        self._registered.clear()
        self._agent = None
