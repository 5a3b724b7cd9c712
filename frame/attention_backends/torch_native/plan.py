"""The host part of a step: which rows are computed together, and where their keys are in the cache.

Rows of similar length share one padded group, so that a step costs a few calls instead of one per
request. Depends on no layer: all layers with the same sliding window use the same groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch, HostView, TreeMask
from frame.core.interfaces.drafter import MAX_TREE_KEYS
from frame.core.interfaces.media import MediaSpans

# Measured on two CPU cores: one more call costs about as much as reading SPARE_BYTES of padding or
# computing SPARE_CELLS scores.
FILL = 0.75
SPARE_BYTES = 256 << 10
SPARE_CELLS = 4096
GROUP_BYTES = 4 << 20  # gathered keys and values of one group at most: more would not fit into a core's cache
GPU_GROUP_BYTES = 256 << 20
SLICE_BYTES = 512 << 10  # a row of at least this size is computed alone if its pages are contiguous (without a copy)
MASK_CELLS = 1 << 20  # largest mask that is kept for a step; a larger row is computed alone and masked block by block


@dataclass(frozen=True, slots=True)
class Group:
    """Rows computed in one call, padded to `query_len` queries and `key_len` keys each.

    Padding repeats an element of the same row, so a row never reads another row's data. Without a
    `mask`, the rows' first query is at key `offset`, and query i sees keys 0 … offset + i (within
    the window, if any).
    """

    rows: int
    query_len: int
    key_len: int
    tokens: slice | torch.Tensor  # int64 [rows * query_len]: the queries' token indices in the step
    from_step: bool  # the keys are this step's K and V, not the cache's
    keys: slice | torch.Tensor  # int64 [rows * key_len]: KV slots (or token indices in the step)
    offset: int
    mask: torch.Tensor | None  # additive, [rows, 1, query_len, key_len]
    valid: torch.Tensor | None  # int64 [n]: which of the rows * query_len queries are not padding; None: all
    targets: slice | torch.Tensor  # where the results of the valid queries go, among the step's tokens
    first_key: int = 0  # position in its row of a single row's first key
    ends: torch.Tensor | None = None  # of a row without a mask: keys that each query sees at least, int32 [query_len]


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of a step for one window."""

    decodes: list[Group]
    extends: list[Group]


