"""`RecordedForward`: the forward pass of a few decodes on a CPU, recorded once and replayed.

Between two GEMMs, which stream all caches full of weights, the interpreter of a forward pass
runs from cold caches. A kernel package that offers `RowOperations.begin_recording` keeps its calls
instead, and later steps of as many rows make all of them in one call. Used by the model runner's
builder. Must not know a model or a package.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frame.core.execution.decode_graphs import bound_lengths

if TYPE_CHECKING:
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.row_operations import RowOperations

_MAX_ROWS = 8  # for more, GEMMs take most of a step, and the kept tensors much memory
_KEPT = 4  # recordings
_MAX_OPERATORS = 8  # of PyTorch in a step; with more, little would be gained
_INPUTS = ("token_ids", "positions", "kv_slots", "request_slots", "seq_lens")
_ALLOCATIONS = (torch.ops.aten.new_empty, torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided)


class _Recorder(TorchDispatchMode):
    """Keeps the calls of the package and the operators of PyTorch between them, in order, and every
    tensor, whose addresses the calls hold."""

    def __init__(self, operations: RowOperations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], object]] = []
        self.kept: list[Any] = []
        self.count = 0  # of operators; more than `_MAX_OPERATORS` if one cannot be repeated
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.kept.append((args, kwargs, result))
        if func.is_view or func.overloadpacket in _ALLOCATIONS:
            return result
        self.count += 1 if isinstance(result, torch.Tensor) else _MAX_OPERATORS + 1
        self.steps += [self._operations.end_recording(), partial(_repeat, func, args, kwargs, result)]
        self._operations.begin_recording()
        return result


def _repeat(func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
    again = func(*args, **kwargs)
    if again is not result:
        result.copy_(again)


@dataclass(frozen=True, slots=True)
class _Recording:
    batch: ForwardBatch
    hidden: torch.Tensor
    recorder: _Recorder

    def replay(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        attention.replay_plan(self.batch.plan, replace(self.batch, host=batch.host))
        for name in _INPUTS:
            getattr(self.batch, name).copy_(getattr(batch, name))
        for step in self.recorder.steps:
            step()
        return self.hidden.clone()


class RecordedForward:
    """`plain` for batches that are not recorded: those with prompts, extensions or several cache
    groups. A number of rows is recorded at the second step in a row that has it."""

    def __init__(self, plain: Callable[[ForwardBatch], torch.Tensor], operations: RowOperations, attention: AttentionBackend) -> None:
        self._plain = plain
        self._operations = operations
        self._attention = attention
        self._recordings: OrderedDict[int, _Recording] = OrderedDict()  # by rows, the last used at the end
        self._last = 0  # rows of the last step
        self._is_useful = True

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        rows = batch.num_rows
        is_repeated, self._last = rows == self._last, rows
        if not self._is_useful or rows > _MAX_ROWS or batch.num_decodes != rows or batch.extensions or batch.views is not None:
            return self._plain(batch)
        recording = self._recordings.get(rows)
        if recording is not None:
            self._recordings.move_to_end(rows)
            return recording.replay(batch, self._attention)
        return self._record(batch) if is_repeated else self._plain(batch)

    def _record(self, batch: ForwardBatch) -> torch.Tensor:
        batch = bound_lengths(replace(batch, **{name: getattr(batch, name).clone() for name in _INPUTS}))
        batch = replace(batch, plan=self._attention.capture_plan(batch))
        recorder = _Recorder(self._operations)
        self._operations.begin_recording()
        try:
            with recorder:
                hidden = self._plain(batch)
        finally:
            recorder.steps.append(self._operations.end_recording())
        if recorder.count > _MAX_OPERATORS:
            self._is_useful = False
            return hidden
        self._recordings[batch.num_rows] = _Recording(batch, hidden, recorder)
        if len(self._recordings) > _KEPT:
            self._recordings.popitem(last=False)
        return hidden.clone()


def record_decodes(plain: Callable[[ForwardBatch], torch.Tensor], context: BuildContext) -> Callable[[ForwardBatch], torch.Tensor]:
    """`plain`, recorded where a kernel package can do so and a step reads nothing of the host."""
    operations, attention = context.row_operations, context.attention
    if operations is None or attention is None or attention.capabilities.graphs == "none" or context.moe_runner is not None:
        return plain
    if context.tp.size > 1 or context.pipeline is not None:  # ranks exchange tensors in the middle of a step
        return plain
    return RecordedForward(plain, operations, attention)
