"""The interface of KV cache tiers: places outside of the device that hold blocks of the KV cache
(`kv_tier/1`), and of the copies between the device and their buffers.

A tier moves blocks between its place and buffers; one thread calls it. It must not know a request,
a page, a token or a layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from frame.core.interfaces.plugin import Anything

if TYPE_CHECKING:
    import numpy as np
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.platform import Platform

BLOCK_ALIGNMENT = 8  # bytes, of which a block is a multiple
DEVICE_SIZE, DEVICE_SHARE = "device_size_gib", 0.05  # option of tiers in an accelerator's memory; None: this share of it


@dataclass(frozen=True, slots=True)
class KVTierCapabilities(Anything):
    """What a tier is."""

    persistent: bool = False  # its blocks are there after a restart
    shared: bool = False  # other servers read its blocks
    # The buffers of a load hold the blocks from the start; its result tells which are unchanged.
    in_memory: bool = False
    size: str = ""  # its option with the GiB of blocks that it holds; "": there is none
    ratio: str = ""  # its option with that size as a multiple of the device's KV cache, which counts where it is set
    memory: tuple[str, ...] = ()  # its options with GiB of host memory that it takes
    folder: str = ""  # its option with the folder of its blocks, where the secret of their keys is kept; "": there is none
    transfers: bool = False  # it implements `SupportsTransfers`, and serves disaggregated engines alone
    keeps: bool = False  # its blocks outlive the engine, where the context has memory for it; one of an engine's tiers


class KVTransfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The blocks of one prompt that a prefill server keeps for a decode server."""

    lease: str  # names them on the prefill server
    host: str = ""  # where the prefill server hands out its blocks; "": this server keeps them
    port: int = 0
    num_blocks: int = 0  # leading blocks of the prompt
    tenant: str = ""  # of a prefill server, in `open_transfer`: the owner of the prompt's namespace


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How a disaggregated server meets its peers."""

    mode: Literal["prefill", "decode"]
    host: str  # of a prefill server: the address that decode servers connect to
    port: int
    secret: bytes  # that peers share
    # What must be equal on both sides, by name; both values are told where they differ.
    properties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KVTierContext:
    """What a tier is built for. Each rank has a tier; options of sizes are the rank's share."""

    block_bytes: int
    # Names the contents of a block beside its key: model, weights, geometry, dtype. A persistent or
    # shared tier serves a block to the same identity alone.
    identity: str
    # (bytes) -> zeroed uint8 [bytes] of host memory, page-locked where the device copies faster so.
    allocate: Callable[[int], torch.Tensor]
    pin: Callable[[torch.Tensor], None] = lambda _: None  # page-locks memory that was allocated otherwise
    pool_bytes: int = 0  # of the blocks that the device holds
    transfer: TransferSettings | None = None  # None: the server computes whole requests
    # (bytes) -> uint8 [bytes] of memory that outlives the engine, with what earlier ones left
    map_kept: Callable[[int], np.ndarray] | None = None
    kept_bytes: int = 0  # that this memory takes already
    platform: Platform | None = None  # the device of the pool, in whose memory buffers may be too


@dataclass(frozen=True, slots=True)
class KVTierResult:
    """A job that has ended."""

    job: int
    num_blocks: int  # leading blocks that were loaded or stored
    error: str = ""  # of the first other block: one sentence for the log


class KVTier(ABC):
    """Holds blocks of `block_bytes` bytes by keys of 32 bytes, at most as many as its options
    allow, with those being stored; it evicts the least recently used: a load and a store are uses.

    Contract: a job is a number of the caller, which uses each once. No method waits for the place:
    work is done by threads of the tier or of the system. A buffer is uint8 [block_bytes]; it is the
    caller's until `finish`, also where the block is evicted meanwhile. A block that was changed in
    the place, cut off or written for another key or identity is a failed block of `poll`, never
    served. A job that fails leaves the others alone, and a method raises for a defect only.
    """

    def __init__(self, context: KVTierContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def match(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys whose blocks the tier holds. Stored blocks count from their
        successful `poll` on. May be more than `load` can then read, as another server may delete
        them."""

    @abstractmethod
    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        """Begin to read blocks. -> their buffers, valid once `poll` has returned the job; None: no
        room for them now."""

    @abstractmethod
    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        """Make room for blocks. -> a buffer for each, which the caller fills before `finish`; None
        in place of a buffer: the tier holds the block, or another job stores it. None: no room for
        them now."""

    @abstractmethod
    def finish(self, job: int, *, commit: bool = True) -> None:
        """The caller does not use the job's buffers any more. Of a store: keep the blocks, or with
        `commit` False none of them; `poll` then returns the job. Of a load: also before `poll` has
        returned it, which abandons it; `poll` does not return it afterwards."""

    @abstractmethod
    def poll(self) -> list[KVTierResult]:
        """The jobs that ended since the last call: loads that were read, and committed stores."""

    def list_removed(self) -> list[bytes] | None:
        """Keys of the blocks that left since the last call, also by failed loads; None: unknown."""

    def clear(self) -> None:
        """Drop the blocks that no job uses, those of other servers included."""

    @abstractmethod
    def close(self) -> None:
        """Stop, without waiting for jobs longer than a second. A persistent tier keeps its blocks;
        another one frees its memory."""


@runtime_checkable
class SupportsTransfers(Protocol):
    """A tier that hands blocks of prompts from prefill servers to decode servers.

    On a prefill server an open transfer is a lease: its blocks are not evicted until a peer has
    read them once, or its time has passed. On a decode server `match` counts the keys of open
    transfers, and `load` reads their blocks from the peer.
    """

    def open_transfer(self, transfer: KVTransfer, keys: Sequence[bytes]) -> None:
        """Keep the blocks of these keys, which are stored or being stored; or expect them of a
        peer. No room for one more transfer is no error: its blocks are computed. No tenant takes
        the room of others: the one that holds most loses its oldest lease."""

    def close_transfer(self, lease: str) -> None:
        """The blocks are not needed any more. An unknown lease is no error."""

    def close_transfers(self) -> None:
        """No block that is stored now may be handed out or read any more."""

    @property
    def num_transfers(self) -> int:
        """Open transfers. `poll` is called while there are some."""

    def describe_transfers(self) -> dict[str, float]:
        """Gauges and counters for metrics, by name."""


class BlockMover(Protocol):
    """Copies blocks between the device's KV pool and buffers of tiers. A block is all that one page
    of the `tokens` group holds on this rank: every layer of `tokens` and `sidecar` groups, with
    scales; or a piece of a page of another group. Blocks are named by numbers: those of the
    `tokens` group are its pages."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""

    def load(self, job: int, pages: np.ndarray, blocks: Sequence[torch.Tensor]) -> None:
        """Begin to copy blocks to the pages of these numbers, int32 [n], after all steps that are
        launched; no step that is launched before `poll` returns the job may read them."""

    def store(self, job: int, pages: np.ndarray, blocks: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """Begin to copy the pages of these numbers, int32 [n], to each tier's buffers, [tiers][n].
        They hold what committed steps left; no later step may write to a page before `poll`."""

    def poll(self) -> list[int]:
        """The jobs whose copies have ended since the last call."""

    def close(self) -> None:
        """Wait for copies, and free buffers on the device."""
