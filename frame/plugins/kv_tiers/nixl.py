"""`nixl`: hands blocks of prompts from prefill servers to decode servers, which read them from the
prefill server's memory with NIXL.

A prefill server keeps blocks in host memory as `host` does, and those of a lease until a decode
server has read them or the lease has expired. A decode server stores nothing. Must not know a
request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from frame.core.interfaces.kv_tier import KVTierContext, KVTierResult, KVTransfer
from frame.plugins.kv_tiers import NixlTierOptions
from frame.plugins.kv_tiers.buffers import GIB, BufferPool, compute_digest
from frame.plugins.kv_tiers.host import HostJob, HostTier, count_host_blocks
from frame.plugins.kv_tiers.lease_server import Lease, LeaseServer
from frame.plugins.kv_tiers.nixl_agent import NixlAgent
from frame.plugins.kv_tiers.peer_links import LeasedBlocks, PeerLinks
from frame.plugins.kv_tiers.threaded_tier import CLOSE_SECONDS, MAX_JOBS, BlockError

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

_ACQUIRE_SECONDS = 10.0  # in which a prefill server tells where blocks are; it may still be storing them
_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Incoming:
    """A transfer to this server. `places`: where the block of a key is among those of the lease.
    `blocks`: set by the first thread that needs it, which holds `lock`."""

    transfer: KVTransfer
    places: dict[bytes, int]
    lock: threading.Lock = field(default_factory=threading.Lock)
    blocks: LeasedBlocks | None = None
    num_jobs: int = 0
    is_closed: bool = False


@dataclass(eq=False, slots=True)
class _Reading(HostJob):
    """A load from a peer."""

    incoming: _Incoming = field(kw_only=True)


@dataclass(slots=True)
class _Counts:
    """Since the start."""

    bytes: int = 0
    transfers: int = 0
    failures: int = 0
    expired: int = 0
    refused: int = 0  # leases for which there was no place


class NixlTier(HostTier):
    """Without `KVTierContext.transfer` it is `host` in memory that NIXL knows."""

    def __init__(self, context: KVTierContext, options: BaseModel | None = None) -> None:
        settings = options if isinstance(options, NixlTierOptions) else NixlTierOptions()
        self._settings = settings
        self._num_buffers = count_host_blocks("kv_tier/nixl", "size_gib", settings.size_gib, context)
        self._agent = NixlAgent()
        self._leases: dict[str, Lease] = {}  # of a prefill server
        self._server: LeaseServer | None = None
        self._incoming: dict[str, _Incoming] = {}  # by lease; of a decode server
        self._by_key: dict[bytes, list[_Incoming]] = {}
        self._num_closing = 0  # closed transfers whose blocks are being read
        self._links: PeerLinks | None = None
        self._counts, self._is_closed = _Counts(), threading.Event()
        transfer = context.transfer
        if transfer is not None:
            properties = {**transfer.properties, "the size of a block in bytes": str(context.block_bytes)}
            if transfer.mode == "prefill":
                self._server = LeaseServer(transfer, properties, self._agent, self._leases)
            else:
                self._links = PeerLinks(transfer.secret, properties, self._agent)
        self._start(context, BufferPool(context, self._num_buffers, self._agent.register))

    @staticmethod
    def make_conformance_options(_folder: Path, num_blocks: int, context: KVTierContext) -> NixlTierOptions:  # type: ignore[override]
        return NixlTierOptions(size_gib=(num_blocks + 0.5) * context.block_bytes / GIB)

    # the tier -------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> int:
        """Of a decode server: at most as many as half of its buffers hold; the caller loads further
        blocks afterwards."""
        if self._links is None:
            return super().match(keys)
        keys = keys[: max(1, self._num_buffers // 2)]
        return next((number for number, key in enumerate(keys) if key not in self._by_key), len(keys))

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        if self._links is None:
            return super().load(job, keys)
        self._collect_results()
        sources = self._by_key.get(keys[-1])  # it has the blocks before as well: a key stands for its whole prefix
        buffers = self._take_buffers(len(keys)) if sources and len(self._jobs) < MAX_JOBS else None
        if not sources or buffers is None:
            return None
        incoming = sources[-1]
        added = _Reading(job, tuple(keys), buffers, is_store=False, blocks=[None] * len(keys), incoming=incoming)
        self._add_job(added)
        incoming.num_jobs += 1
        added.num_pending = 1
        self._workers[0].submit(partial(self._read, added))
        return buffers

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        if self._links is None:
            return super().store(job, keys)
        nothing: list[torch.Tensor | None] = [None] * len(keys)
        self._add_job(HostJob(job, tuple(keys), nothing, is_store=True, blocks=[None] * len(keys)))
        return nothing

    def poll(self) -> list[KVTierResult]:
        results = super().poll()
        if self._leases:
            self._update_leases()
        return results

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        self._is_closed.set()
        for each in (self._server, self._links):
            if each is not None:
                each.close(CLOSE_SECONDS / 4)
        super().close()
        self._workers[0].join(deadline)
        self._agent.close()

    # transfers ------------------------------------------------------------------------------------

    @property
    def num_transfers(self) -> int:
        return len(self._leases) + len(self._incoming) + self._num_closing

    def open_transfer(self, transfer: KVTransfer, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        if self._server is not None:
            if len(self._leases) >= self._settings.max_leases or transfer.lease in self._leases:
                self._counts.refused += 1
                return
            self._leases[transfer.lease] = Lease(list(keys), time.monotonic())
            self._counts.transfers += 1
            self._update_leases()
        elif self._links is not None and transfer.lease not in self._incoming:
            incoming = _Incoming(transfer, {key: place for place, key in enumerate(keys)})
            self._incoming[transfer.lease] = incoming
            for key in keys:
                self._by_key.setdefault(key, []).append(incoming)

    def close_transfer(self, lease: str) -> None:
        if (entry := self._leases.pop(lease, None)) is not None:
            self._unpin(entry)
        if (incoming := self._incoming.pop(lease, None)) is not None:
            for key in incoming.places:
                sources = self._by_key[key]
                sources.remove(incoming)
                if not sources:
                    del self._by_key[key]
            incoming.is_closed = True
            self._num_closing += 1
            self._release(incoming)

    def close_transfers(self) -> None:
        for lease in [*self._leases, *self._incoming]:
            self.close_transfer(lease)

    def describe_transfers(self) -> dict[str, float]:
        counts, oldest = self._counts, next(iter(self._leases.values()), None)
        return {
            "leases": len(self._leases),
            "leased_blocks": sum(len(lease.pinned) for lease in self._leases.values()),
            "oldest_lease_seconds": 0.0 if oldest is None else round(time.monotonic() - oldest.began, 3),
            "transfers": counts.transfers,
            "transfer_bytes": counts.bytes,
            "transfer_failures": counts.failures,
            "expired_leases": counts.expired,
            "refused_leases": counts.refused,
        }

    # a prefill server -----------------------------------------------------------------------------

    def _update_leases(self) -> None:
        """Pin blocks of leases that have been stored, tell the server when all are, and end leases
        that were read or have expired."""
        assert self._server is not None
        while not self._server.released.empty():
            self.close_transfer(self._server.released.get())
        now = time.monotonic()
        for name, lease in list(self._leases.items()):
            if now >= lease.began + self._settings.lease_seconds:
                self._counts.expired += not lease.is_taken
                self.close_transfer(name)
            elif lease.blocks is None:
                self._pin(lease)

    def _pin(self, lease: Lease) -> None:
        keys = lease.keys
        for key in keys[len(lease.pinned) :]:
            if (block := self._index.get(key)) is None:
                break
            self._index.add_users((key,), (block,))
            lease.pinned.append(block)
        end = len(lease.pinned)
        if end == len(keys) or keys[end] not in self._storing:
            lease.blocks = [(block.buffer.data_ptr(), block.digest) for block in lease.pinned]

    def _unpin(self, lease: Lease) -> None:
        lease.is_closed = True
        for key, block in zip(lease.keys, lease.pinned, strict=False):
            self._index.remove_user(key, block)
            if not block.num_users and self._index.get(key) is not block:  # it has failed
                self._pool.return_buffers((block.buffer,))

    # a decode server ------------------------------------------------------------------------------

    def _read(self, job: _Reading) -> None:
        """In a thread: read the blocks of a job from the peer."""
        errors: dict[int, str] = {}
        try:
            if not job.is_abandoned:
                errors = self._read_blocks(job)
        except BlockError as error:
            errors = {0: str(error)}
        except Exception as error:  # noqa: BLE001 - a defect fails the job, not the thread
            _log.exception("The tier nixl cannot read blocks")
            errors = {0: f"the tier has failed: {error!r}"}
        self._results.put((job, errors))

    def _read_blocks(self, job: _Reading) -> dict[int, str]:
        incoming = job.incoming
        with incoming.lock:
            if incoming.blocks is None:
                assert self._links is not None
                incoming.blocks = self._links.acquire(incoming.transfer, _ACQUIRE_SECONDS)
        source, first = incoming.blocks, incoming.places[job.keys[0]]
        addresses = source.addresses[first : first + len(job.keys)]
        buffers = [buffer for buffer in job.buffers[: len(addresses)] if buffer is not None]
        if not addresses:
            return {0: "the prefill server had no room for the blocks"}
        size = self._context.block_bytes
        local = np.array([(buffer.data_ptr(), size, 0) for buffer in buffers], np.uint64)
        remote = np.array([(address, size, 0) for address in addresses], np.uint64)
        self._agent.read(source.agent, local, remote, self._is_closed.is_set)
        errors = {
            index: "a block has changed on its way from the prefill server, or its lease has ended"
            for index, (buffer, digest) in enumerate(zip(buffers, source.digests[first:], strict=False))
            if compute_digest(buffer.numpy().data) != digest
        }
        if len(addresses) < len(job.keys):
            errors[len(addresses)] = "the prefill server had no room for all blocks"
        return errors

    def _record_result(self, job: HostJob) -> None:
        if isinstance(job, _Reading):
            self._counts.transfers += 1
            self._counts.failures += bool(job.errors)
            self._counts.bytes += min(job.errors, default=len(job.keys)) * self._context.block_bytes
        else:
            super()._record_result(job)

    def _release_load(self, job: HostJob) -> None:
        super()._release_load(job)
        if isinstance(job, _Reading):
            self._pool.return_buffers(buffer for buffer in job.buffers if buffer is not None)
            job.incoming.num_jobs -= 1
            self._release(job.incoming)

    def _release(self, incoming: _Incoming) -> None:
        """Tell the peer once nothing reads the blocks of a closed transfer."""
        if incoming.is_closed and not incoming.num_jobs and self._links is not None:
            self._num_closing -= 1
            self._links.release(incoming.transfer)
