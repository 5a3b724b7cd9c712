"""`CachedPrefixes`: how much of a prompt each replica has in its cache, as KV events tell.

The router knows the text of a prompt, and events know blocks of tokens. A header of an answer tells
the blocks that its prompt became; `CachedPrefixes` keeps, for the hash of each prefix of whole
blocks of text, the block of tokens that ends there. Parts of a text differ in tokens a byte, so
that place is an estimate; where it lies beyond what two prompts have in common, the second answer
corrects it. Must not know how replicas are chosen.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from frame.entrypoints.router.requests import BLOCK, Prompt
from frame.kv_events.prompt_blocks import PromptBlocks, read_blocks
from frame.kv_events.subscriber import GPU, OTHER, EventReader, Subscription

MAX_PREFIXES = 1 << 19  # of texts that are remembered, the most recently used; about 100 MB
LINGER = 1.0  # seconds in which the events of a request that has ended are on their way
TIER_WEIGHT = 0.7  # of a block that only a cache tier holds, beside one on the device
MAX_CACHES, NUM_PORTS = 64, 1 << 16  # of a replica, whose caches have ports one after the other
_KEYS = (b"authorization", b"x-api-key")  # headers by which servers keep the prefixes of tenants apart


@dataclass(slots=True, eq=False)
class PromptPrefixes:
    """The prefixes of one prompt. keys: of each, the shortest first, within its tenant. length:
    bytes of the whole text."""

    owner: CachedPrefixes
    keys: list[int]
    length: int
    is_cached: bool = False  # whether the chosen replica has all of it, as is known


class CachedPrefixes:
    """What one router knows. One thread uses it."""

    def __init__(self, reader: EventReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader, self._clock = reader, clock
        self._blocks: OrderedDict[int, int] = OrderedDict()  # key of a prefix -> hash of its last block of tokens; 0: it has none
        self._running: dict[int, Counter[str]] = {}  # key of a prefix -> requests with it, by replica
        self._ended: deque[tuple[float, Sequence[int], str]] = deque()  # those that linger: until when

    def follow(self, url: str, told: str) -> Subscription:
        """Read the events of the replica at `url`. told: `KV_EVENTS` of its health. Raises
        ValueError."""
        port, replay_port, num_caches = map(int, told.split())
        if not (port > 0 and replay_port >= 0 and 0 < num_caches <= MAX_CACHES and max(port, replay_port) + num_caches <= NUM_PORTS):
            raise ValueError(f"it names the ports {told[:40]!r}")
        host = urlsplit(url).hostname or ""  # another host than the replica's would be contacted for it
        host = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        return self._reader.subscribe(f"{host}:{port}", f"{host}:{replay_port}" if replay_port else "", num_caches)

    def read(self, prompt: Prompt, headers: Iterable[tuple[bytes, bytes]]) -> PromptPrefixes | None:
        """The prefixes of a request's prompt; None: it has none of a whole block, or there are
        several prompts."""
        if not prompt.blocks or not prompt.length:
            return None
        tenant = hash(tuple(value for name, value in headers if name in _KEYS))
        return PromptPrefixes(self, [key ^ tenant for key in prompt.blocks], prompt.length)

    def find_shares(self, prefixes: PromptPrefixes, replicas: Mapping[int, tuple[str, Subscription | None]]) -> dict[int, float]:
        """The share of the prompt that each replica has, by number, of those whose events are read.
        Empty: nothing of the prompt is known. `replicas`: their names and events, by number."""
        blocks, keys = list[int](), prefixes.keys
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                break
            blocks.append(block)
            self._blocks.move_to_end(key)
        if not blocks or not blocks[-1]:
            return {}
        self._end_lingering()
        return {
            number: self._find_depth(name, events.indexes, blocks, keys) / len(keys)
            for number, (name, events) in replicas.items()
            if events is not None and events.is_live
        }

    def _find_depth(self, name: str, indexes: Sequence[Mapping[int, int]], blocks: Sequence[int], keys: Sequence[int]) -> float:
        """How many prefixes a replica has."""
        depth = 0.0
        for index in indexes:
            either = _count_held(blocks, index, GPU | OTHER)
            device = _count_held(blocks[:either], index, GPU)
            depth = max(depth, device + TIER_WEIGHT * (either - device))
        running = self._running
        return max(depth, bisect_left(keys, True, key=lambda key: name not in running.get(key, ())) if running else 0)

    def learn(self, prefixes: PromptPrefixes, value: bytes) -> None:
        """A replica told the blocks of a prompt, or that it cannot."""
        try:
            told = read_blocks(value)
        except ValueError:
            told = None
        if told is None:
            for key in prefixes.keys:
                self._blocks.pop(key, None)
            return
        hashes, last = frozenset(told.hashes), 0
        for number, key in enumerate(prefixes.keys, 1):
            block = self._blocks.get(key)
            if block is None or block not in hashes:
                estimate = _find_block(told, number * BLOCK / prefixes.length)
                if estimate is None:
                    break
                block = last if block and last else estimate  # the one before lies beyond what two prompts have in common
            last = self._blocks[key] = block
            self._blocks.move_to_end(key)
        while len(self._blocks) > MAX_PREFIXES:
            self._blocks.popitem(last=False)

    def enter(self, prefixes: PromptPrefixes, replica: str) -> None:
        """A replica gets the request: until its end its cache has the prompt, or soon will."""
        for key in prefixes.keys:
            self._running.setdefault(key, Counter())[replica] += 1

    def leave(self, prefixes: PromptPrefixes, replica: str, *, is_refused: bool = False) -> None:
        """The request ended there. `is_refused`: the cache got nothing of it."""
        self._end_lingering()
        if is_refused:
            self._end(prefixes.keys, replica)
        else:
            self._ended.append((self._clock() + LINGER, prefixes.keys, replica))

    def _end_lingering(self) -> None:
        now = self._clock()
        while self._ended and self._ended[0][0] < now:
            _, keys, replica = self._ended.popleft()
            self._end(keys, replica)

    def _end(self, keys: Sequence[int], replica: str) -> None:
        for key in keys:
            counts = self._running[key]
            counts[replica] -= 1
            if not counts[replica]:
                del counts[replica]
                if not counts:
                    del self._running[key]


def _count_held(blocks: Sequence[int], index: Mapping[int, int], media: int) -> int:
    """How many of the first blocks are held: a cache that has one has those before it."""
    return bisect_left(blocks, True, key=lambda block: block != 0 and not index.get(block, 0) & media)


def _find_block(told: PromptBlocks, share: float) -> int | None:
    """The last block within this share of the prompt; 0: it is shorter than one. None: it was not
    told."""
    number = int(share * told.num_tokens) // told.stride
    if number > len(told.hashes):
        return None
    return told.hashes[number - 1] if number else 0
