"""Decode steps as CUDA graphs: forward pass, head and plain sampling of a fixed number of rows,
captured once and replayed each step.

A graph serves every batch of decodes up to its size; the rows that are left over belong to the
padding slot and write to page 0. A short prompt is a few decodes more, whose tokens are known and
whose successors, but for the last one's, nobody wants. What changes from step to step lies in
`InputBuffers`, at addresses that stay. On a CPU, where there are no graphs, a captured step is
computed anew. Knows no request and no plugin.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch, HostView

if TYPE_CHECKING:
    from frame.core.execution.input_batch import InputBatch, TokenRows
    from frame.core.interfaces.attention import AttentionBackend

_NUM_BUFFERS = 3
_ALIGNMENT = 16


class DecodeOutputs(NamedTuple):
    """What a captured step leaves behind, good until the next replay. Each has one row a row of the
    batch."""

    token_ids: torch.Tensor  # int64 [rows]
    best: torch.Tensor  # float32 [rows]; the greatest logit
    logits: torch.Tensor  # [rows, vocab]


class Captured(Protocol):
    def replay(self) -> None: ...


# (batch, the draw's parameters by name, where in the last-token table each row's token is written,
# int64 [rows]) -> outputs
Body = Callable[[ForwardBatch, Mapping[str, torch.Tensor], torch.Tensor], DecodeOutputs]
# (what the body left behind, parameters and places as above) -> the same with other tokens, also in
# the last-token table
Redraw = Callable[[DecodeOutputs, Mapping[str, torch.Tensor], torch.Tensor], DecodeOutputs]

_DRAW: dict[str, np.generic] = {"temperature": np.float32(0.0), "uniform": np.float64(0.5)}  # values in rows that nobody uses
_FILTERS: dict[str, np.generic] = {"top_k": np.int32(0), "top_p": np.float32(1.0), "log_min_p": np.float32(-np.inf)}


def graph_sizes(most: int) -> tuple[int, ...]:
    """The batch sizes that are captured, for batches of up to `most` rows: close together where a
    step's time depends on them."""
    steps = [1, 2, 4, *range(8, 49, 8), *range(64, 129, 16), *range(160, 257, 32), *range(320, 513, 64)]
    steps += range(640, most, 128)
    return (*(size for size in steps if size < most), most)


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, garbage waits: what an earlier engine of this process left gives memory and graphs
    back by calls that break a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class InputBuffers:
    """The arrays of a decode step, by row, in one pinned layout that one copy moves to the device.
    Buffers are used in turn, so that a copy in flight is not overwritten."""

    def __init__(self, most: int, device: torch.device, padding: Mapping[str, np.generic]) -> None:
        """`padding`: the value of each array in a row that nobody uses; its type is the array's."""
        self._padding = padding
        self._turn = 0
        offsets, total = {}, 0
        for name, value in padding.items():
            offsets[name] = total
            total += -(-value.nbytes * most // _ALIGNMENT) * _ALIGNMENT
        is_cuda = device.type == "cuda"
        self._pinned = [torch.empty(total, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(_NUM_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_BUFFERS)] if is_cuda else []
        self._host = [_views(pinned.numpy(), offsets, padding, most) for pinned in self._pinned]
        self._target = torch.empty(total, dtype=torch.uint8, device=device)
        self.tensors = {
            name: self._target[offset : offset + padding[name].nbytes * most].view(_torch_dtype(padding[name].dtype))
            for name, offset in offsets.items()
        }
        for host in self._host:
            for name, value in padding.items():
                host[name][:] = value
        self._target.copy_(self._pinned[0])

    def write(self, arrays: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
        """Bring a step's arrays (all of one length) to the device, padded to `size` rows. -> the
        padded arrays, until the next but one."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        if self._copied:
            self._copied[self._turn].synchronize()
        host = self._host[self._turn]
        for name, array in arrays.items():
            rows = host[name]
            rows[: len(array)] = array
            rows[len(array) : size] = self._padding[name]
        self._target.copy_(self._pinned[self._turn], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        return {name: host[name][:size] for name in arrays}


@dataclass(frozen=True, slots=True)
class _Size:
    """A captured step and the batch that it reads; `filtered` draws other tokens from its
    logits."""

    batch: ForwardBatch
    outputs: DecodeOutputs
    captured: Captured
    filtered: tuple[DecodeOutputs, Captured] | None


class DecodeGraphs:
    """The captured steps of one runner. `capture` once, then `replay`, both on the runner's stream
    and in inference mode."""

    def __init__(
        self,
        body: Body,
        input_batch: InputBatch,
        backend: AttentionBackend,
        sizes: tuple[int, ...],
        device: torch.device,
        redraw: Redraw | None = None,
    ) -> None:
        """`redraw` draws the tokens of steps with filters; without it they are not brought."""
        self._body = body
        self._redraw = redraw
        self._input_batch = input_batch
        self._backend = backend
        self._device = device
        most = sizes[-1]
        padding_slot = input_batch.table.padding_slot
        padding: dict[str, np.generic] = {
            "request_slots": np.int64(padding_slot),
            "token_slots": np.int64(padding_slot),
            "drawn_slots": np.int64(padding_slot),
            "positions": np.int64(0),
            "kv_slots": np.int64(0),
            "seq_lens": np.int32(1),
            **_DRAW,
            **_FILTERS,
        }
        self._buffers = InputBuffers(most, device, padding)
        self._ones = np.ones(most, np.int32)
        self._smallest = np.searchsorted(np.array(sizes), np.arange(most + 1))  # index of the first size that holds so many rows
        self._sizes = sizes
        self._steps: list[_Size] = []

    @property
    def most(self) -> int:
        """The largest batch that has a graph."""
        return self._sizes[-1]

    def capture(self) -> None:
        """Run and capture each size, the largest first, whose memory the smaller ones use again."""
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        counted = torch.arange(self.most + 1, dtype=torch.int64, device=self._device)
        token_ids = torch.zeros(self.most, dtype=torch.int64, device=self._device)
        with uncollected():
            for size in reversed(self._sizes):
                self._steps.insert(0, self._captured(self._batch(size, counted, token_ids), pool))

    def replay(self, tokens: TokenRows, draws: Mapping[str, np.ndarray]) -> DecodeOutputs:
        """Run at most `most` rows of one token each, whose pages and ids are in the table. -> of
        the rows that are sampled. `draws`:
        temperature and uniform number of each of these, and all filters if one has any; empty where
        only the logits are wanted."""
        rows = len(tokens.slots)
        step = self._steps[self._smallest[rows]]
        size = step.batch.num_rows
        arrays = {
            "request_slots": tokens.slots,
            "token_slots": tokens.sources,
            "drawn_slots": tokens.drawn,
            "positions": tokens.positions,
            "kv_slots": tokens.kv_slots,
            "seq_lens": tokens.positions + 1,
            **draws,
        }
        padded = self._buffers.write(arrays, size)
        host = HostView(padded["request_slots"], self._ones[:size], padded["seq_lens"], step.batch.host.page_table)
        self._backend.replay_plan(step.batch.plan, replace(step.batch, host=host))
        step.captured.replay()
        outputs = step.outputs
        if step.filtered is not None and "top_k" in draws:
            outputs, captured = step.filtered
            captured.replay()
        sampled = tokens.num_sampling
        return outputs if sampled == size else DecodeOutputs(*(tensor[:sampled] for tensor in outputs))

    def _batch(self, size: int, counted: torch.Tensor, token_ids: torch.Tensor) -> ForwardBatch:
        """The batch that the graph of a size reads."""
        inputs, table = self._buffers.tensors, self._input_batch.table
        counts = counted.int()
        slots = np.full(size, table.padding_slot, np.int32)
        return ForwardBatch(
            num_decodes=size,
            token_ids=token_ids[:size],
            positions=inputs["positions"][:size],
            kv_slots=inputs["kv_slots"][:size],
            request_slots=inputs["request_slots"][:size],
            seq_lens=inputs["seq_lens"][:size],
            query_lens=torch.ones(size, dtype=torch.int32, device=self._device),
            query_starts=counts[: size + 1],
            page_table=table.pages,
            logits_indices=counted[:size],
            kv=self._input_batch.kv,
            host=HostView(slots, self._ones[:size], self._ones[:size], table.host_pages),
        )

    def _captured(self, batch: ForwardBatch, pool: Any) -> _Size:
        size, table = batch.num_rows, self._input_batch.table
        inputs = {name: tensor[:size] for name, tensor in self._buffers.tensors.items()}
        params = {name: inputs[name] for name in _DRAW}

        def run(planned: ForwardBatch) -> DecodeOutputs:
            # sampled by a step that may still be in flight: the host does not know these ids
            torch.index_select(table.last_token, 0, inputs["token_slots"], out=batch.token_ids)
            return self._body(planned, params, inputs["drawn_slots"])

        plain, planned = (replace(batch, plan=plan(batch)) for plan in (self._backend.plan, self._backend.capture_plan))
        outputs, captured = self._capture(lambda: run(plain), lambda: run(planned), pool)
        redraw = self._redraw
        if redraw is None:
            return _Size(planned, outputs, captured, None)
        filters = {name: inputs[name] for name in (*_DRAW, *_FILTERS)}

        def again() -> DecodeOutputs:
            return redraw(outputs, filters, inputs["drawn_slots"])

        return _Size(planned, outputs, captured, self._capture(again, again, pool))

    def _capture(self, first: Callable[[], DecodeOutputs], run: Callable[[], DecodeOutputs], pool: Any) -> tuple[DecodeOutputs, Captured]:
        outputs = first()  # what compiles or initialises itself does so now
        if pool is None:
            return outputs, _Again(first, outputs)
        torch.cuda.current_stream(self._device).synchronize()
        graph = torch.cuda.CUDAGraph()
        # only this thread's calls are captured: others may use the device meanwhile
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        finally:
            graph.capture_end()
        return outputs, graph


class _Again:
    """A step without a graph: computed again, its results copied to where the first ones are."""

    def __init__(self, run: Callable[[], DecodeOutputs], outputs: DecodeOutputs) -> None:
        self._run = run
        self._outputs = outputs

    def replay(self) -> None:
        for target, source in zip(self._outputs, self._run(), strict=True):
            target.copy_(source)


def _views(buffer: np.ndarray, offsets: Mapping[str, int], padding: Mapping[str, np.generic], most: int) -> dict[str, np.ndarray]:
    return {name: buffer[offset : offset + padding[name].nbytes * most].view(padding[name].dtype) for name, offset in offsets.items()}


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
