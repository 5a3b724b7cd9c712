"""`PrefixLoads`: loads of prefixes for waiting requests.

A load locks the prefix that the device has, allocates pages for the next blocks, lets tiers read
them into buffers, copies these to the pages and inserts the pages in the prefix cache. Used by
`TierController`. Must not know where a tier keeps its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from frame.core.interfaces.cache import Match
from frame.core.interfaces.kv_tier import KVTierResult
from frame.core.scheduling.request import Request
from frame.kv_tiers.block_keys import BlockKeys, RequestKeys
from frame.kv_tiers.tier_set import NO_PAGES, TierSet

if TYPE_CHECKING:
    import torch

DEADLINE_MARGIN = 1.0  # seconds that a request waits longer than the computation of its prefix takes
MAX_EXTENSIONS = 4  # by this margin, of the wait for a peer that goes on to send blocks
HASHED_BLOCKS = 8192  # most blocks that one call hashes, since a step waits meanwhile


@dataclass(slots=True)
class Segment:
    """The blocks of a load that one tier reads: first those of tokens, then those of further cache
    groups."""

    blocks: Sequence[torch.Tensor]
    num_tokens: int  # blocks of tokens
    num_ready: int = -1  # leading blocks that were read; -1: not known yet


@dataclass(slots=True, eq=False)
class Load:
    """A load under way. Its pages are in transit until it ends."""

    job: int
    key: bytes  # of its first block
    tokens: np.ndarray  # cache keys of the matched and the loaded blocks, int32
    namespace: str
    priority: int
    match: Match  # locked; the blocks before the first loaded one
    pages: np.ndarray  # int32, of the loaded blocks of tokens
    further: list[np.ndarray]  # pages of each further cache group
    numbers: np.ndarray  # int32, of all loaded blocks, segment by segment; see `BlockMover`
    segments: dict[int, Segment]  # by tier, in the order of the blocks
    num_copied: int = 0  # blocks whose copies to pages have begun; 0: tiers read
    is_copied: bool = False  # the copies have ended
    rids: set[str] = field(default_factory=set)  # of the requests that wait for it

    @property
    def num_blocks(self) -> int:
        """Blocks of tokens."""
        return len(self.pages)

    def list_pages(self) -> np.ndarray:
        """The pages that it fills, of all cache groups."""
        return np.concatenate((self.pages, *self.further))

    @property
    def is_read(self) -> bool:
        """Whether all tiers have told what they have read."""
        return all(segment.num_ready >= 0 for segment in self.segments.values())

    @property
    def is_writing(self) -> bool:
        """Whether pages are being written."""
        return self.num_copied > 0 and not self.is_copied

    def describe_delay(self) -> tuple[int, str]:
        """-> the tier that the load waits for, and a sentence for the log."""
        for index, segment in self.segments.items():
            if segment.num_ready < 0:
                return index, "it has not read a prefix before the deadline of its request"
        return next(iter(self.segments)), "a prefix was not copied to the device before the deadline of its request"

    def list_ready(self) -> list[torch.Tensor]:
        """The leading blocks that tiers have read; with further cache groups all of them or
        none."""
        blocks: list[torch.Tensor] = []
        for segment in self.segments.values():
            blocks += segment.blocks[: segment.num_ready]
            if segment.num_ready < len(segment.blocks):
                return [] if self.further else blocks
        return blocks


@dataclass(slots=True)
class Wait:
    """What a waiting request does. Without a load it is looked up again."""

    load: Load | None = None
    computes: bool = False  # it waits for no load until it has started
    deadline: float | None = None  # seconds of the clock; None: it has not waited
    lacks: tuple[int, int] | None = None  # the tier that had no room for its load, and the blocks
    missing: bytes = b""  # the key of the first block that it lacks
    num_ended: int = 0  # loads that had ended when it was looked up
    num_extensions: int = 0  # of the deadline
    num_received: float = 0.0  # bytes that peers had sent when the deadline was set
    loaded: dict[str, int] = field(default_factory=dict)  # tokens, by tier


class PrefixLoads:
    """Loads, and the requests that wait for them.

    Requests that lack the same next block wait for one load. A request waits until its deadline in
    all: the time in which its missing prefix is computed, and `DEADLINE_MARGIN`. While blocks of
    peers arrive, it waits longer for its own, because a prompt that is computed delays the others.
    """

    def __init__(self, tiers: TierSet, keys: RequestKeys) -> None:
        self.num_failed = 0  # loads that yielded fewer blocks than the tiers had
        self.num_late = 0  # requests whose load has not ended before their deadline
        self.prefill_rate = 2000.0  # tokens a second; measured from the first prompt on
        self._set = tiers
        self._keys = keys
        self._loads: dict[int, Load] = {}  # by job
        self._by_key: dict[bytes, Load] = {}  # by the key of the first block
        self._waits: dict[str, Wait] = {}  # by request id
        self._num_ended = 0  # loads
        self._is_short = False  # a request of this step has found no room: those after it are not tried

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a load."""
        return sum(len(load.rids) for load in self._loads.values())

    # requests -------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Requests that found no room may be tried again, in the order of the queue."""
        self._is_short = False

    def may_start(self, request: Request) -> bool:
        """See `RequestTiers.may_start`."""
        if request.wants_prompt_logprobs or request.num_tokens < max(2, self._set.options.min_load_tokens):
            return True
        wait = self._waits.get(request.rid)
        if wait is None:
            wait = self._waits[request.rid] = Wait()
        if not wait.computes and wait.load is None:
            if wait.deadline is not None and self._set.clock() >= wait.deadline:
                wait.computes = True
                self.num_late += wait.lacks is not None and not wait.loaded  # else it waited for a place
            elif self._should_look_up(wait):
                self._look_up(request, wait)
        return wait.computes

    def is_loading(self, request: Request) -> bool:
        """See `RequestTiers.is_loading`."""
        wait = self._waits.get(request.rid)
        return wait is not None and wait.load is not None

    def forget(self, request: Request) -> None:
        """See `RequestTiers.forget`."""
        wait = self._waits.pop(request.rid, None)
        if wait is None:
            return
        if request.num_cached_tokens < 0:
            request.cached_tiers = wait.loaded
        if wait.load is not None:
            self._leave(request.rid, wait)

    def _leave(self, rid: str, wait: Wait) -> None:
        """A request waits for its load no more. A load that no request waits for is abandoned,
        unless it is being copied: then its pages are inserted all the same."""
        load, wait.load = wait.load, None
        assert load is not None
        load.rids.discard(rid)
        if not load.rids and not load.is_writing:
            self._abandon(load)

    def _should_look_up(self, wait: Wait) -> bool:
        """Whether a request that waits for room may have it, or needs it no more: another one loads
        its prefix, or a load has ended, which may have been it."""
        if wait.lacks is None or wait.missing in self._by_key or wait.num_ended != self._num_ended:
            return True
        return not self._lacks_room(*wait.lacks)

    def _lacks_room(self, index: int, count: int) -> bool:
        """Whether a tier has no room to read so many blocks of a peer, or has none left by requests
        that come first."""
        if not self._is_short:
            room = self._set.count_room(index, is_store=False)
            self._is_short = room is not None and room < count
        return self._is_short

    def _look_up(self, request: Request, wait: Wait) -> None:
        """Begin a load for a request, let it join one, or decide that it computes. It stays
        undecided while its keys are being hashed and while other loads have all the room."""
        tokens, size = request.cache_keys(request.all_tokens()), self._set.page_size
        chain = self._keys.extend(request, tokens, HASHED_BLOCKS)
        if len(chain.keys) < len(tokens) // size:
            return
        match, groups = self._set.kv_manager.cache.match(tokens, request.namespace), self._set.groups
        first, servable = len(match.pages), len(chain.keys) if groups is None else groups.count_servable(len(tokens))
        missing = (servable - first) * size
        wait.missing, wait.num_ended = (chain.keys[first] if first < len(chain.keys) else b""), self._num_ended
        if wait.deadline is None:
            wait.deadline = self._set.clock() + missing / self.prefill_rate + DEADLINE_MARGIN
            wait.num_received = self._set.count_received()
        minimum = max(1, self._set.options.min_load_tokens)
        if missing < minimum:
            wait.computes = True
            return
        load = self._by_key.get(chain.keys[first])
        if load is None:
            ends = self._find_ends(chain, first)
            end = min(ends[-1], servable, first + self._set.max_pages)
            if groups is not None:
                end = groups.find_end(chain.keys, first, end, lambda key: self._find_tier(key) is not None)
            if (end - first) * size < minimum:
                wait.computes = True
                return
            room = self._set.max_pages - sum(each.num_blocks for each in self)
            if groups is None:
                end = min(end, first + room)
            if (min(end, first + room) - first) * size < minimum or not self._has_room(first, end, room):
                self._note_shortage(request, wait)
                return
            load = self._try_to_begin(request, wait, tokens, chain, match, [min(each, end) for each in ends])
            if load is None:
                return
        load.rids.add(request.rid)
        wait.load = load

    def _try_to_begin(
        self, request: Request, wait: Wait, tokens: np.ndarray, chain: BlockKeys, match: Match, ends: Sequence[int]
    ) -> Load | None:
        """None: there is no room; the request computes, or waits until its deadline where a peer
        has the blocks."""
        first = len(match.pages)
        index, end = next((index, end) for index, end in enumerate(ends) if end > first)
        waits = _expects_blocks(request)
        load = None if waits and self._lacks_room(index, end - first) else self._begin(request, tokens, chain, match, ends)
        wait.lacks = None
        if load is None:
            wait.computes = not waits
            self._note_shortage(request, wait, index, end - first)
        return load

    def _note_shortage(self, request: Request, wait: Wait, index: int = 0, count: int = 0) -> None:
        """A request whose blocks are at a peer waits for room, and so do those after it."""
        if _expects_blocks(request):
            wait.lacks, self._is_short = (index, count), True

    def _has_room(self, first: int, end: int, room: int) -> bool:
        """Whether other loads leave room for the pages of all cache groups."""
        groups = self._set.groups
        if groups is None:
            return True
        return end - first <= room and groups.has_room(groups.count_pages(first, end), [each.further for each in self])

    def _find_ends(self, chain: BlockKeys, first: int) -> list[int]:
        """Where each tier's segment ends in blocks of tokens: the nearest tier gives what it has,
        the next one goes on."""
        ends: list[int] = []
        for named in self._set.tiers:
            limit = named.limit_blocks(chain)
            held = named.tier.match(chain.keys[first:limit]) if limit > first else 0
            first = first + min(held, max(limit - first, 0))
            ends.append(first)
        return ends

    def _find_tier(self, key: bytes) -> int | None:
        """The nearest tier that holds a block of a further cache group. Its keys have a meaning in
        this process alone where the tokens' have: then no other tier is given them."""
        return next((index for index, named in enumerate(self._set.tiers) if named.tier.match((key,))), None)

    def _plan_segments(self, chain: BlockKeys, first: int, ends: Sequence[int]) -> dict[int, tuple[range, list[int]]] | None:
        """What each tier reads: positions of tokens, and places in `GroupBlocks.list_keys`. None:
        no tier has a block of a further cache group any more."""
        plan, start, groups = dict[int, tuple[range, list[int]]](), first, self._set.groups
        for index, end in enumerate(ends):
            plan[index] = range(start, max(start, end)), []
            start = max(start, end)
        for place, key in enumerate([] if groups is None else groups.list_keys(chain.keys, first, start)):
            tier = self._find_tier(key)
            if tier is None:
                return None
            plan[tier][1].append(place)
        return {index: (span, places) for index, (span, places) in plan.items() if span or places}

    def _begin(self, request: Request, tokens: np.ndarray, chain: BlockKeys, match: Match, ends: Sequence[int]) -> Load | None:
        """Lock, allocate, and let the tiers read; None where pages or the tiers' buffers are
        short."""
        kv_manager, groups, first = self._set.kv_manager, self._set.groups, len(match.pages)
        plan = self._plan_segments(chain, first, ends)
        if plan is None:
            return None
        kv_manager.cache.lock(match.handle)
        end = max(ends)
        further = [] if groups is None else groups.allocate_pages(groups.count_pages(first, end))
        pages = None if further is None else kv_manager.allocate_pages(end - first)
        if further is None or pages is None:
            kv_manager.allocator.free(np.concatenate([NO_PAGES, *(further or ())]))
            kv_manager.cache.unlock(match.handle)
            return None
        job, segments, numbers = self._set.take_job(), dict[int, Segment](), list[np.ndarray]()
        further_keys = [] if groups is None else groups.list_keys(chain.keys, first, end)
        further_numbers = NO_PAGES if groups is None else groups.number_pages(further)
        start = first
        for index, (span, places) in plan.items():
            keys = [*chain.keys[span.start : span.stop], *(further_keys[place] for place in places)]
            blocks = self._set.tiers[index].tier.load(job, keys)
            if blocks is None:
                break
            segments[index], start = Segment(blocks, len(span)), span.stop
            numbers += [pages[span.start - first : span.stop - first], further_numbers[places]]
        if groups is not None and len(segments) < len(plan):
            for index in segments:
                self._set.tiers[index].tier.finish(job)
            segments, start = {}, first
        kv_manager.allocator.free(pages[start - first :])
        if not segments:
            kv_manager.allocator.free(np.concatenate([NO_PAGES, *further]))
            kv_manager.cache.unlock(match.handle)
            return None
        kept, copied = np.array(tokens[: start * self._set.page_size]), np.concatenate(numbers)
        load = Load(
            job, chain.keys[first], kept, request.namespace, request.priority, match, pages[: start - first], further, copied, segments
        )
        self._loads[job] = self._by_key[load.key] = load
        # Results of tiers in memory come while the blocks are copied. Where the step that is being
        # scheduled copies one of the pages, `take_result` begins the copy, after the launch.
        if all(self._set.tiers[index].is_in_memory for index in segments) and (groups is None or groups.may_write(further)):
            self._copy(load, [block for segment in segments.values() for block in segment.blocks])
        return load

    # progress -------------------------------------------------------------------------------------

    def take_result(self, index: int, result: KVTierResult) -> bool:
        """A tier has read blocks. -> whether the job is a load. When all tiers have, the leading
        blocks are copied to pages."""
        load = self._loads.get(result.job)
        if load is None or index not in load.segments:
            return False
        self._set.log_error(index, result.error)
        load.segments[index].num_ready = result.num_blocks
        if not load.is_read:
            return True
        blocks = load.list_ready()
        if load.num_copied:
            if load.is_copied:
                self._complete(load)
        elif blocks:
            self._copy(load, blocks)
        else:
            self._fail(load)
        return True

    def end_copy(self, job: int) -> bool:
        """The mover has written the pages of a load. -> whether the job is a load."""
        load = self._loads.get(job)
        if load is None:
            return False
        load.is_copied = True
        if load.is_read:
            self._complete(load)
        elif not load.rids:
            self._abandon(load)
        return True

    def _copy(self, load: Load, blocks: Sequence[torch.Tensor]) -> None:
        load.num_copied = len(blocks)
        self._set.mover.load(load.job, load.numbers[: len(blocks)], blocks)

    def _fail(self, load: Load) -> None:
        self.num_failed += 1
        self._abandon(load)

    def _complete(self, load: Load) -> None:
        """Blocks are read and copied: insert them in the prefix cache."""
        if not (ready := load.list_ready()):
            self._fail(load)
            return
        kv_manager, size, first = self._set.kv_manager, self._set.page_size, len(load.match.pages)
        groups, count = self._set.groups, min(len(ready), load.num_blocks)
        self._finish(load)
        pages = np.concatenate((load.match.pages, load.pages[:count]))
        for page in load.pages.tolist() if self._set.noted else ():
            self._set.noted.pop(page, None)  # of a block that it held before
        offers = () if groups is None else groups.make_offers(len(pages), load.further)
        inserted = kv_manager.insert_prefix(load.tokens[: len(pages) * size], pages, load.namespace, load.priority, offers)
        kv_manager.cache.unlock(load.match.handle)
        num_duplicates = max(0, inserted.num_cached // size - first)
        unused = np.array(inserted.unused, np.int32)
        kv_manager.allocator.free(np.concatenate((load.pages[:num_duplicates], load.pages[count:], unused)))
        is_short = count < load.num_blocks
        for index, segment in load.segments.items():
            loaded, name = min(segment.num_tokens, count) * size, self._set.tiers[index].name
            self._set.counts[index].loaded += loaded
            for wait in [self._waits[rid] for rid in load.rids] if loaded else ():
                wait.loaded[name] = wait.loaded.get(name, 0) + loaded
            count -= min(segment.num_tokens, count)
        self.num_failed += is_short
        self._release(load, computes=is_short)

    def abandon_reads(self) -> None:
        """Abandon the loads whose blocks are not being copied. Their requests compute."""
        for load in [each for each in self if not each.is_writing]:
            self._abandon(load)

    def expire(self) -> None:
        """End the waits for loads whose deadline has passed."""
        now = self._set.clock()
        for load in list(self):
            for rid in list(load.rids):
                wait = self._waits[rid]
                if wait.deadline is not None and now >= wait.deadline:
                    if self._extend(load, wait, now):
                        continue
                    wait.computes = True
                    self.num_late += 1
                    self._set.log_error(*load.describe_delay())
                    self._leave(rid, wait)

    def _extend(self, load: Load, wait: Wait, now: float) -> bool:
        """Move the deadline of a wait for blocks of a peer, if some came since the last one."""
        received = self._set.count_received()
        if wait.num_extensions >= MAX_EXTENSIONS or received <= wait.num_received or not self._set.is_from_peer(load.segments):
            return False
        wait.deadline, wait.num_received, wait.num_extensions = now + DEADLINE_MARGIN, received, wait.num_extensions + 1
        return True

    def list_handles(self) -> list[Any]:
        return [load.match.handle for load in self]

    def _abandon(self, load: Load) -> None:
        """End a load whose pages nothing writes to."""
        self._finish(load)
        self._set.kv_manager.cache.unlock(load.match.handle)
        self._set.kv_manager.allocator.free(load.list_pages())
        self._release(load, computes=True)

    def _finish(self, load: Load) -> None:
        for index in load.segments:
            self._set.tiers[index].tier.finish(load.job)
        del self._loads[load.job]
        del self._by_key[load.key]
        self._num_ended += 1

    def _release(self, load: Load, *, computes: bool) -> None:
        """The requests of a load go on: they compute, or are looked up again, since more blocks may
        be missing."""
        for rid in load.rids:
            self._waits[rid].load, self._waits[rid].computes = None, computes
        load.rids.clear()


def _expects_blocks(request: Request) -> bool:
    """Whether another server has blocks of the request's prompt."""
    return request.transfer is not None and bool(request.transfer.host)
