"""`RequestTable`: the state of running requests as arrays by slot, so that scheduling a decode
touches no request object.

Used by the scheduler's parts (vLLM keeps the same state in `Request` and `InputBatch`). It must not
know policies or the prefix cache; `frame.core.scheduling.kv_cache_manager` writes the page-table
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from frame.core.ipc.inflight_file import hash_request
from frame.core.scheduling.request import Request, RequestStatus

# Flags of `SlotArrays.special`: rows with one are processed one by one when a step is committed,
# all others as arrays.
FIRST_TOKEN = 1  # no token was reported yet: the next one carries the number of cached tokens and the queue time
LOGPROBS = 2
GRAMMAR = 4
PROMPT_LOGPROBS = 8  # or hidden states

TOKEN_BUFFER = 64  # tokens buffered for a slot before they move to `Request.output`
MIN_STOP_WIDTH = 4  # initial columns of `SlotArrays.stop_ids`


@dataclass(slots=True)
class SlotArrays:
    """Counters by slot, int32 [slots] unless said otherwise. "In flight" means launched but not
    committed.

    tokens of a decoding slot:

        [0, num_committed_tokens)           prompt and known output
        [num_committed_tokens, num_tokens)  sampled by steps in flight
        [num_tokens, max_num_tokens)        not sampled yet
    """

    num_computed_tokens: np.ndarray  # tokens whose K and V are in the cache, those in flight included
    num_tokens: np.ndarray  # tokens, those in flight included
    num_committed_tokens: np.ndarray  # tokens that the host knows
    max_num_tokens: np.ndarray  # the request ends when it has so many
    min_num_tokens: np.ndarray  # with fewer tokens, stop tokens do not end the request
    num_pages: np.ndarray  # filled entries of the slot's page-table row
    num_shared: np.ndarray  # the leading ones that belong to the prefix cache
    last_step: np.ndarray  # int64; the last step that has a row of this slot
    epoch: np.ndarray  # int64; incremented when the slot's request leaves, which voids its rows in flight
    can_decode: np.ndarray  # bool; the next row is a decode: the last token was sampled, perhaps in flight, and more may follow
    special: np.ndarray  # uint8; FIRST_TOKEN | LOGPROBS | GRAMMAR | PROMPT_LOGPROBS
    token_buffer: np.ndarray  # [slots, TOKEN_BUFFER]; committed tokens that are not in `Request.output` yet
    token_buffer_len: np.ndarray  # how many of them are filled
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
    """The request slots. The slot of a removed request is assigned again after `recycle_slot`."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.arrays = SlotArrays.empty(num_slots, max_pages)
        self.requests: list[Request | None] = [None] * num_slots
        self.rids: list[str] = [""] * num_slots
        # For other processes, by slot: the hash of the request there, and how many of its tokens
        # were scheduled for prefill. An in-flight file (`frame.core.ipc.inflight_file`) takes the
        # place of this array where one is kept.
        self.inflight = np.zeros((2, num_slots), np.uint64)
        self.num_grammars = 0
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_slots(self) -> int:
        return len(self.requests)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def list_free_slots(self) -> list[int]:
        return list(self._free)

    def get_request(self, slot: int) -> Request:
        """The request in a slot. Raises RuntimeError if the slot is empty."""
        request = self.requests[slot]
        if request is None:
            raise RuntimeError(f"request slot {slot} is empty")
        return request

    def add_request(self, request: Request) -> None:
        """Assign a free slot with an empty page-table row; the request starts from its `tokens`."""
        slot = self._free.pop()
        a = self.arrays
        request.slot, request.state = slot, RequestStatus.RUNNING
        self.requests[slot], self.rids[slot] = request, request.rid
        self.inflight[:, slot] = hash_request(request.rid), 0
        a.num_computed_tokens[slot] = a.num_pages[slot] = a.num_shared[slot] = a.token_buffer_len[slot] = 0
        a.num_tokens[slot] = a.num_committed_tokens[slot] = len(request.tokens)
        a.max_num_tokens[slot] = request.max_num_tokens
        a.min_num_tokens[slot] = request.prompt_len + request.params.min_tokens
        a.special[slot] = _flags_of(request)
        self._set_stop_ids(slot, request.stop_ids)
        self.num_grammars += request.grammar is not None

    def remove_request(self, request: Request) -> None:
        """Remove a request from its slot; rows of the slot in flight are void from now on."""
        slot, a = request.slot, self.arrays
        self.flush_tokens(slot)
        a.epoch[slot] += 1
        a.can_decode[slot] = False
        self.requests[slot], self.rids[slot] = None, ""
        self.inflight[:, slot] = 0
        self.num_grammars -= request.grammar is not None
        request.slot = -1

    def recycle_slot(self, slot: int) -> None:
        """Make the slot of a removed request free again."""
        self._free.append(slot)

    def flush_tokens(self, slot: int) -> None:
        """Move the slot's buffered tokens to `Request.output`."""
        a = self.arrays
        count = int(a.token_buffer_len[slot])
        if count:
            self.get_request(slot).output.frombytes(a.token_buffer[slot, :count].tobytes())
            a.token_buffer_len[slot] = 0

    def append_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Commit one token to each slot. -> how many tokens each has now, int32 [n]."""
        a = self.arrays
        num_committed_tokens = a.num_committed_tokens[slots] + 1
        a.num_committed_tokens[slots] = num_committed_tokens
        at = a.token_buffer_len[slots]
        a.token_buffer[slots, at] = tokens
        at += 1
        a.token_buffer_len[slots] = at
        for row in np.flatnonzero(at == TOKEN_BUFFER).tolist():
            self.flush_tokens(int(slots[row]))
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


def _flags_of(request: Request) -> int:
    flags = 0 if request.is_reported else FIRST_TOKEN
    flags |= LOGPROBS if request.params.logprobs is not None else 0
    flags |= GRAMMAR if request.grammar is not None else 0
    flags |= PROMPT_LOGPROBS if request.wants_prompt_logprobs else 0
    return flags
