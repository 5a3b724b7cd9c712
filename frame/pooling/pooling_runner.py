"""`PoolingRunner`: runs scheduled batches of a model that embeds or classifies.

A step builds the batch, runs the forward pass, pools, and copies the vectors to the host. It
samples nothing: a sequence ends with its prompt. Must not know a request: slots and tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.core.execution.async_output import fetch
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.execution.warmup import idle_prompts
from frame.core.interfaces.batch import ScheduledBatch, StepResult, TokenTypes
from frame.core.sampling.batch_layout import compute_layout
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampler
from frame.core.sampling.step_plan import StepArrays
from frame.pooling.vector_head import VectorHead

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.cache_groups import Capacity
    from frame.core.interfaces.model import Model, ModelConfig
    from frame.core.interfaces.runner import PendingStep
    from frame.core.kv_cache.kv_pool import KVPool
    from frame.core.sampling.batch_layout import BatchLayout


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """The output of a pooling step: one vector per row whose prompt is complete."""

    step: int
    pooled: torch.Tensor  # float32 [rows, width]

    def tensors(self) -> list[torch.Tensor]:
        return [self.pooled]

    def result(self, arrays: list[np.ndarray]) -> StepResult:
        (pooled,) = arrays
        broken = ~np.isfinite(pooled).all(axis=1)
        invalid = broken if broken.any() else None
        return StepResult(step=self.step, token_ids=np.empty(0, np.int32), pooled=pooled, invalid=invalid)


class PoolingRunner(TorchModelRunner):
    """One rank's runner of a pooling model."""

    def __init__(
        self, model: Model, model_config: ModelConfig, context: BuildContext, pool: KVPool, head: VectorHead, capacity: Capacity
    ) -> None:
        slots = context.limits.max_running_requests
        super().__init__(model, model_config, context, pool, Sampler(Processors((), slots), TORCH), capacity)
        self._head = head
        self._second_text_starts = np.zeros(slots + 1, np.int64)  # by slot: index of the first token of the second text; 0: no pair

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start one step; see `TorchModelRunner.launch`."""
        for setup in batch.setups:
            self._second_text_starts[setup.slot] = setup.second_text_start
        return super().launch(batch)

    def warm_up(self, *, is_compiled: bool = False) -> None:
        """Run warm-up prompts over the reserved page, so that kernels are compiled and initialised
        before requests arrive."""
        for batch in idle_prompts(self.context.limits, few=self._stream is None, fresh=True):
            self.launch(batch).wait()

    def _execute(self, batch: ScheduledBatch) -> PendingStep:
        layout = compute_layout(batch)
        arrays = StepArrays(token_types=self._list_token_types(batch, layout))
        forward_batch, tensors = self.inputs.build_forward_batch(batch, layout, arrays)
        if tensors.token_types is not None:
            forward_batch = replace(forward_batch, extensions={TokenTypes: TokenTypes(tensors.token_types)})
        hidden = self._run_model(forward_batch)
        if self.inputs.groups is not None:
            self.inputs.groups.save_states()
        with self._select_rows(forward_batch.logits_indices):
            pooled = self._head(hidden, forward_batch)
        return fetch(PooledOutput(batch.step, pooled), self.streams)

    def _list_token_types(self, batch: ScheduledBatch, layout: BatchLayout) -> np.ndarray | None:
        """The token types of a step with text pairs, int64 [tokens]; None for others."""
        second_text_starts = self._second_text_starts[batch.slots]
        if not second_text_starts.any():
            return None
        starts = np.where(second_text_starts > 0, second_text_starts, np.iinfo(np.int32).max) - batch.num_computed
        places = np.arange(layout.num_tokens) - np.repeat(layout.query_starts[:-1], batch.num_scheduled)
        token_types: np.ndarray = (places >= np.repeat(starts, batch.num_scheduled)).astype(np.int64)
        return token_types
