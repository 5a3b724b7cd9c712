"""`nixl`: hands blocks of prompts from prefill servers to decode servers, which read them from the
prefill server's memory with NIXL.

A prefill server keeps blocks as `host` does, in the memory of a GPU where there is one. It keeps
those of a lease until a decode server has read them or the lease has expired. A decode server
stores nothing. Must not know a request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from frame.core.errors import ConfigurationError
from frame.core.interfaces.kv_tier import DEVICE_SHARE, KVTierContext, KVTierResult, KVTransfer
from frame.core.interfaces.platform import SupportsStreams
from frame.plugins.kv_tiers import NixlTierOptions
from frame.plugins.kv_tiers.buffers import GIB, BufferPool, compute_digest, count_blocks
from frame.plugins.kv_tiers.device_buffers import DeviceChecksums, DevicePool
from frame.plugins.kv_tiers.host import HostBlock, HostJob, HostTier, count_host_blocks
from frame.plugins.kv_tiers.lease_server import Lease, LeaseServer
from frame.plugins.kv_tiers.nixl_agent import NixlAgent, UnfinishedReadError
from frame.plugins.kv_tiers.peer_links import LeasedBlocks, PeerLinks
from frame.plugins.kv_tiers.threaded_tier import CLOSE_SECONDS, MAX_JOBS, BlockError

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

_ACQUIRE_SECONDS = 10.0  # in which a prefill server tells where blocks are; it may still be storing them
_PIECE_BYTES = 128 << 20  # that are read before they are checked
_READ_SECONDS = 10.0  # in which a piece is read
QUARANTINE_SECONDS = 10.0  # after a failed read, in which something may still write to its buffers
PHASES = ("store", "acquire", "read", "check", "insert")
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
    """A load from a peer. `is_doubtful`: a read has begun that has not ended well. `unfinished`: it
    was given up."""

    incoming: _Incoming = field(kw_only=True)
    is_doubtful: bool = False
    unfinished: UnfinishedReadError | None = None
    ended: float = 0.0  # when its result was told, seconds


@dataclass(slots=True)
class _Counts:
    """Since the start."""

    bytes: int = 0
    transfers: int = 0
    failures: int = 0
    expired: int = 0
    refused: int = 0  # leases that ended so that other prompts have a place
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


class NixlTier(HostTier):
    """Without `KVTierContext.transfer` it is `host` in memory that NIXL knows. `_checksums`: of
    blocks in device memory; None: they are in host memory."""

    def __init__(self, context: KVTierContext, options: BaseModel | None = None) -> None:
        settings = options if isinstance(options, NixlTierOptions) else NixlTierOptions()
        self._settings = settings
        platform, size, device = context.platform, settings.device_size_gib, None
        self._checksums: DeviceChecksums | None = None
        if platform is None or size == 0 or not isinstance(platform, SupportsStreams):
            self._num_buffers = count_host_blocks("kv_tier/nixl", "size_gib", settings.size_gib, context)
        else:
            size = DEVICE_SHARE * platform.measure_memory().total / GIB if size is None else size
            self._num_buffers = count_blocks("device_size_gib of kv_tier/nixl", size, context.block_bytes)
            self._checksums, device = DeviceChecksums(platform), platform.device
        self._agent = NixlAgent(device)
        self._leases: dict[str, Lease] = {}  # of a prefill server
        self._server: LeaseServer | None = None
        self._incoming: dict[str, _Incoming] = {}  # by lease; of a decode server
        self._by_key: dict[bytes, list[_Incoming]] = {}
        self._num_closing = 0  # closed transfers whose blocks are being read
        self._links: PeerLinks | None = None
        self._counts, self._lock, self._is_closed = _Counts(), threading.Lock(), threading.Event()
        self._quarantine: list[tuple[float, _Reading]] = []  # jobs whose buffers may still be written, and until when at least
        transfer = context.transfer
        if transfer is not None:
            properties = {
                **transfer.properties,
                "the size of a block in bytes": str(context.block_bytes),
                "the memory of transferred blocks (kv_tier/nixl.device_size_gib)": "the host's" if device is None else "the device's",
            }
            if transfer.mode == "prefill":
                self._server = LeaseServer(transfer, properties, self._agent, self._leases)
            else:
                self._links = PeerLinks(transfer.secret, properties, self._agent)
        if device is None:
            self._start(context, BufferPool(context, self._num_buffers, self._agent.register))
            return
        self._task_blocks = self._num_buffers
        pool = _open_pool(device, self._num_buffers, context.block_bytes, self._agent)
        if (first := pool.take_buffers(1)) is not None and self._checksums is not None:
            self._checksums.compute(first)  # compiles
            pool.return_buffers(first)
        self._start(context, pool)

    @staticmethod
    def make_conformance_options(_folder: Path, num_blocks: int, context: KVTierContext) -> NixlTierOptions:  # type: ignore[override]
        return NixlTierOptions(size_gib=(num_blocks + 0.5) * context.block_bytes / GIB, device_size_gib=0)

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
        self._end_quarantine()
        sources = self._by_key.get(keys[-1])  # it has the blocks before as well: a key stands for its whole prefix
        buffers = self._take_buffers(len(keys)) if sources and len(self._jobs) < MAX_JOBS else None
        if not sources or buffers is None:
            return None
        incoming = sources[-1]
        buffers.reverse()
        added = _Reading(job, tuple(keys), buffers, is_store=False, blocks=[None] * len(keys), incoming=incoming)
        self._add_job(added)
        incoming.num_jobs += 1
        added.num_pending = 1
        self._workers[0].submit(partial(self._read, added))
        return buffers

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        if self._links is None:
            buffers = super().store(job, keys)
            for lease in self._leases.values():
                if not lease.is_taken:
                    self._pin(lease)
            return buffers
        nothing: list[torch.Tensor | None] = [None] * len(keys)
        self._add_job(HostJob(job, tuple(keys), nothing, is_store=True, blocks=[None] * len(keys)))
        return nothing

    def count_room(self, *, is_store: bool) -> int | None:
        """See `CountsRoom.count_room`. A decode server has no room to store, and a prefill server
        reads blocks where they are."""
        if is_store == (self._links is not None):
            return None
        return self._pool.num_free + self._index.num_unused if len(self._jobs) < MAX_JOBS else 0

    def note_copied(self, job: int) -> None:
        """In any thread: the buffers of a store are full, and `finish` follows. Peers that wait for
        its blocks do not wait for the engine's thread."""
        entry = self._jobs.get(job)
        if entry is not None and entry.is_store:
            entry.is_checked_early = True
            self._submit_tasks(entry, self._workers[-1])

    def poll(self) -> list[KVTierResult]:
        results = super().poll()
        self._end_quarantine()
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
            if transfer.lease in self._leases:
                return
            while len(self._leases) >= self._settings.max_leases:
                self._end_oldest(find_largest(Counter(each.tenant for each in self._leases.values()), transfer.tenant))
            lease = Lease(list(keys), time.monotonic(), transfer.tenant)
            self._pin(lease)
            self._leases[transfer.lease] = lease  # from now on the server hands it out
            self._make_room(lease)
            self._counts.transfers += 1
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
            **{f"{phase}_seconds": round(self._counts.seconds[phase], 6) for phase in PHASES},
        }

    # a prefill server -----------------------------------------------------------------------------

    def _update_leases(self) -> None:
        """End leases that were read or have expired."""
        assert self._server is not None
        while not self._server.released.empty():
            self.close_transfer(self._server.released.get())
        now = time.monotonic()
        for name, lease in list(self._leases.items()):
            if now >= lease.began + self._settings.lease_seconds:
                self._counts.expired += not lease.is_taken
                self.close_transfer(name)

    def _make_room(self, lease: Lease) -> None:
        """Where the blocks of a lease find no room, end leases of tenants that hold more blocks."""
        lacking = len(self._index.find_lacking(lease.keys, self._storing))
        while lacking > self._pool.num_free + self._index.num_unused:
            held = Counter({lease.tenant: lacking})
            for each in self._leases.values():
                held[each.tenant] += len(each.pinned)
            if (largest := find_largest(held, lease.tenant)) == lease.tenant:
                return
            self._end_oldest(largest)

    def _end_oldest(self, tenant: str) -> None:
        """End a tenant's oldest lease, one that is being read only where there is no other."""
        names = [name for name, lease in self._leases.items() if lease.tenant == tenant]
        self._counts.refused += 1
        self.close_transfer(min(names, key=lambda name: self._leases[name].is_taken))

    def _pin(self, lease: Lease) -> None:
        """Keep the leading blocks of a lease that are stored or being stored."""
        for key in lease.keys[len(lease.pinned) :]:
            if (block := self._index.get(key)) is not None:
                self._index.add_users((key,), (block,))
            elif (block := self._storing.get(key)) is not None:
                block.num_users += 1
            else:
                break
            lease.pinned.append(block)

    def _drop_stored(self, block: HostBlock) -> None:
        super()._drop_stored(block)
        if self._server is not None:
            self._server.note_change()

    def _unpin(self, lease: Lease) -> None:
        lease.is_closed = True
        for key, block in zip(lease.keys, lease.pinned, strict=False):
            self._index.remove_user(key, block)
            if not block.num_users and block not in (self._index.get(key), self._storing.get(key)):  # it has failed
                self._pool.return_buffers((block.buffer,))
        if self._server is not None:
            self._server.note_change()

    def _move_blocks(self, job: HostJob, indexes: Sequence[int]) -> None:
        began = time.monotonic()
        if self._checksums is None or job.is_abandoned:
            super()._move_blocks(job, indexes)
        else:
            self._results.put((job, self._check_on_device(job, indexes)))
        if job.is_store:
            self._count("store", time.monotonic() - began)
            if self._server is not None:
                self._server.note_change()

    def _check_on_device(self, job: HostJob, indexes: Sequence[int]) -> dict[int, str]:
        """What `_move_block` does for each block, for all at once."""
        blocks = [(index, block) for index in indexes if (block := job.blocks[index]) is not None]
        errors = {index: "the tier nixl does not hold the block any more" for index in indexes if job.blocks[index] is None}
        try:
            digests = self._compute_digests([block.buffer for _, block in blocks])
        except Exception as error:  # noqa: BLE001 - a defect fails the job, not the thread
            _log.exception("The tier nixl cannot check blocks")
            for _, block in blocks:
                block.is_failed = block.is_failed or job.is_store
            return dict.fromkeys(indexes, f"the tier has failed: {error!r}")
        for (index, block), digest in zip(blocks, digests, strict=True):
            if job.is_store:
                block.digest = digest
            elif digest != block.digest:
                errors[index] = "a block of the tier nixl has changed in memory"
        return errors

    def _compute_digests(self, buffers: Sequence[torch.Tensor]) -> list[bytes]:
        if self._checksums is not None:
            return self._checksums.compute(buffers)
        return [compute_digest(buffer.numpy().data) for buffer in buffers]

    def _count(self, phase: str, seconds: float, num_bytes: int = 0) -> None:
        """In any thread."""
        with self._lock:
            self._counts.seconds[phase] += seconds
            self._counts.bytes += num_bytes

    # a decode server ------------------------------------------------------------------------------

    def _read(self, job: _Reading) -> None:
        """In a thread: read the blocks of a job from the peer."""
        errors: dict[int, str] = {}
        try:
            if not job.is_abandoned:
                errors = self._read_blocks(job)
        except BlockError as error:
            job.unfinished = error if isinstance(error, UnfinishedReadError) else None
            errors = {0: str(error)}
        except Exception as error:  # noqa: BLE001 - a defect fails the job, not the thread
            _log.exception("The tier nixl cannot read blocks")
            errors = {0: f"the tier has failed: {error!r}"}
        self._results.put((job, errors))

    def _read_blocks(self, job: _Reading) -> dict[int, str]:
        incoming, began = job.incoming, time.monotonic()
        with incoming.lock:
            if incoming.blocks is None:
                assert self._links is not None
                incoming.blocks = self._links.acquire(incoming.transfer, _ACQUIRE_SECONDS)
        self._count("acquire", time.monotonic() - began)
        source, first = incoming.blocks, incoming.places[job.keys[0]]
        count = min(len(source.addresses), len(source.digests), first + len(job.keys)) - first
        if count <= 0:
            return {0: "the prefill server had no room for the blocks"}
        step = max(1, _PIECE_BYTES // self._context.block_bytes)
        for start in range(0, count, step):
            if job.is_abandoned:
                return {start: "nothing waits for the blocks any more"}
            if (error := self._read_piece(job, source, first, range(start, min(start + step, count)))) is not None:
                return {error: "a block has changed on its way from the prefill server, or its lease has ended"}
        return {count: "the prefill server had no room for all blocks"} if count < len(job.keys) else {}

    def _read_piece(self, job: _Reading, source: LeasedBlocks, first: int, piece: range) -> int | None:
        """Read some blocks of a job and check them. first: the place in the lease of the job's
        first block. -> the first block that is not what it should be."""
        began, size = time.monotonic(), self._context.block_bytes
        buffers = [buffer for buffer in job.buffers[piece.start : piece.stop] if buffer is not None]
        theirs = source.addresses[first + piece.start : first + piece.stop]
        ours, theirs, sizes = list_runs([buffer.data_ptr() for buffer in buffers], theirs, size, joins=self._checksums is not None)
        local = np.stack((ours, sizes, np.full_like(sizes, self._agent.device)), 1)
        remote = np.stack((theirs, sizes, np.full_like(sizes, source.device)), 1)
        job.is_doubtful = True
        self._agent.read(source.agent, local, remote, lambda: self._is_closed.is_set() or time.monotonic() > began + _READ_SECONDS)
        job.is_doubtful, end = False, time.monotonic()
        digests = self._compute_digests(buffers)
        wrong = next((index for index, digest in zip(piece, digests, strict=True) if digest != source.digests[first + index]), None)
        self._count("read", end - began, ((piece.stop if wrong is None else wrong) - piece.start) * size)
        self._count("check", time.monotonic() - end)
        return wrong

    def _record_result(self, job: HostJob) -> None:
        if isinstance(job, _Reading):
            self._counts.transfers += 1
            self._counts.failures += bool(job.errors)
            job.ended = time.monotonic()
        else:
            super()._record_result(job)

    def _release_load(self, job: HostJob) -> None:
        super()._release_load(job)
        if isinstance(job, _Reading):
            if job.is_doubtful:
                self._quarantine.append((time.monotonic() + QUARANTINE_SECONDS, job))
            else:
                self._return_buffers(job)
            if job.ended and not job.errors:
                self._count("insert", time.monotonic() - job.ended)
            job.incoming.num_jobs -= 1
            self._release(job.incoming)

    def _end_quarantine(self) -> None:
        """A peer that is stopped may go on at any time: a read that was given up is waited for."""
        now = time.monotonic()
        for entry in [entry for entry in self._quarantine if entry[0] <= now]:
            if entry[1].unfinished is None or self._agent.has_ended(entry[1].unfinished):
                self._quarantine.remove(entry)
                self._return_buffers(entry[1])

    def _return_buffers(self, job: _Reading) -> None:
        self._pool.return_buffers(buffer for buffer in job.buffers if buffer is not None)

    def _release(self, incoming: _Incoming) -> None:
        """Tell the peer once nothing reads the blocks of a closed transfer."""
        if incoming.is_closed and not incoming.num_jobs and self._links is not None:
            self._num_closing -= 1
            self._links.release(incoming.transfer)


def find_largest(held: Mapping[str, int], tenant: str) -> str:
    """The tenant that holds most; `tenant` where it holds as much as another one."""
    return max(held, key=lambda each: (held[each], each == tenant))


def list_runs(ours: Sequence[int], theirs: Sequence[int], size: int, *, joins: bool = True) -> np.ndarray:
    """Blocks of `size` bytes at these addresses, uint64 [3, runs] of (ours, theirs, bytes): those
    that follow one another on both sides are one run, since each run costs about 10 µs. joins: the
    memory of each side was registered in one piece, which a run may not leave."""
    addresses = np.array((ours, theirs), np.uint64)
    starts = np.flatnonzero(np.append(True, (np.diff(addresses) != size).any(0) | (not joins)))
    counts = np.diff(np.append(starts, len(ours))).astype(np.uint64)
    return np.vstack((addresses[:, starts], counts * np.uint64(size)))


def _open_pool(device: torch.device, num_buffers: int, block_bytes: int, agent: NixlAgent) -> DevicePool:
    """Raises ConfigurationError where the memory cannot be had."""
    try:
        return DevicePool(device, num_buffers, block_bytes, agent.register)
    except RuntimeError as error:
        size = num_buffers * block_bytes / GIB
        sentence = f"device_size_gib of kv_tier/nixl takes {size:.2f} GiB of {device}, which cannot be had ({str(error).splitlines()[0]})"
        raise ConfigurationError(f"{sentence}; lower it, or set it to 0 for host memory") from error
