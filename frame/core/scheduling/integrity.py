"""The self-check of the scheduler's pages, locks and slots. The engine runs it while it is idle,
never in a step.

Invariant: every page is free, private to one running request, owned by the prefix cache, in transit
to it from a cache tier, or deferred until a step in flight is committed. `audit_accounts` finds a
breach, one bounded part at a time; `repair_accounts` reclaims what leaked.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from frame.core.interfaces.cache import SupportsRelock
from frame.core.scheduling.running import RunningSet
from frame.core.scheduling.step_features import RequestTiers


def audit_accounts(running: RunningSet, tiers: RequestTiers) -> Iterator[None]:
    """Raise RuntimeError, one sentence, at the first breach of the invariant. Each `next` checks a
    bounded part.

    The result is void if the scheduler's state changes before the last part; start again then.
    """
    kv_manager = running.kv_manager
    owned = []
    for pages in kv_manager.cache.audit():
        owned.append(pages)
        yield
    _check_slots(running)
    transit, copied = tiers.list_held_pages()
    kv_manager.allocator.check_integrity([*_held(running), transit, *owned])
    yield
    shared = _shared(running, copied)
    if kv_manager.cache.num_locked != len(shared):
        raise RuntimeError(f"the cache has {kv_manager.cache.num_locked} locked pages, running requests share {len(shared)} with copies")
    _check_groups(running, tiers)
    shared = _shared(running, copied, all_groups=True)
    if shared.size and np.setdiff1d(shared, np.concatenate(owned)).size:
        raise RuntimeError("a running request or a copy reads shared pages that the cache does not own")


def check_accounts(running: RunningSet, tiers: RequestTiers) -> None:
    """Run the whole audit at once. Raises RuntimeError at the first breach."""
    for _ in audit_accounts(running, tiers):
        pass


def repair_accounts(running: RunningSet, tiers: RequestTiers) -> list[str]:
    """Reclaim leaked pages, locks and slots. -> one sentence for each repair.

    Raises RuntimeError when a page has two holders: that cannot be repaired, since either may read
    the other's keys.
    """
    kv_manager, done = running.kv_manager, []
    transit, copied = tiers.list_held_pages()
    if kv_manager.cache.num_locked != len(_shared(running, copied)):
        before = kv_manager.cache.num_locked
        if not isinstance(kv_manager.cache, SupportsRelock):
            raise RuntimeError(f"{type(kv_manager.cache).__name__} cannot repair its locks")
        kv_manager.cache.relock([*(request.handle for request in running.requests), *tiers.list_handles()])
        done.append(f"{before} pages of the prefix cache were locked, {kv_manager.cache.num_locked} are in use; the locks were reset")
    held = np.concatenate([np.empty(0, np.int32), *_held(running), transit, *kv_manager.cache.audit()])
    leaked = np.setdiff1d(kv_manager.allocator.pages_out(), held)
    if leaked.size:
        kv_manager.allocator.free(leaked)
        done.append(f"{leaked.size} leaked pages were reclaimed")
    lost = _lost_slots(running)
    for slot in lost:
        running.table.recycle_slot(slot)
    if lost:
        done.append(f"{len(lost)} lost request slots were reclaimed")
    for slot in _idle_prefills(running):
        rid = running.prefilling.pop(slot).rid
        done.append(f"request {rid} was marked as prefilling, but no step computes its prompt; the mark was removed")
    check_accounts(running, tiers)
    return done


def _held(running: RunningSet) -> list[np.ndarray]:
    """Pages held outside the cache: one array for each running request, and one for each deferred
    release."""
    kv_manager = running.kv_manager
    private = [kv_manager.private_pages(request.slot) for request in running.requests]
    waiting = [pages for record in running.in_flight for pages in record.deferred_pages]
    return [*private, *waiting]


def _shared(running: RunningSet, copied: np.ndarray, all_groups: bool = False) -> np.ndarray:
    """The cache's pages that running requests read, and those that copies of tiers lock, each once,
    int32; with `all_groups` those of every cache group."""
    kv_manager = running.kv_manager
    rows = [copied, *(kv_manager.shared_pages(request.slot) for request in running.requests)]
    if all_groups and kv_manager.groups is not None:
        rows += [kv_manager.groups.shared_pages(request.slot) for request in running.requests]
    return np.unique(np.concatenate(rows))


def _check_groups(running: RunningSet, tiers: RequestTiers) -> None:
    """Raise RuntimeError if window pages are locked for no request, or a request has no state."""
    groups = running.kv_manager.groups
    if groups is None:
        return
    for rows in groups.windows:
        locked = 0 if groups.cache is None else groups.cache.count_locked(rows.index)
        if locked and not tiers.list_handles() and not any(request.handle is not None for request in running.requests):
            raise RuntimeError(f"the cache has {locked} locked window pages, but no running request and no copy uses the cache")
    stateless = [request.rid for request in running.requests if groups.snapshot is not None and not groups.states[request.slot]]
    if stateless:
        raise RuntimeError(f"request {stateless[0]} runs without a state")
    if groups.block_pool is not None and (bare := [each.rid for each in running.requests if not groups.blocks[each.slot]]):
        raise RuntimeError(f"request {bare[0]} runs without a block")


def _lost_slots(running: RunningSet) -> list[int]:
    table = running.table
    taken = {request.slot for request in running.requests} | {slot for record in running.in_flight for slot in record.deferred_slots}
    return sorted(set(range(table.num_slots)) - taken - set(table.list_free_slots()))


def _idle_prefills(running: RunningSet) -> list[int]:
    """Slots marked as prefilling whose prompt no step computes: requests that share their prefix
    would wait for ever."""
    table = running.table
    return [
        slot
        for slot, request in running.prefilling.items()
        if table.requests[slot] is not request or not (slot in running.extending or running.is_in_flight(slot))
    ]


def _check_slots(running: RunningSet) -> None:
    table = running.table
    if idle := _idle_prefills(running):
        raise RuntimeError(f"request {running.prefilling[idle[0]].rid} is marked as prefilling, but no step computes its prompt")
    for request in running.requests:
        if table.requests[request.slot] is not request:
            raise RuntimeError(f"request {request.rid} runs in slot {request.slot}, which belongs to another request")
    lost = _lost_slots(running)
    if lost:
        raise RuntimeError(f"{len(lost)} request slots leaked: {lost[:8]}")
    free = table.list_free_slots()
    if len(set(free)) != len(free):
        raise RuntimeError("a request slot is free twice")
