"""`StageRunner`: runs one stage of a pipeline. A step is computed in micro-batches, so that all
stages compute at the same time.

Hidden states go to the next stage, and sampled tokens from the last stage to the first, in
asynchronous sends; decode graphs hold what is between them. With overlapping steps, the first stage
computes the next step's first micro-batch while the last stage computes the second one of this
step. Must not know a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from frame.core.execution.decode_graphs import DecodeOutputs, Redraw
from frame.core.execution.input_batch import ForwardInputs, ReplayInputs, StepInputs
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.batch import ForwardBatch, ScheduledBatch, StageInput, StepResult
from frame.core.interfaces.build import BuildContext
from frame.core.interfaces.cache_groups import Capacity
from frame.core.interfaces.collective import Collective, SupportsStartSend, Transfer
from frame.core.interfaces.model import Model, ModelConfig
from frame.core.interfaces.runner import PendingStep, UnsampledStep
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.sampling.prompt_logprobs import PromptScores
from frame.core.sampling.sampler import Sampled, Sampler
from frame.parallel.micro_batches import MicroBatch, join_results, split_batch, whole_batch

ALL = -1  # the number of a micro-batch that is the whole batch


class Sends:
    """Asynchronous sends to one rank of a group, in order."""

    def __init__(self, group: Collective, target: int) -> None:
        self._group = group
        self._start_send = group.start_send if isinstance(group, SupportsStartSend) else None
        self._target = target
        # Tokens of each micro-batch may wait for the first stage, which receives them before it
        # computes one of the same number.
        self._maximum = 2 * group.size + 2
        self._transfers: deque[Transfer] = deque()

    def start(self, tensor: torch.Tensor) -> None:
        """Send a tensor, which must not be written again. Waits where many sends are in
        progress."""
        if len(self._transfers) == self._maximum:
            self._transfers.popleft().wait()
        if self._start_send is None:
            self._group.send(tensor, self._target)
        elif (transfer := self._start_send(tensor, self._target)) is not None:
            self._transfers.append(transfer)


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """The last tokens of rows that the last stage samples: the number of the micro-batch, and
    their slots, int64."""

    number: int
    slots: np.ndarray


class StageRunner(TorchModelRunner):
    """One rank's runner of a stage. The results of steps are those of the last stage; on others
    they are empty."""

    def __init__(
        self, model: Model, model_config: ModelConfig, context: BuildContext, pool: KVPool, sampler: Sampler, capacity: Capacity
    ) -> None:
        super().__init__(model, model_config, context, pool, sampler, capacity)
        if context.pipeline is None:
            raise ValueError("a stage runner needs a context with a pipeline")
        self._pipeline = stage = context.pipeline
        self._hidden_size = model_config.hidden_size
        self._sends = Sends(stage.tokens, 0) if stage.is_last else Sends(stage.hidden, stage.index + 1)
        self._expected: deque[ExpectedTokens] = deque()
        self._received = torch.empty(0)  # [rows, hidden]: what the decode graphs read, on stages after the first

    def _execute(self, batch: ScheduledBatch) -> PendingStep:
        # The other ranks of the last stage wait for tokens that are drawn with a deferred mask, and
        # cannot compute another micro-batch meanwhile.
        micro_batches = [whole_batch(batch, ALL)] if batch.has_deferred_grammar_mask else split_batch(batch, self._pipeline.size)
        if not micro_batches:
            self.inputs.planner.update_slots(batch)
        steps = [self._run_micro_batch(each) for each in micro_batches]
        if any(isinstance(step, UnsampledStep) for step in steps):
            return UnsampledStageStep(batch, micro_batches, steps)
        return StageStep(batch, micro_batches, steps)

    def _run_micro_batch(self, micro_batch: MicroBatch) -> PendingStep | None:
        """Compute a micro-batch. -> None unless this is the last stage."""
        stage = self._pipeline
        if stage.is_last:
            return super()._execute(micro_batch.batch)
        if stage.is_first:
            self._receive_tokens(micro_batch.number)
        inputs = self.inputs.prepare(micro_batch.batch)
        if isinstance(inputs, ReplayInputs):
            self._sends.start(self._replay(inputs).logits.clone())  # the next replay writes the original
        else:
            self._sends.start(self._run_model(self._with_hidden(inputs).batch))
            if self.inputs.groups is not None:
                self.inputs.groups.save_states()
        if stage.is_first and len(micro_batch.sampling_rows):
            self._expected.append(ExpectedTokens(micro_batch.number, micro_batch.batch.slots[micro_batch.batch.samples].astype(np.int64)))
        return None

    def capture_decode_graphs(self, max_rows: int, *, is_dry: bool = False) -> None:
        if not self._pipeline.is_first:
            self._received = torch.zeros(max_rows, self._hidden_size, dtype=self.context.dtype, device=self.context.device)
        super().capture_decode_graphs(max_rows, is_dry=is_dry)

    @property
    def _graph_redraw(self) -> Redraw | None:
        return super()._graph_redraw if self._pipeline.is_last else None

    def _decode(self, batch: ForwardBatch, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> DecodeOutputs:
        """As `TorchModelRunner._decode`; on stages before the last, the hidden states take the
        place of the logits, and nothing is drawn."""
        if not self._pipeline.is_first:
            batch = _add_hidden(batch, self._received[: batch.num_tokens])
        if self._pipeline.is_last:
            return super()._decode(batch, params, slots)
        hidden = self._run_model(batch)
        return DecodeOutputs(batch.token_ids, params["temperature"], hidden)

    def _replay(self, inputs: ReplayInputs) -> DecodeOutputs:
        if not self._pipeline.is_first:
            self._pipeline.hidden.recv(self._received[: len(inputs.rows.slots)], self._pipeline.index - 1)
        return super()._replay(inputs)

    def _forward_logits(self, inputs: ForwardInputs) -> tuple[torch.Tensor | None, PromptScores | None]:
        return super()._forward_logits(self._with_hidden(inputs))

    def _fetch(self, step: int, inputs: StepInputs, sampled: Sampled, prompts: PromptScores | None) -> PendingStep:
        pending = super()._fetch(step, inputs, sampled, prompts)
        if not len(sampled.token_ids):
            return pending
        if inputs.tensors.verification is None:
            self._sends.start(sampled.token_ids.clone())  # the next replay of a graph writes the original
        else:
            self._sends.start(self.inputs.table.last_token.index_select(0, inputs.tensors.verification.slots))
        return pending

    def _with_hidden(self, inputs: ForwardInputs) -> ForwardInputs:
        """The inputs with the hidden states of the stage before; unchanged on the first stage."""
        stage, batch = self._pipeline, inputs.batch
        if stage.is_first:
            return inputs
        hidden = torch.empty(batch.num_tokens, self._hidden_size, dtype=self.context.dtype, device=self.context.device)
        stage.hidden.recv(hidden, stage.index - 1)
        return replace(inputs, batch=_add_hidden(batch, hidden))

    def _receive_tokens(self, number: int) -> None:
        """Store the tokens of all earlier micro-batches of this number in the last-token table."""
        while any(ALL in (number, each.number) or each.number == number for each in self._expected):
            slots = torch.from_numpy(self._expected.popleft().slots).to(self.context.device, non_blocking=True)
            token_ids = self._pipeline.tokens.recv(torch.empty_like(slots), self._pipeline.size - 1)
            self.inputs.table.last_token.index_copy_(0, slots, token_ids)


def _add_hidden(batch: ForwardBatch, hidden: torch.Tensor) -> ForwardBatch:
    return replace(batch, extensions={**batch.extensions, StageInput: StageInput(hidden)})


class StageStep:
    """A step of a stage, in flight."""

    def __init__(self, batch: ScheduledBatch, micro_batches: list[MicroBatch], steps: list[PendingStep | None]) -> None:
        self._batch, self._micro_batches, self._steps = batch, micro_batches, steps

    def wait(self) -> StepResult:
        results = [step.wait() for step in self._steps if step is not None]
        if not results:
            return StepResult(step=self._batch.step, token_ids=np.empty(0, np.int32))
        return join_results(self._batch, self._micro_batches, results)


class UnsampledStageStep(StageStep, UnsampledStep):
    """A step of the last stage with a deferred grammar mask."""

    def sample(self, mask: np.ndarray | None) -> None:
        for micro_batch, step in zip(self._micro_batches, self._steps, strict=True):
            if isinstance(step, UnsampledStep):
                step.sample(None if mask is None else mask[micro_batch.samples])
