"""Copies the output of a step to the host: at once on the CPU, to pinned memory with a CUDA event
on CUDA.

Used by the model runners. Must not know how the output was computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from frame.core.interfaces.batch import StepResult
from frame.core.interfaces.runner import DeviceLost, UnsampledStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from frame.core.interfaces.platform import SupportsStreams
    from frame.core.interfaces.runner import PendingStep
    from frame.core.sampling.prompt_logprobs import PromptOutputs
    from frame.core.sampling.sampler import Sampled
    from frame.core.sampling.sampling_metadata import SamplingPlan


class PromptResult(Protocol):
    """Prompt log-probabilities and hidden states of a step, still on the device."""

    def tensors(self) -> list[torch.Tensor]: ...

    def build_outputs(self, arrays: list[np.ndarray]) -> PromptOutputs:
        """Convert the host copies of `tensors()`."""
        ...


class Output(Protocol):
    """The output of one step, on the device."""

    @property
    def step(self) -> int: ...

    def tensors(self) -> list[torch.Tensor]: ...

    def result(self, arrays: list[np.ndarray]) -> StepResult:
        """Build the StepResult from host copies of `tensors()`, which are not written to later."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of a generating step: the sampler's tensors and the plan that maps their rows to
    the batch."""

    step: int
    sampled: Sampled
    plan: SamplingPlan
    prompts: PromptResult | None
    faults: dict[int, str] | None = None  # see `StepResult.faults`
    counts: torch.Tensor | None = None  # int64 [sampling rows]; see `StepResult.counts`
    drafts: torch.Tensor | None = None  # int64 [sampling rows, k]; see `StepResult.drafts`
    order: torch.Tensor | None = None  # int64 [samples]; see `Verified.order`
    alignments: Mapping[int, torch.Tensor] = field(default_factory=dict)  # see `EncoderInputs.alignments`

    def tensors(self) -> list[torch.Tensor]:
        sampled = self.sampled
        first = (sampled.token_ids, sampled.best)
        scores = (sampled.logprobs, sampled.top_ids, sampled.top_logprobs, sampled.listed_logprobs)
        tensors = (*first, self.counts, self.drafts, self.order, *scores)
        others = [*(self.prompts.tensors() if self.prompts else ()), *self.alignments.values()]
        return [*(tensor for tensor in tensors if tensor is not None), *others]

    def result(self, arrays: list[np.ndarray]) -> StepResult:
        """Build the StepResult from host copies of `tensors()`, which are not written to later."""
        end = len(arrays) - len(self.alignments)
        arrays, aligned = arrays[:end], arrays[end:]
        token_ids, best = arrays[:2]
        counts, drafts = (arrays.pop(2).astype(np.int32) if each is not None else None for each in (self.counts, self.drafts))
        order = None if self.order is None else arrays.pop(2)
        if order is not None:
            token_ids, best = token_ids[order], best[order]
        is_finite = np.isfinite(best)
        values: dict[str, Any] = {}
        if self.plan.logprob_rows is not None:
            names = ("logprobs", "top_ids", "top_logprobs", "listed_logprobs")[: 3 + (self.sampled.listed_logprobs is not None)]
            values = {name: _spread(array, self.plan) for name, array in zip(names, arrays[2 : 2 + len(names)], strict=True)}
            if order is not None:
                values = {name: array[order] for name, array in values.items()}
        prompts = self.prompts.build_outputs(arrays[2 + len(values) :]) if self.prompts else None
        return StepResult(
            step=self.step,
            token_ids=token_ids.astype(np.int32),
            counts=counts,
            order=order,
            drafts=drafts,
            invalid=None if is_finite.all() else ~is_finite,
            banned=None if is_finite.all() else np.isneginf(best),
            prompt_logprobs=None if prompts is None else prompts.logprobs,
            hidden_states=None if prompts is None else prompts.states,
            faults=self.faults,
            alignments=dict(zip(self.alignments, aligned, strict=True)),
            **values,
        )


class MaskedStep(UnsampledStep):
    """A step with a deferred grammar mask: `sample` draws its tokens."""

    def __init__(self, finish: Callable[[np.ndarray | None], PendingStep]) -> None:
        self._finish = finish
        self._step: PendingStep | None = None

    def sample(self, mask: np.ndarray | None) -> None:
        self._step = self._finish(mask)

    def wait(self) -> StepResult:
        if self._step is None:
            raise RuntimeError("`wait` was called before `sample` of a step with a deferred grammar mask")
        return self._step.wait()


class DoneStep:
    """A step that has completed synchronously."""

    def __init__(self, output: Output) -> None:
        self._result = output.result([tensor.numpy() for tensor in output.tensors()])

    def wait(self) -> StepResult:
        return self._result


class QueuedStep:
    """A step in flight on a stream.

    The constructor queues copies to pinned memory behind the step, of more than two tensors as one;
    `wait` blocks on the event after them.
    """

    def __init__(self, output: Output, platform: SupportsStreams) -> None:
        self._output = output
        self._device = output.tensors()  # kept alive until the copies are done
        self._forms = [(tensor.shape, str(tensor.dtype).removeprefix("torch.")) for tensor in self._device]
        if len(self._device) > 2:
            self._device = [torch.cat([tensor.contiguous().view(-1).view(torch.int32) for tensor in self._device])]
        self._host = [platform.allocate_pinned(tensor.shape, tensor.dtype) for tensor in self._device]
        for host, tensor in zip(self._host, self._device, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = platform.create_event()
        self._event.record()

    def wait(self) -> StepResult:
        try:
            self._event.synchronize()
        except RuntimeError as error:  # asynchronous errors are reported here; the device's context is unusable then
            raise DeviceLost(f"the device failed in step {self._output.step}: {error}") from error
        arrays = [tensor.numpy().copy() for tensor in self._host]
        if len(arrays) < len(self._forms):
            sizes = [shape.numel() * np.dtype(dtype).itemsize // 4 for shape, dtype in self._forms]
            pieces = np.split(arrays[0], np.cumsum(sizes[:-1]))
            arrays = [piece.view(dtype).reshape(shape) for piece, (shape, dtype) in zip(pieces, self._forms, strict=True)]
        return self._output.result(arrays)


def fetch(output: Output, platform: SupportsStreams | None) -> PendingStep:
    """Start the copy of the output to the host, on the current stream. platform: None where calls
    are synchronous."""
    return DoneStep(output) if platform is None else QueuedStep(output, platform)


def _spread(values: np.ndarray, plan: SamplingPlan) -> np.ndarray:
    """Spread values of the rows with log-probabilities over all sampling rows. The other rows get
    0, which is not read."""
    rows = plan.logprob_rows
    if rows is None or len(rows) == plan.num_rows:
        return values.astype(np.int32) if values.dtype == np.int64 else values
    out = np.zeros((plan.num_rows, *values.shape[1:]), np.int32 if values.dtype == np.int64 else values.dtype)
    out[rows] = values
    return out
