"""`TorchModelRunner`: runs scheduled batches on one rank's device.

A step prepares its inputs, replays CUDA graphs or runs the forward pass, samples, and copies its
results to the host asynchronously. `components.build_runner` makes one. Must not know a request,
the scheduler or a plugin by name: slots, tokens and pages only.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from frame.core.errors import ConfigurationError
from frame.core.execution.async_output import MaskedStep, StepOutput, fetch
from frame.core.execution.decode_graphs import PADDED_ROWS, DecodeGraphs, DecodeOutputs, Redraw, list_graph_sizes
from frame.core.execution.input_batch import ForwardInputs, InputBatch, ReplayInputs
from frame.core.execution.piecewise_graphs import PiecewiseGraphs, piece_sizes
from frame.core.execution.warmup import idle_decodes, idle_extends, idle_mixed, idle_prompts
from frame.core.interfaces.batch import EncoderInputs
from frame.core.interfaces.platform import SupportsStreams
from frame.core.interfaces.rank_context import track_silently
from frame.core.interfaces.runner import DeviceLost, ModelRunner
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.sampling.prompt_logprobs import PromptScores
from frame.core.sampling.sampler import Sampled
from frame.core.sampling.verification import RoundSampler, verify_drafts

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from frame.core.execution.drafting import DeviceDrafts
    from frame.core.execution.input_batch import StepInputs
    from frame.core.interfaces.adapter_layers import StepAdapters
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.batch import ForwardBatch, ScheduledBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.cache_groups import Capacity
    from frame.core.interfaces.model import Model, ModelConfig
    from frame.core.interfaces.moe import ExpertBalance
    from frame.core.interfaces.runner import AdapterOrder, PendingOrder, PendingStep
    from frame.core.sampling.sampler import Sampler
    from frame.core.sampling.step_plan import StepArrays, StepPlans

_log = logging.getLogger(__name__)


class Preparation(Protocol):
    """The preparation of an attention backend in the background. `frame.forward.hybrid_attention`
    documents the methods."""

    error: Exception | None

    @property
    def is_done(self) -> bool: ...
    def allow_compilation(self) -> None: ...
    def wait(self) -> None: ...
    def wait_for_estimate(self) -> None: ...


@runtime_checkable
class SwitchingAttention(Protocol):
    """Two attention backends, one of which may be prepared in the background."""

    backends: tuple[AttentionBackend, ...]

    @property
    def preparation(self) -> Preparation | None: ...
    def switch(self, is_ready: bool) -> bool: ...


class TorchModelRunner(ModelRunner):
    """One rank's runner. Steps run in launch order on one stream; tensors that steps share have
    fixed addresses."""

    def __init__(
        self, model: Model, model_config: ModelConfig, context: BuildContext, pool: KVPool, sampler: Sampler, capacity: Capacity
    ) -> None:
        self.capacity = capacity
        self.context = context
        self.model = model
        self.forward: Callable[[ForwardBatch], torch.Tensor] = model.forward  # the builder may set another one
        self.vocab_size = model_config.vocab_size
        platform = context.platform
        self.streams = platform if isinstance(platform, SupportsStreams) else None
        self._stream = None if self.streams is None else self.streams.create_stream()
        is_last = context.pipeline is None or context.pipeline.is_last
        selects = is_last and context.experts is None and model.supports_token_selection  # all groups dispatch as many tokens
        self.inputs = InputBatch(context, pool, sampler, selects_tokens=selects)
        self.processors = sampler.processors
        self.sampler = sampler
        self.decode_graphs: DecodeGraphs | None = None
        self.piecewise_graphs: PiecewiseGraphs | None = None
        self.drafts: DeviceDrafts | None = None  # of a device drafter
        self.balancer: ExpertBalance | None = None  # moves experts; the builder sets it
        self.adapters: StepAdapters | None = None  # the builder sets it
        if self.streams is not None and self._stream is not None:  # work queued so far, such as clearing the KV cache, is on another stream
            self._stream.wait_stream(self.streams.get_current_stream())

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start one step; on the CPU it has completed when this returns. Raises DeviceLost if the
        device has failed."""
        try:
            with torch.inference_mode():
                self._enter_stream()
                if self.balancer is not None:
                    self.balancer.begin_step()
                if self.inputs.media is not None:
                    self.inputs.media.begin_step(batch)
                if self.adapters is None:
                    return self._execute(batch)
                self.adapters.begin_step(batch)
                try:
                    return self._execute(batch)
                finally:
                    self.adapters.end_step()
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed in step {batch.step}: {error}") from error

    def warm_up(self, *, is_compiled: bool = False) -> None:
        """Run warm-up steps over the reserved page, so that kernels are compiled and initialised
        before requests arrive. On a CPU one decode runs, unless `forward` is compiled."""
        few = self._stream is None and not is_compiled
        for batch in idle_decodes(self.inputs.table.padding_slot, few=few):
            self.launch(batch).wait()
        if self._stream is None:
            return
        for batch in (*idle_prompts(self.context.limits), *idle_mixed(self.inputs.table.padding_slot, self.context.limits)):
            self.launch(batch).wait()
            if self.adapters is not None:
                self.adapters.is_warming_up = True
                self.launch(batch).wait()
                self.adapters.is_warming_up = False
        with torch.inference_mode():
            self.sampler.warm_up(torch.zeros(2, self.vocab_size, dtype=self.context.dtype, device=self.context.device))
            if self.inputs.table.has_trees and isinstance(self.inputs.kv, KVPool):
                zero = torch.zeros(1, dtype=torch.int64, device=self.context.device)
                self.inputs.kv.move_tokens(zero, zero, zero, zero)

    @property
    def _preparation(self) -> Preparation | None:
        """The background preparation of an attention backend; None: there is none."""
        attention = self.context.attention
        return attention.preparation if isinstance(attention, SwitchingAttention) else None

    @property
    def can_switch_backend(self) -> bool:
        preparation = self._preparation
        return preparation is not None and preparation.is_done

    def switch_backend(self) -> None:
        """See `ModelRunner.switch_backend`. Warm-up steps run with the new backend, and its decode
        graphs replace the captured ones."""
        began = time.perf_counter()
        with torch.inference_mode():
            self._enter_stream()
            is_stale = self._switch()
        if self.decode_graphs is not None and is_stale:
            maximum = self.decode_graphs.maximum
            self.decode_graphs, self.inputs.max_graph_rows = None, 0  # the new graphs take their memory
            self.capture_decode_graphs(maximum)
        for batch in idle_extends(self.inputs.table.padding_slot, self.context.limits):
            self.launch(batch).wait()
        _log.info("attention backends switched in %.1f s", time.perf_counter() - began)

    def resolve_backend(self) -> None:
        """At the start: switch to the backend that prepares in the background, if no rank has to
        compile anything."""
        preparation = self._preparation
        if preparation is None:
            return
        preparation.wait_for_estimate()
        if self.is_true_on_all_ranks(preparation.is_done):
            self._switch()

    def allow_compilation(self) -> None:
        """At the end of the start: let the attention backend compile kernels in the background."""
        if self._preparation is not None:
            self._preparation.allow_compilation()

    def _switch(self) -> bool:
        """-> whether captured decode graphs use a backend that no longer computes decodes."""
        attention = self.context.attention
        if not isinstance(attention, SwitchingAttention) or attention.preparation is None:
            return False
        attention.preparation.wait()  # a follower's preparation may end later than rank 0's
        return attention.switch(self.is_true_on_all_ranks(attention.preparation.error is None))

    def is_true_on_all_ranks(self, value: bool) -> bool:
        """Whether `value` is true on all ranks. Collective."""
        group = self.context.ep_group
        return value if group.size == 1 else bool(group.all_gather(torch.tensor([int(value)], device=self.context.device), dim=0).min())

    def capture_decode_graphs(self, max_rows: int, *, is_dry: bool = False) -> None:
        """Capture CUDA graphs of decode steps of up to `max_rows` rows; later decodes replay them.
        is_dry: run each size once instead. Raises ConfigurationError if the model or a backend
        cannot be captured or memory does not suffice."""
        # matmuls then pad no rows; experts would be read for rows of padding
        multiple = PADDED_ROWS if self.context.deterministic and self.context.moe_runner is None else 1
        sizes, platform = list_graph_sizes(max_rows, multiple), self.context.platform
        is_last = self.context.pipeline is None or self.context.pipeline.is_last
        vocab_size = self.vocab_size if is_last and self.context.tp.rank == 0 else 0  # the other ranks get rank 0's tokens
        graphs = DecodeGraphs(self._decode, self.inputs, sizes, platform, self._graph_redraw, vocab_size)
        graphs.adapters = self.adapters
        problem = "decode steps cannot be captured in CUDA graphs ({}); set --cuda-graph-max-bs 0"
        track = track_silently if is_dry else self.context.track
        self._capture(partial(graphs.capture, is_dry=is_dry, track=track), problem)
        if not is_dry:
            self.decode_graphs, self.inputs.max_graph_rows = graphs, graphs.maximum
            self.inputs.draws_masked = vocab_size > 0
        if self.drafts is not None:
            problem = "the passes of the drafter cannot be captured in CUDA graphs ({}); set --cuda-graph-max-bs 0"
            self._capture(partial(self.drafts.make_graphs(graphs).capture, is_dry=is_dry, track=track), problem)

    @property
    def _graph_redraw(self) -> Redraw | None:
        """What draws tokens with filters in a graph; None: nothing does."""
        return self._redraw if self.sampler.operations.draw_filtered is not None else None

    def capture_piecewise_graphs(self, max_tokens: int, *, is_dry: bool = False) -> None:
        """Capture CUDA graphs of the computations between the attention calls of steps of up to
        `max_tokens` tokens. Later steps that no decode graph runs replay them. is_dry, errors: as
        of `capture_decode_graphs`."""
        graphs = PiecewiseGraphs(self.model.forward, self.inputs, self.inputs.backend, piece_sizes(max_tokens), self.context.platform)
        graphs.adapters = self.adapters
        problem = "steps with prompts cannot be captured in CUDA graphs ({}); set --prompt-graph-max-tokens 0"
        self._capture(partial(graphs.capture, is_dry=is_dry, track=track_silently if is_dry else self.context.track), problem)
        if not is_dry:
            self.piecewise_graphs = self.inputs.placement = graphs

    def _capture(self, capture: Callable[[], None], problem: str) -> None:
        with torch.inference_mode():
            self._enter_stream()
            try:
                capture()
            except RuntimeError as error:
                raise ConfigurationError(problem.format(str(error).strip().split("\n", 1)[0])) from error

    def start_order(self, order: AdapterOrder) -> PendingOrder:
        return super().start_order(order) if self.adapters is None else self.adapters.start_order(order)

    def list_imbalance(self) -> list[float]:
        """See `ExpertBalance`; empty without one."""
        return [] if self.balancer is None else self.balancer.imbalance

    def close(self) -> None:
        """Wait until the device has finished."""
        if self._stream is not None:
            self._stream.synchronize()

    def _enter_stream(self) -> None:
        """Make the runner's stream the current stream of this thread, for good: entering and
        leaving it would cost 50 µs per step."""
        if self.streams is not None and self._stream is not None:
            self.streams.set_stream(self._stream)

    def _execute(self, batch: ScheduledBatch) -> PendingStep:
        """Prepare the inputs, replay a decode graph or run the forward pass, sample, and start the
        copy of the results to the host."""
        inputs = self.inputs.prepare(batch)
        prompts = None
        if isinstance(inputs, ReplayInputs):
            outputs = self._replay(inputs)
            if inputs.is_masked:
                return MaskedStep(partial(self._draw_masked_step, batch.step, inputs))
            if inputs.plans.sampling.draws:  # the graph drew the tokens
                return self._fetch(batch.step, inputs, Sampled(outputs.token_ids, outputs.best), None)
            logits = outputs.logits if inputs.plans.sampling.num_rows else None
        else:
            logits, prompts = self._forward_logits(inputs)
        if batch.has_deferred_grammar_mask and self.context.tp.rank == 0:  # the other ranks get rank 0's tokens
            return MaskedStep(partial(self._sample_masked, batch.step, inputs, logits, prompts))
        return self._fetch_sampled(batch.step, inputs, logits, prompts)

    def _replay(self, inputs: ReplayInputs) -> DecodeOutputs:
        if self.decode_graphs is None:
            raise RuntimeError("a decode step was prepared for a graph, but no graph is captured")
        outputs = self.decode_graphs.replay(inputs.rows, inputs.plans.sampling.draws, inputs.resolve, is_masked=inputs.is_masked)
        if self.inputs.groups is not None:
            self.inputs.groups.save_states()
        return outputs

    def _forward_logits(self, inputs: ForwardInputs) -> tuple[torch.Tensor | None, PromptScores | None]:
        """Run the model, through piecewise graphs if the inputs are placed for them. -> logits
        [sampling rows, vocab] (None: no row samples) and the scores of prompt tokens (None: no row
        needs them)."""
        plans, placed = inputs.plans, self.piecewise_graphs if inputs.is_placed else None
        if plans.drafting is not None and self.drafts is not None:
            self.drafts.add_hidden_outputs(inputs.batch)
        hidden = self._run_model(inputs.batch) if placed is None else placed.run(inputs.batch)
        if self.inputs.groups is not None:
            self.inputs.groups.save_states()
        if plans.drafting is not None and self.drafts is not None:
            self.drafts.begin_step(inputs.batch, hidden)
        if inputs.logits_indices is not None:
            hidden = hidden.index_select(0, inputs.logits_indices)
        rows, prompts = plans.sampling.num_rows, None
        targets = inputs.tensors.prompt_targets
        indices = inputs.batch.logits_indices if inputs.logits_indices is None else inputs.logits_indices
        if plans.prompts is not None and targets is not None:
            head = partial(self._compute_logits, indices[rows:])
            prompts = PromptScores(plans.prompts, hidden[rows:], targets, head, self.vocab_size, self.sampler.operations)
        return self._compute_logits(indices, hidden[:rows]) if rows else None, prompts

    def _run_model(self, batch: ForwardBatch) -> torch.Tensor:
        """The forward pass; steps with adapters are neither recorded nor compiled."""
        if self.adapters is None or not self.adapters.is_active:
            return self.forward(batch)
        self.adapters.place_tokens(batch, batch.num_tokens)
        self.adapters.plan_tokens(batch.num_tokens)
        return self.model.forward(batch)

    def _compute_logits(self, indices: torch.Tensor, hidden: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The logits of hidden states. indices: int64, from `start` on the tokens they are of."""
        with self._select_rows(indices[start : start + len(hidden)]):
            return self.model.compute_logits(hidden)

    def _select_rows(self, indices: torch.Tensor | None) -> contextlib.AbstractContextManager[object]:
        """See `AdapterLayers.select_rows`."""
        return contextlib.nullcontext() if self.adapters is None else self.adapters.select_rows(indices)

    def _decode(self, batch: ForwardBatch, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> DecodeOutputs:
        """The body of a decode graph."""
        if self.drafts is not None:
            self.drafts.add_hidden_outputs(batch)
        hidden = self._run_model(batch)
        logits, states = self.model.compute_logits(hidden), None if self.drafts is None else self.drafts.read_states(batch, hidden)
        last_tokens = (self.inputs.table.last_token, slots)
        drawn = self.sampler.operations.draw_plain(logits, params["temperature"], params["key"], last_tokens)
        return self._drawn(DecodeOutputs(*drawn, logits, states), slots)

    def _redraw(self, outputs: DecodeOutputs, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> DecodeOutputs:
        """The body of the second graph, of steps with filters."""
        draw, last_tokens = self.sampler.operations.draw_filtered, (self.inputs.table.last_token, slots)
        assert draw is not None, "see _graph_redraw"
        drawn = draw(outputs.logits, params, (outputs.token_ids, outputs.best), last_tokens)
        return self._drawn(DecodeOutputs(*drawn, outputs.logits, outputs.states), slots)

    def _drawn(self, outputs: DecodeOutputs, slots: torch.Tensor) -> DecodeOutputs:
        if self.context.tp.size > 1:
            outputs = outputs._replace(token_ids=self.context.tp.broadcast(outputs.token_ids))
            self.inputs.table.last_token.index_copy_(0, slots, outputs.token_ids)
        return outputs

    def _sample_masked(
        self, step: int, inputs: StepInputs, logits: torch.Tensor | None, prompts: PromptScores | None, mask: np.ndarray | None
    ) -> PendingStep:
        """Draw the tokens of a step with a deferred grammar mask."""
        with torch.inference_mode():
            self._enter_stream()
            if mask is not None and inputs.tensors.sampling is not None:
                inputs.tensors.sampling.grammar = self.inputs.move_grammar_mask(mask)
            return self._fetch_sampled(step, inputs, logits, prompts)

    def _draw_masked_step(self, step: int, inputs: ReplayInputs, mask: np.ndarray | None) -> PendingStep:
        """Draw the tokens of a replayed step with a deferred grammar mask."""
        assert self.decode_graphs is not None, "the step was replayed"
        with torch.inference_mode():
            self._enter_stream()
            grammar = None if mask is None else self.inputs.move_grammar_mask(mask)
            outputs = self.decode_graphs.draw_masked(inputs.rows, inputs.plans.sampling.draws, grammar)
            return self._fetch(step, inputs, Sampled(self.agree_tokens(outputs.token_ids), outputs.best), None)

    def _fetch_sampled(self, step: int, inputs: StepInputs, logits: torch.Tensor | None, prompts: PromptScores | None) -> PendingStep:
        return self._fetch(step, inputs, self._sample(logits, inputs.plans, inputs.tensors), prompts)

    def _fetch(self, step: int, inputs: StepInputs, sampled: Sampled, prompts: PromptScores | None) -> PendingStep:
        """Verify the drafts, if there are any, draft the next tokens, and start the copy of the
        results to the host."""
        plans, counts, drafts, order = inputs.plans, None, None, None
        compared, drafting = inputs.tensors.verification, inputs.tensors.drafting
        if self.processors.sampler is not None and compared is None:
            self.processors.observe_draws(sampled.token_ids, self._find_slots(inputs, len(sampled.token_ids)), plans.sampling.slots)
        if plans.verification is not None and compared is not None:
            verified = verify_drafts(sampled.token_ids, plans.verification, compared)
            self.inputs.table.last_token.index_copy_(0, compared.slots, verified.last)
            counts, order, sampled = verified.counts, verified.order, replace(sampled, token_ids=verified.token_ids)
            if order is not None:
                self._move_accepted(inputs, order, compared.first, counts)
            if self.inputs.groups is not None:
                self.inputs.groups.store_drafted(counts)
            if self.drafts is not None:
                self.inputs.pending.store_counts(compared.slots, counts)
        if plans.drafting is not None and drafting is not None and self.drafts is not None:
            with self._select_rows(None):  # drafters draft with the base's weights
                drafts = self.drafts.draft(sampled.token_ids, counts, plans.drafting, drafting, order)
            if drafts is not None:
                self.inputs.table.store_drafts(drafting.slots, drafts)
        faults = self.processors.find_faults(plans.sampling.slots)
        encoded = inputs.batch.get(EncoderInputs) if isinstance(inputs, ForwardInputs) else None
        alignments = {} if encoded is None else encoded.alignments
        output = StepOutput(step, sampled, plans.sampling, prompts, faults, counts, drafts, order, alignments)
        return fetch(output, self.streams)

    def _find_slots(self, inputs: StepInputs, num_rows: int) -> torch.Tensor:
        """The slots of the sampling rows, int64 [rows]."""
        sampling = inputs.tensors.sampling
        if sampling is not None and sampling.slots is not None:
            return sampling.slots
        assert self.decode_graphs is not None, "a graph drew the tokens"
        return self.decode_graphs.inputs["drawn_slots"][:num_rows]

    def _move_accepted(self, inputs: StepInputs, order: torch.Tensor, first: torch.Tensor, counts: torch.Tensor) -> None:
        """Move the accepted tokens of trees to the places of their positions. first: see
        `VerificationArrays`; order, counts: see `Verified`."""
        pool, graphs = self.inputs.kv, self.decode_graphs
        if not isinstance(pool, KVPool):
            raise RuntimeError("a step with trees of drafted tokens ran without a KV pool")
        if isinstance(inputs, ForwardInputs):
            places = inputs.batch.kv_slots.index_select(0, inputs.batch.logits_indices[: len(order)])
        else:
            assert graphs is not None, "the step was replayed"
            places = graphs.inputs["kv_slots"][: len(order)]
        pool.move_tokens(places.index_select(0, order), places, first, counts)

    def _sample(self, logits: torch.Tensor | None, plans: StepPlans, tensors: StepArrays[torch.Tensor]) -> Sampled:
        """Draw the tokens and store them in the last-token table. `tensors`: the plans' arrays, and
        the slots of the sampling rows."""
        sampling = tensors.sampling
        assert sampling is not None and sampling.slots is not None, "no graph draws the tokens of the step"
        slots = sampling.slots
        if logits is None:
            nothing = slots.new_empty(0)
            return Sampled(nothing, nothing.float())
        if plans.rounds:
            sampled = RoundSampler(self.sampler, self.processors, self.agree_tokens).sample(logits, plans.rounds, tensors)
            return self.sampler.add_logprobs(sampled, logits, plans.sampling, sampling)
        sampled = self.sampler.sample(logits, plans.sampling, plans.processing, sampling)
        if self.context.tp.size > 1:
            sampled = replace(sampled, token_ids=self.agree_tokens(sampled.token_ids))
        self.inputs.table.last_token.index_copy_(0, slots, sampled.token_ids)
        if plans.processing is not None and sampling.processing is not None:
            self.processors.observe_tokens(sampled.token_ids, plans.processing, sampling.processing)
        return sampled

    def set_drafts(self, drafts: DeviceDrafts, width: int, tree_depth: int = 0) -> None:
        """Draft after each step that asks for drafts. width, tree_depth: see
        `DeviceTable.set_draft_width`."""
        self.drafts = drafts
        self.inputs.table.set_draft_width(width, tree_depth)
        self.inputs.selects_tokens &= not drafts.model.reads_next  # else the model reads the hidden states of all tokens

    def agree_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rank 0's tokens: logits of ranks may differ in the last bit, tokens must not."""
        return self.context.tp.broadcast(token_ids.contiguous()) if self.context.tp.size > 1 else token_ids
