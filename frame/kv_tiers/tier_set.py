"""The tiers of one scheduler, nearest first, with what loads and stores have in common.

Used by `TierController`, `PrefixLoads` and `BlockStores`. Must not know requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast, runtime_checkable

import numpy as np

from frame.core.interfaces.kv_tier import BlockMover, KVTier, SupportsTransfers
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.kv_tiers.block_keys import BlockKeys
from frame.kv_tiers.block_layout import BlockLayout
from frame.kv_tiers.group_blocks import GroupBlocks, find_groups

log = logging.getLogger(__name__)


class TierEvents(Protocol):
    """What is told of blocks of tiers. `frame.kv_events.cache_events` documents the methods."""

    def record_tier_stored(self, place: tuple[int, str], names: Sequence[bytes], keys: np.ndarray | None, namespace: str) -> None: ...
    def record_tier_removed(self, place: tuple[int, str], names: Sequence[bytes]) -> None: ...
    def record_tiers_cleared(self) -> None: ...
    def record_written_back(self, pages: np.ndarray, names: Sequence[bytes]) -> None: ...


@runtime_checkable
class CountsRoom(Protocol):
    """A tier that tells for how many blocks it has room: then leading blocks are stored where there
    is no room for all, and no load is begun in vain."""

    def count_room(self, *, is_store: bool) -> int | None:
        """Blocks for which `store`, or else `load`, has buffers now; None: it is not limited."""


WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
NO_PAGES = np.empty(0, np.int32)
LOG_INTERVAL = 60.0  # seconds after which the same error of a tier is logged again
MAX_LOGGED = 16  # different errors in that time


@dataclass(frozen=True, slots=True)
class NamedTier:
    """A tier and its name in logs and metrics. `is_local`: it is neither persistent nor shared, so
    that blocks whose keys have a meaning in this process alone may be stored there."""

    name: str
    tier: KVTier
    is_local: bool
    is_in_memory: bool = False  # see `KVTierCapabilities.in_memory`
    medium: str = "CPU"  # in KV events, as vLLM names it

    def limit_blocks(self, keys: BlockKeys) -> int:
        """Leading blocks of a sequence that may be in this tier."""
        return len(keys.keys) if self.is_local else keys.num_public


@dataclass(frozen=True, slots=True)
class TierOptions:
    """How tiers are used."""

    secret: bytes  # of the keys; at most 64 bytes
    identity: str  # see `KVTierContext.identity`
    write_policy: WritePolicy  # store a block at its first offer, at its second one, or when it is evicted
    min_load_tokens: int  # fewer tokens are computed rather than loaded
    num_pages: int  # of the KV pool, the reserved page 0 included
    layout: BlockLayout | None = None  # of blocks; None: the model has no cache group besides `tokens`


@dataclass(slots=True)
class TierCounts:
    """Counters of one tier since the start, in tokens."""

    loaded: int = 0
    stored: int = 0


@dataclass(eq=False)
class TierSet:
    """The tiers and the objects that their users share. `max_pages`: most pages in transit by
    loads, and most that stores lock."""

    tiers: Sequence[NamedTier]
    mover: BlockMover
    kv_manager: KVCacheManager
    options: TierOptions
    clock: Callable[[], float] = time.monotonic
    counts: list[TierCounts] = field(init=False)
    max_pages: int = field(init=False)
    groups: GroupBlocks | None = field(init=False)  # None: a block of each page is all that a match needs

    def __post_init__(self) -> None:
        self.counts = [TierCounts() for _ in self.tiers]
        self.max_pages = max(1, self.options.num_pages // 2)
        self.groups = find_groups(self.kv_manager, self.options.layout)
        self.noted: dict[int, tuple[bytes, bool]] = {}  # by page, where blocks are stored late: its key, and whether others know it
        self._reports_removed: dict[int, bool] = {}  # by tier that has been announced: whether it tells which blocks leave it
        self._last_job = 0
        self._no_log_until: dict[tuple[int, str], float] = {}  # by tier and error

    @property
    def page_size(self) -> int:
        return self.kv_manager.page_size

    @property
    def events(self) -> TierEvents | None:
        """None: changes are not published."""
        return cast("TierEvents | None", self.kv_manager.events)

    def report_stored(self, index: int, names: Sequence[bytes], keys: np.ndarray | None = None, namespace: str = "") -> None:
        """A tier holds the blocks of these names. keys: cache keys of their sequence up to the last
        of them, int32; None: they were evicted from the device."""
        if self.events is None or not len(names):
            return
        if index not in self._reports_removed:
            self._reports_removed[index] = self.tiers[index].tier.list_removed() is not None  # else subscribers would know too much
        if self._reports_removed[index]:
            self.events.record_tier_stored(self._place(index), names, keys, namespace)

    def report_removed(self) -> None:
        """Tell which blocks have left the tiers."""
        for index, reports in self._reports_removed.items():
            if reports and self.events is not None and (names := self.tiers[index].tier.list_removed()):
                self.events.record_tier_removed(self._place(index), names)

    def report_cleared(self) -> None:
        """Tell that no block of the tiers is asked any more."""
        self.report_removed()
        if self.events is not None:
            self.events.record_tiers_cleared()

    def _place(self, index: int) -> tuple[int, str]:
        return index, self.tiers[index].medium

    def count_room(self, index: int, *, is_store: bool) -> int | None:
        """See `CountsRoom.count_room`; None also where the tier does not tell."""
        tier = self.tiers[index].tier
        return tier.count_room(is_store=is_store) if isinstance(tier, CountsRoom) else None

    def is_from_peer(self, indexes: Iterable[int]) -> bool:
        """Whether one of these tiers reads blocks of other servers' prompts."""
        return any(isinstance(self.tiers[index].tier, SupportsTransfers) for index in indexes)

    def count_received(self) -> float:
        """Bytes that other servers have sent to such tiers since the start."""
        tiers = (named.tier for named in self.tiers)
        return sum(tier.describe_transfers().get("transfer_bytes", 0.0) for tier in tiers if isinstance(tier, SupportsTransfers))

    def take_job(self) -> int:
        """A new job number."""
        self._last_job += 1
        return self._last_job

    def log_error(self, index: int, error: str) -> None:
        """Log why a job failed or was late, unless the same entry is recent or there are many."""
        now, cause = self.clock(), (index, error)
        if not error or now < self._no_log_until.get(cause, now):
            return
        self._no_log_until = {each: until for each, until in self._no_log_until.items() if now < until}
        if len(self._no_log_until) < MAX_LOGGED:
            self._no_log_until[cause] = now + LOG_INTERVAL
            log.warning("blocks of the KV cache tier %s are computed: %s", self.tiers[index].name, error)
