"""`RequestTable`: the state of running requests as arrays, one row a slot, so that a step touches no request object.

Knows nothing of policies or of the prefix cache; pages are written here by `frame.core.scheduling.kv_cache_manager`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frame.core.ipc.inflight_file import hash_request
from frame.core.scheduling.request import Request, RequestStatus

# What makes a row need a look of its own at commit; all others are handled as arrays.
FIRST = 1  # nothing was reported yet, so the number of cached tokens goes with the next token
LOGPROBS = 2
GRAMMAR = 4
PROMPT_LOGPROBS = 8

TOKEN_BUFFER = 64  # tokens that are kept by slot before they move to the request
MIN_STOP_WIDTH = 4


@dataclass(slots=True)
class SlotArrays:
    """Counters by slot, int32 [slots] unless said otherwise. "In flight" means launched but not committed.

    A slot is `can_decode` when its next row is a decode: its last token was sampled (perhaps in flight) and it may have more.
    `epoch` changes whenever a slot's request leaves, so that results in flight for the old one are known as such.
    """

    num_computed_tokens: np.ndarray  # tokens whose K and V are in the cache, those in flight included
    num_tokens: np.ndarray  # tokens, those in flight included
    num_committed_tokens: np.ndarray  # tokens that are committed
    max_num_tokens: np.ndarray
    min_num_tokens: np.ndarray  # below it stop tokens do not stop
    num_pages: np.ndarray  # filled entries of the slot's page-table row
    num_shared: np.ndarray  # leading pages of those that belong to the prefix cache
    last_step: np.ndarray  # int64; the last step that has a row of this slot
    epoch: np.ndarray  # int64
    can_decode: np.ndarray  # bool
    special: np.ndarray  # uint8; FIRST | LOGPROBS | GRAMMAR | PROMPT_LOGPROBS
    token_buffer: np.ndarray  # [slots, RECENT]; committed tokens that are not in `request.output` yet
    token_buffer_len: np.ndarray
    stop_ids: np.ndarray  # [slots, width], padded with -1
    page_table: np.ndarray  # [slots, max pages]

    @classmethod
    def empty(cls, num_slots: int, max_pages: int) -> SlotArrays:
        def counters() -> np.ndarray:
            return np.zeros(num_slots, np.int32)

        return cls(
            num_computed_tokens=counters(),
            num_tokens=counters(),
            num_committed_tokens=counters(),
            max_num_tokens=counters(),
            min_num_tokens=counters(),
            num_pages=counters(),
            num_shared=counters(),
            last_step=np.full(num_slots, -1, np.int64),
            epoch=np.zeros(num_slots, np.int64),
            can_decode=np.zeros(num_slots, np.bool_),
            special=np.zeros(num_slots, np.uint8),
            token_buffer=np.zeros((num_slots, TOKEN_BUFFER), np.int32),
            token_buffer_len=counters(),
            stop_ids=np.full((num_slots, MIN_STOP_WIDTH), -1, np.int32),
            page_table=np.zeros((num_slots, max_pages), np.int32),
        )


class RequestTable:
    """Slots and who is in them. A slot that was left is handed out again only after `recycle`."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.arrays = SlotArrays.empty(num_slots, max_pages)
        self.requests: list[Request | None] = [None] * num_slots
        self.rids: list[str] = [""] * num_slots
        self.inflight = np.zeros((2, num_slots), np.uint64)  # for other processes: marks of the requests in the slots, prefilled tokens
        self.num_grammars = 0
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_slots(self) -> int:
        return len(self.requests)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_slots(self) -> list[int]:
        return list(self._free)

    def request(self, slot: int) -> Request:
        found = self.requests[slot]
        if found is None:
            raise RuntimeError(f"request slot {slot} is empty")
        return found

    def enter(self, request: Request) -> None:
        """Give a request a slot; its page-table row is empty. `request.tokens` is what it starts from."""
        slot = self._free.pop()
        a = self.arrays
        request.slot, request.state = slot, RequestStatus.RUNNING
        self.requests[slot], self.rids[slot] = request, request.rid
        self.inflight[:, slot] = hash_request(request.rid), 0
        a.num_computed_tokens[slot] = a.num_pages[slot] = a.num_shared[slot] = a.token_buffer_len[slot] = 0
        a.num_tokens[slot] = a.num_committed_tokens[slot] = len(request.tokens)
        a.max_num_tokens[slot] = request.max_num_tokens
        a.min_num_tokens[slot] = request.prompt_len + request.params.min_tokens
        a.special[slot] = _special(request)
        self._set_stop_ids(slot, request.stop_ids)
        self.num_grammars += request.grammar is not None

    def leave(self, request: Request) -> None:
        """Take a request out; whatever is in flight for the slot is void from now on."""
        slot, a = request.slot, self.arrays
        self.flush(slot)
        a.epoch[slot] += 1
        a.can_decode[slot] = False
        self.requests[slot], self.rids[slot] = None, ""
        self.inflight[:, slot] = 0
        self.num_grammars -= request.grammar is not None
        request.slot = -1

    def recycle(self, slot: int) -> None:
        self._free.append(slot)

    def flush(self, slot: int) -> None:
        """Move the slot's recent tokens to its request."""
        a = self.arrays
        count = int(a.token_buffer_len[slot])
        if count:
            self.request(slot).output.frombytes(a.token_buffer[slot, :count].tobytes())
            a.token_buffer_len[slot] = 0

    def append(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Commit one token to each slot; returns how many tokens each has now."""
        a = self.arrays
        num_committed_tokens = a.num_committed_tokens[slots] + 1
        a.num_committed_tokens[slots] = num_committed_tokens
        at = a.token_buffer_len[slots]
        a.token_buffer[slots, at] = tokens
        at += 1
        a.token_buffer_len[slots] = at
        for row in np.flatnonzero(at == TOKEN_BUFFER).tolist():
            self.flush(int(slots[row]))
        return num_committed_tokens

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        a = self.arrays
        width = a.stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((self.num_slots, len(stop_ids)), -1, np.int32)
            wider[:, :width] = a.stop_ids
            a.stop_ids = wider
        a.stop_ids[slot] = -1
        a.stop_ids[slot, : len(stop_ids)] = stop_ids


def _special(request: Request) -> int:
    flags = 0 if request.is_reported else FIRST
    flags |= LOGPROBS if request.params.logprobs is not None else 0
    flags |= GRAMMAR if request.grammar is not None else 0
    flags |= PROMPT_LOGPROBS if request.wants_prompt_logprobs else 0
    return flags