def split_runs(costs: np.ndarray, budget: int, spare: int, fill: float = FILL) -> Iterator[tuple[int, int]]:
    """Split descending row costs into runs; each row is padded to the cost of the run's first row.

    A run holds rows of at least `fill` of that cost, and more while all padding together costs at
    most `spare`. Padded, it costs at most `budget`, or is a single row.
    """
    start = 0
    while start < len(costs):
        rest, top = costs[start:], max(1, int(costs[start]))
        similar = int(np.searchsorted(-rest, -fill * top, side="right"))
        cheap = int(np.searchsorted(np.cumsum(top - rest), spare, side="right"))
        stop = start + min(max(similar, cheap, 1), max(1, budget // top))
        yield start, stop
        start = stop


def show_spans(mask: torch.Tensor, ends: torch.Tensor, last: torch.Tensor) -> None:
    """Show the keys between a query's own one, `last`, and the end of its span. mask: additive, […,
    queries, keys]; ends, last: […, queries]."""
    keys = torch.arange(mask.shape[-1], device=mask.device)
    mask.masked_fill_((keys > last.unsqueeze(-1)) & (keys < ends.unsqueeze(-1)), 0.0)


class Grouping:
    """Makes the groups of one step for one window. `token_bytes`: size of one cached token of one
    layer."""

    def __init__(
        self,
        batch: ForwardBatch,
        window: int | None,
        dtype: torch.dtype,
        token_bytes: int,
        is_chunked: bool = False,
        reads_spans: bool = True,
    ) -> None:
        host: HostView = batch.host
        self.is_chunked = is_chunked and window is not None
        self.device, self.dtype, self.window = batch.token_ids.device, dtype, window
        self.page_table, self.page_size = host.page_table, batch.kv.page_size
        self.slots = host.slots.astype(np.int64)
        self.queries = host.query_lens.astype(np.int64)
        ends = host.seq_lens.astype(np.int64)
        prefix = ends - self.queries
        # first key that any of the row's queries sees
        if window is None:
            self.starts = np.zeros_like(ends)
        else:
            self.starts = prefix // window * window if self.is_chunked else np.maximum(prefix - window + 1, 0)
        self.keys = ends - self.starts
        self.prefix = prefix - self.starts
        self.first_token = np.cumsum(self.queries) - self.queries
        self.trees = batch.get(TreeMask)
        if self.trees is not None and window is not None:
            raise ValueError("layers with windows cannot verify trees of drafted tokens; use a drafter of chains")
        self.spans = batch.get(MediaSpans) if reads_spans else None
        self.token_bytes = token_bytes

    @property
    def group_bytes(self) -> int:
        return GROUP_BYTES if self.device.type == "cpu" else GPU_GROUP_BYTES

    def make_groups(self, num_decodes: int) -> Groups:
        """The groups of a causal step whose first `num_decodes` rows are decodes."""
        rows = np.arange(len(self.queries))
        decodes = rows[:num_decodes]
        extends = rows[num_decodes:]
        fresh = (self.prefix[extends] == 0) & (self.starts[extends] == 0)
        if self.window is not None:
            fresh &= self.keys[extends] <= self.window
        if self.spans is not None:  # every row gets a mask
            fresh &= False
        return Groups(
            decodes=list(self._decodes(decodes)),
            extends=[*self._fresh(extends[fresh]), *self._prefixed(extends[~fresh])],
        )

    def make_bidirectional_groups(self) -> Groups:
        """Groups of an encoder's rows: whole prompts whose tokens see the whole row. The mask hides
        padding."""
        rows = np.argsort(-self.queries, kind="stable")
        groups = []
        for start, stop in split_runs(self.queries[rows] ** 2, MASK_CELLS, SPARE_CELLS):
            some = np.sort(rows[start:stop])
            groups.append(self._padded(some, from_step=True, bidirectional=True))
        return Groups(decodes=[], extends=groups)

    def _decodes(self, rows: np.ndarray) -> Iterator[Group]:
        large = self.keys[rows] * self.token_bytes >= SLICE_BYTES
        for row in rows[large]:
            piece = self._contiguous(row)
            if piece is None:
                large[row] = False  # decodes are rows 0 … n - 1, so the row is its own index here
            else:
                yield self._single(row, piece)
        rows = rows[~large]
        rows = rows[np.argsort(-self.keys[rows], kind="stable")]
        for start, stop in split_runs(self.keys[rows] * self.token_bytes, self.group_bytes, SPARE_BYTES):
            yield self._padded(np.sort(rows[start:stop]))

    def _fresh(self, rows: np.ndarray) -> Iterator[Group]:
        """Prompts from their first token on: the keys are this step's own, and the cache is not
        read."""
        rows = rows[np.argsort(-self.queries[rows], kind="stable")]
        for start, stop in split_runs(self.queries[rows] ** 2, MASK_CELLS, SPARE_CELLS, fill=1.0):
            yield self._padded(np.sort(rows[start:stop]), from_step=True)

    def _prefixed(self, rows: np.ndarray) -> Iterator[Group]:
        rows = rows[np.argsort(-self.queries[rows], kind="stable")]
        for start, stop in split_runs(self.queries[rows], len(rows) * MASK_CELLS, 0):
            similar = rows[start:stop]
            similar = similar[np.argsort(-self.keys[similar], kind="stable")]
            costs = self.keys[similar] * int(self.queries[similar].max())
            for first, last in split_runs(costs, MASK_CELLS, SPARE_CELLS):
                some = np.sort(similar[first:last])
                yield self._padded(some) if len(some) > 1 else self._single(some[0], self._contiguous(some[0]))

    def _single(self, row: int, piece: slice | None) -> Group:
        tokens = slice(int(self.first_token[row]), int(self.first_token[row] + self.queries[row]))
        query_len, key_len, rows = int(self.queries[row]), int(self.keys[row]), np.array([row])
        is_masked = query_len * key_len <= MASK_CELLS or (self.trees is not None and row in self.trees.rows)
        return Group(
            rows=1,
            query_len=query_len,
            key_len=key_len,
            tokens=tokens,
            from_step=False,
            keys=piece if piece is not None else self._device(self._cache_slots(rows, key_len)),
            offset=int(self.prefix[row]),
            mask=self._causal_mask(rows, query_len, key_len, from_step=False) if is_masked else None,
            valid=None,
            targets=tokens,
            first_key=int(self.starts[row]),
            ends=None if self.spans is None or is_masked else self.spans.ends[tokens] - int(self.starts[row]),
        )

    def _padded(self, rows: np.ndarray, from_step: bool = False, bidirectional: bool = False) -> Group:
        queries, keys = self.queries[rows], self.keys[rows]
        query_len, key_len = int(queries.max()), int(keys.max())
        steps = np.arange(query_len)
        tokens = self.first_token[rows, None] + np.minimum(steps, queries[:, None] - 1)
        targets: slice | torch.Tensor
        valid = None
        if (queries < query_len).any():
            filled = np.flatnonzero(steps < queries[:, None])
            valid, targets = self._device(filled), self._device(tokens.reshape(-1)[filled])
            places: slice | torch.Tensor = self._device(tokens)
        else:
            places = targets = self._tokens(tokens)
        return Group(
            rows=len(rows),
            query_len=query_len,
            key_len=key_len,
            tokens=places,
            from_step=from_step,
            keys=places if from_step else self._device(self._cache_slots(rows, key_len)),
            offset=int(self.prefix[rows[0]]),
            mask=self._padding_mask(rows, key_len) if bidirectional else self._causal_mask(rows, query_len, key_len, from_step),
            valid=valid,
            targets=targets,
        )

    def _padding_mask(self, rows: np.ndarray, key_len: int) -> torch.Tensor | None:
        """Additive [rows, 1, 1, key_len]; None if no row is padded."""
        hidden = np.arange(key_len) >= self.keys[rows, None]
        if not hidden.any():
            return None
        return self._copy(torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)[:, None, None])

    def _causal_mask(self, rows: np.ndarray, query_len: int, key_len: int, from_step: bool) -> torch.Tensor | None:
        """Additive [rows, 1, query_len, key_len]; None if nothing is masked."""
        # prompts padded at their end need no mask: a valid query never sees the padding after it
        has_trees = self.trees is not None and bool(np.isin(rows, self.trees.rows).any())
        if from_step or (query_len == 1 and not has_trees and bool((self.keys[rows] == key_len).all())):
            return None
        last = self.prefix[rows, None] + np.minimum(np.arange(query_len), self.queries[rows, None] - 1)  # [rows, queries]
        keys = np.arange(key_len)
        hidden = keys > last[..., None]
        if self.is_chunked and self.window is not None:
            starts = self.starts[rows, None]
            hidden |= keys < ((last + starts) // self.window * self.window - starts)[..., None]
        elif self.window is not None:
            hidden |= keys <= last[..., None] - self.window
        mask = self._copy(torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf))
        if has_trees:
            self._hide_branches(mask, rows)
        if self.spans is not None and query_len > 1:
            tokens = self.first_token[rows, None] + np.minimum(np.arange(query_len), self.queries[rows, None] - 1)
            ends = self.spans.ends.index_select(0, self._device(tokens)) - self._device(np.repeat(self.starts[rows], query_len))
            show_spans(mask, ends.view(len(rows), query_len), self._copy(torch.from_numpy(last)))
        return mask[:, None]

    def _hide_branches(self, mask: torch.Tensor, rows: np.ndarray) -> None:
        """Hide what `TreeMask` hides of these rows. mask: [rows, queries, keys]."""
        assert self.trees is not None
        steps, away = np.arange(mask.shape[1]), np.arange(1, MAX_TREE_KEYS)  # a token's place less that of a key
        keys = self.prefix[rows, None, None] + steps[:, None] - away
        is_inside = np.isin(rows, self.trees.rows)[:, None] & (steps < self.queries[rows, None])
        row, token, index = np.nonzero(is_inside[..., None] & (keys >= 0))
        words = self.trees.bits.index_select(0, self._device(self.first_token[rows[row]] + token))
        is_hidden = (words >> self._device(away[index])) & 1 == 0
        cells = (row * mask.shape[1] + token) * mask.shape[2] + keys[row, token, index]
        mask.view(-1).index_copy_(0, self._device(cells), torch.zeros_like(words, dtype=self.dtype).masked_fill_(is_hidden, -torch.inf))

    def _cache_slots(self, rows: np.ndarray, key_len: int) -> np.ndarray:
        positions = self.starts[rows, None] + np.minimum(np.arange(key_len), self.keys[rows, None] - 1)
        size = self.page_size
        if size & (size - 1):
            pages, offsets = np.divmod(positions, size)
        else:  # shifts: a division would cost more than the rest of the plan
            pages, offsets = positions >> (size.bit_length() - 1), positions & (size - 1)
        slots: np.ndarray = self.page_table[self.slots[rows, None], pages].astype(np.int64) * size + offsets
        return slots

    def _contiguous(self, row: int) -> slice | None:
        """The row's keys as one slice of the cache; None if its pages are not consecutive."""
        start, stop = int(self.starts[row]), int(self.starts[row] + self.keys[row])
        first = start // self.page_size
        pages = self.page_table[self.slots[row], first : (stop - 1) // self.page_size + 1]
        if (np.diff(pages) != 1).any():
            return None
        begin = int(pages[0]) * self.page_size + start % self.page_size
        return slice(begin, begin + stop - start)

    def _tokens(self, tokens: np.ndarray) -> slice | torch.Tensor:
        flat = tokens.reshape(-1)
        if int(flat[-1]) - int(flat[0]) == len(flat) - 1 and (np.diff(flat) == 1).all():
            return slice(int(flat[0]), int(flat[-1]) + 1)
        return self._device(flat)

    def _device(self, indices: np.ndarray) -> torch.Tensor:
        return self._copy(torch.from_numpy(np.ascontiguousarray(indices).reshape(-1)))

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":  # a copy from pageable memory would wait for the stream
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)
