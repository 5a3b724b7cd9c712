"""`TorchModelRunner`: runs scheduled batches on one rank's device: build the batch, forward, sample, fetch.

`build_runner` makes one of loaded plugin classes: context, weights, memory pools. Knows slots, tokens and pages, no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame import kernels
from frame.core.errors import ConfigurationError
from frame.core.execution.async_output import MaskedStep, StepOutput, fetch
from frame.core.execution.components import Parts, build_context, build_processors
from frame.core.execution.decode_graphs import DecodeGraphs, DecodeOutputs, graph_sizes
from frame.core.execution.host_memory import keep_freed_memory
from frame.core.execution.hybrid_attention import BackgroundPreparation, HybridAttention
from frame.core.execution.input_batch import BatchBuilder, count_rows
from frame.core.execution.piecewise_graphs import PromptGraphs, piece_sizes
from frame.core.execution.staging import make_staging
from frame.core.execution.torch_compile import Forward, keep_out
from frame.core.execution.warmup import idle_decodes, idle_extends, idle_prompts
from frame.core.interfaces.batch import ScheduledBatch, SelectedTokens
from frame.core.interfaces.runner import MOST_SINGLE, DeviceLost, ModelRunner
from frame.core.kv_cache.capacity import Capacity, activation_bytes, measure, plan_pages
from frame.core.kv_cache.kv_pool import DeviceTable, KVPool, kv_geometry
from frame.core.loading.loader import WeightSource, load_model
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.prompt_logprobs import PromptScores, plan_prompts
from frame.core.sampling.sampler import Sampled, Sampler, draw_by_kernels, draw_plain
from frame.core.sampling.sampling_metadata import SamplingTable, grammar_arrays

if TYPE_CHECKING:
    from frame.core.config.resolved import Resolved
    from frame.core.execution.input_batch import RowCounts
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext, Collective
    from frame.core.interfaces.model import Model, ModelConfig
    from frame.core.interfaces.runner import PendingStep
    from frame.core.sampling.logits_pipeline import ProcessorPlan
    from frame.core.sampling.prompt_logprobs import PromptPlan
    from frame.core.sampling.sampling_metadata import SamplingPlan

_log = logging.getLogger(__name__)

_MOST_KEYS = 16_384  # that they may read, each for itself
_STAGED_BYTES_PER_TOKEN = 3 * 8
_STAGED_BYTES_PER_ROW = 256


@dataclass(frozen=True, slots=True)
class StepPlans:
    """The host's plans of one step."""

    sampling: SamplingPlan
    processing: ProcessorPlan | None
    prompts: PromptPlan | None


class TorchModelRunner(ModelRunner):
    """One rank's runner. Steps run in launch order on one stream; tensors that steps share live at fixed addresses."""

    def __init__(
        self, model: Model, model_config: ModelConfig, context: BuildContext, pool: KVPool, processors: Processors, capacity: Capacity
    ) -> None:
        if context.attention is None:
            raise ValueError("a runner needs a context with an attention backend")
        self.capacity = capacity
        self.context = context
        self.model = model
        self.forward = Forward(model.forward)
        self.vocab_size = model_config.vocab_size
        self._tp = context.tp
        self._stream = torch.cuda.Stream(context.device) if context.device.type == "cuda" else None
        limits = context.limits
        table = DeviceTable(limits, context.device)
        staged = limits.max_tokens_per_step * _STAGED_BYTES_PER_TOKEN + limits.max_running_requests * _STAGED_BYTES_PER_ROW
        self.builder = BatchBuilder(table, pool, context.attention, make_staging(context.device, staged))
        self._masks = make_staging(context.device, 0)  # for those that come after their batch
        use_triton = kernels.can_use_triton(context.device)
        self.sampling = SamplingTable(limits.max_running_requests, by_row=use_triton)
        self._processors = processors
        self.sampler = Sampler(processors, use_triton=use_triton)
        self._shares_prefixes = context.attention.capabilities.shared_prefixes
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        if self._stream is not None:  # what was made so far, the cleared cache above all, is on its way on another stream
            self._stream.wait_stream(torch.cuda.current_stream(context.device))

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start one step; on the CPU it is done when this returns. Raises DeviceLost when the device is gone."""
        self.sampling.update(batch.setups, batch.released)
        try:
            with torch.inference_mode():
                self._enter_stream()
                self._processors.update(batch.setups, batch.released)
                return self._run(batch)
        except torch.AcceleratorError as error:
            raise DeviceLost(f"the device failed in step {batch.step}: {error}") from error

    def warm_up(self) -> None:
        """Run steps that nobody asked for, over the reserved page: what compiles or initialises itself does so now, and not while requests
        wait. On a CPU, where little is compiled, these are decodes alone."""
        for batch in idle_decodes(self.builder.table.padding_slot):
            self.launch(batch).wait()
        if self._stream is None:
            return
        for batch in idle_prompts(self.context.limits):
            self.launch(batch).wait()
        with torch.inference_mode():
            self.sampler.warm_up(torch.zeros(2, self.vocab_size, dtype=self.context.dtype, device=self.context.device))

    @property
    def _preparation(self) -> BackgroundPreparation | None:
        """Of a backend that another one stands in for."""
        attention = self.context.attention
        return attention.preparation if isinstance(attention, HybridAttention) else None

    @property
    def can_switch_backend(self) -> bool:
        preparation = self._preparation
        return preparation is not None and preparation.is_done

    def switch_backend(self) -> None:
        """See `ModelRunner.switch_backend`. Warm-up steps run with the new backend, and its decode graphs replace the captured ones."""
        began = time.perf_counter()
        with torch.inference_mode():
            self._enter_stream()
            is_stale = self._switch()
        if self.graphs is not None and is_stale:
            most, self.graphs = self.graphs.most, None  # whose memory the new ones take
            self.capture(most)
        for batch in idle_extends(self.builder.table.padding_slot, self.context.limits):
            self.launch(batch).wait()
        _log.info("attention backends switched in %.1f s", time.perf_counter() - began)

    def settle_backend(self) -> None:
        """At the start: use the backend that prepares in the background at once, if nothing has to be compiled on any rank."""
        preparation = self._preparation
        if preparation is None:
            return
        preparation.wait_for_estimate()
        if _all_ranks(preparation.is_done, self._tp, self.context.device):
            self._switch()

    def allow_compilation(self) -> None:
        """At the end of the start: a backend may compile its kernels now, in the background."""
        if self._preparation is not None:
            self._preparation.allow_compilation()

    def _switch(self) -> bool:
        """-> whether captured decodes are another backend's."""
        attention = self.context.attention
        if not isinstance(attention, HybridAttention) or attention.preparation is None:
            return False
        attention.preparation.wait()  # a follower's may end later than rank 0's
        return attention.switch(_all_ranks(attention.preparation.error is None, self._tp, self.context.device))

    def capture(self, most: int) -> None:
        """Make graphs of decode steps of up to `most` rows; decodes run through them from now on. Raises ConfigurationError where the
        model or a backend does not let itself be captured, or there is no memory for it."""
        attention = self.context.attention
        if attention is None:
            raise ValueError("graphs need a context with an attention backend")
        with torch.inference_mode():
            self._enter_stream()
            redraw = self._redraw if self.sampler.use_triton else None
            graphs = DecodeGraphs(self._decode, self.builder, attention, graph_sizes(most), self.context.device, redraw)
            try:
                graphs.capture()
            except RuntimeError as error:
                reason = str(error).strip().split("\n", 1)[0]
                raise ConfigurationError(f"decode steps cannot be captured in CUDA graphs ({reason}); set --cuda-graph-max-bs 0") from error
        self.graphs = graphs

    def capture_prompts(self, most: int) -> None:
        """Make graphs of what lies between the attention of steps of up to `most` tokens; what is no batch of decodes with a graph of its
        own runs through them from now on. Raises ConfigurationError as `capture` does."""
        attention = self.context.attention
        if attention is None:
            raise ValueError("graphs need a context with an attention backend")
        with torch.inference_mode():
            self._enter_stream()
            graphs = PromptGraphs(self.model.forward, self.builder, attention, piece_sizes(most), self.context.device)
            try:
                graphs.capture()
            except RuntimeError as error:
                reason = str(error).strip().split("\n", 1)[0]
                raise ConfigurationError(
                    f"steps with prompts cannot be captured in CUDA graphs ({reason}); set --prompt-graph-max-tokens 0"
                ) from error
        self.prompt_graphs = graphs

    def close(self) -> None:
        """Wait for the device."""
        if self._stream is not None:
            self._stream.synchronize()

    def _enter_stream(self) -> None:
        """Put what this thread asks of the device on the runner's stream from now on: to come and go would cost 50 µs a step."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def _run(self, batch: ScheduledBatch) -> PendingStep:
        counts = count_rows(batch)
        sampling = self.sampling.plan(batch, counts)
        plans = StepPlans(sampling, self._processors.plan(sampling.slots, sampling.positions), plan_prompts(batch, counts, self.sampling))
        if self.graphs is not None and plans.prompts is None and self._are_decodes(self.graphs, batch, counts):
            return self._replay(self.graphs, batch, counts, plans)
        tensors, hidden = self._pass(batch, counts, _riders(plans))
        prompts = None
        if plans.prompts is not None:
            own = hidden[sampling.num_rows :]
            prompts = PromptScores(plans.prompts, own, tensors["prompt_targets"], self.model.logits, self.vocab_size)
        logits = self.model.logits(hidden[: sampling.num_rows]) if sampling.num_rows else None
        return self._finish(batch, logits, plans, tensors, prompts)

    def _pass(
        self, batch: ScheduledBatch, counts: RowCounts, riders: dict[str, np.ndarray]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Build a step's batch and compute the hidden states of the tokens whose logits are wanted, through graphs where they are large
        enough. The `riders` come back as tensors, with the slots of the sampling rows."""
        graphs, tokens, wanted = self.prompt_graphs, int(counts.query_starts[-1]), len(counts.logits_indices)
        are_these = len(counts.sampling) == wanted == tokens  # every token is a decode that samples, in order
        if graphs is not None and tokens <= graphs.most:
            forward_batch, tensors = self.builder.build(batch, counts, riders, graphs)
            hidden = graphs.run(forward_batch)
        else:
            forward_batch, tensors = self.builder.build(batch, counts, riders)
            if self.model.supports_token_selection and 2 * wanted <= tokens:
                are_these = True
                narrowed = {**forward_batch.extensions, SelectedTokens: SelectedTokens(forward_batch.logits_indices)}
                forward_batch = replace(forward_batch, extensions=narrowed)
            hidden = self.forward(forward_batch)
        tensors.setdefault("sampling_slots", forward_batch.request_slots)
        return tensors, hidden if are_these else hidden.index_select(0, forward_batch.logits_indices)

    def _are_decodes(self, graphs: DecodeGraphs, batch: ScheduledBatch, counts: RowCounts) -> bool:
        """Whether the step fits a graph of decodes, the tokens of its prompts taken for some: few, over few keys, or over keys that are
        read once for all of them."""
        given = len(batch.token_ids)
        if counts.query_starts[-1] > graphs.most or given > MOST_SINGLE:
            return False
        keys = given * int(counts.seq_lens[batch.num_decodes :].max(initial=0))
        return self._shares_prefixes or keys <= _MOST_KEYS

    def _replay(self, graphs: DecodeGraphs, batch: ScheduledBatch, counts: RowCounts, plans: StepPlans) -> PendingStep:
        """A step of decodes, or what is taken for one, by its graph, which also draws the tokens where no row wants more than a
        temperature and filters."""
        is_plain = plans.sampling.is_plain and plans.processing is None and not batch.has_deferred_grammar_mask
        tensors = self.builder.stage(batch, {} if is_plain else {**_riders(plans), "sampling_slots": plans.sampling.slots})
        # else the graph's own tokens are not used, and the next step starts from those that `_finish` draws
        draws = self.sampling.draws(plans.sampling) if is_plain else {}
        outputs = graphs.replay(self.builder.token_rows(batch, counts), draws)
        if is_plain:
            return fetch(StepOutput(batch.step, Sampled(outputs.token_ids, outputs.best), plans.sampling, None))
        return self._finish(batch, outputs.logits if plans.sampling.num_rows else None, plans, tensors, None)

    def _decode(self, batch: ForwardBatch, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> DecodeOutputs:
        """What a graph captures."""
        logits = self.model.logits(self.forward(batch))
        last_tokens = (self.builder.table.last_token, slots)
        return self._drawn(logits, draw_plain(logits, params["temperature"], params["uniform"], last_tokens), slots)

    def _redraw(self, outputs: DecodeOutputs, params: Mapping[str, torch.Tensor], slots: torch.Tensor) -> DecodeOutputs:
        """What a graph of steps with filters captures besides."""
        last_tokens = (self.builder.table.last_token, slots)
        drawn = draw_by_kernels(outputs.logits, params, (outputs.token_ids, outputs.best), last_tokens)
        return self._drawn(outputs.logits, drawn, slots)

    def _drawn(self, logits: torch.Tensor, drawn: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor) -> DecodeOutputs:
        token_ids, best = drawn
        if self._tp.size > 1:
            token_ids = self._tp.broadcast(token_ids)
            self.builder.table.last_token.index_copy_(0, slots, token_ids)
        return DecodeOutputs(token_ids, best, logits)

    def _finish(
        self,
        batch: ScheduledBatch,
        logits: torch.Tensor | None,
        plans: StepPlans,
        tensors: dict[str, torch.Tensor],
        prompts: PromptScores | None,
    ) -> PendingStep:
        """Draw tokens, now, or when the mask is there that follows."""

        def finish(mask: np.ndarray | None) -> PendingStep:
            with torch.inference_mode():
                self._enter_stream()
                more = {} if mask is None else self._masks.put(grammar_arrays(mask))
                return fetch(StepOutput(batch.step, self._sample(logits, plans, {**tensors, **more}), plans.sampling, prompts))

        if batch.has_deferred_grammar_mask and self._tp.rank == 0:  # whose tokens are everybody's
            return MaskedStep(finish)
        return finish(None)

    def _sample(self, logits: torch.Tensor | None, plans: StepPlans, tensors: dict[str, torch.Tensor]) -> Sampled:
        """Draw and remember the tokens. `tensors` hold the plans' arrays, and the slots of the sampling rows."""
        slots = tensors["sampling_slots"]
        if logits is None:
            nothing = slots.new_empty(0)
            return Sampled(nothing, nothing.float())
        sampled = self.sampler.sample(logits, plans.sampling, plans.processing, tensors)
        if self._tp.size > 1:  # ranks' sums may differ in the last bit, their tokens must not
            sampled = replace(sampled, token_ids=self._tp.broadcast(sampled.token_ids.contiguous()))
        self.builder.table.last_token.index_copy_(0, slots, sampled.token_ids)
        if plans.processing is not None:
            self._processors.observe(sampled.token_ids, plans.processing, tensors)
        return sampled


def build_runner(resolved: Resolved, parts: Parts, tp: Collective) -> TorchModelRunner:
    """Build, load and size one rank's runner. Raises CheckpointError for weights and CapacityError for memory that does not fit."""
    phases: dict[str, float] = {}
    clock = time.perf_counter()
    model_config = resolved.model
    device = torch.device("cuda", tp.rank) if resolved.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        if resolved.threads is not None:
            torch.set_num_threads(resolved.threads)
    torch.manual_seed(resolved.user.model.seed)
    context = build_context(resolved, parts, tp, device)
    phases["context"] = time.perf_counter() - clock
    user = resolved.user
    source = WeightSource(Path(resolved.model_path), user.model.load_format, user.model.seed)
    model, report = load_model(parts.model, model_config, context, source)
    phases.update(report.seconds)
    clock = time.perf_counter()
    geometry = kv_geometry(model_config, tp.size, resolved.page_size, resolved.kv_dtype)
    memory = measure(device, report.bytes, activation_bytes(model_config, context.limits, context.dtype), tp.size)
    pages = plan_pages(geometry, context.limits, memory, resolved.mem_fraction, resolved.max_total_tokens, is_cpu=device.type == "cpu")
    pages = _least_of_ranks(pages, tp, device)
    pool = KVPool(geometry, pages, device)
    slots = context.limits.max_running_requests
    phases["cache"] = time.perf_counter() - clock
    capacity = Capacity(pages, resolved.page_size, geometry.bytes_per_token, phases)
    if resolved.pooling is None:
        processors = Processors(build_processors(parts, model_config, slots, device), slots)
        runner = TorchModelRunner(model, model_config, context, pool, processors, capacity)
    else:
        from frame.core.execution.pooling_runner import PoolingRunner, build_pooler

        runner = PoolingRunner(model, model_config, context, pool, build_pooler(resolved, model, device), capacity)
    clock = time.perf_counter()
    runner.settle_backend()
    phases["attention"] = time.perf_counter() - clock
    clock = time.perf_counter()
    runner.warm_up()
    if user.execution.torch_compile:  # after a plain step, in which backends learn what they keep
        keep_out(context.attention, "run", "run_mla")
        runner.forward = Forward(model.forward, user.execution.torch_compile_max_bs)
        runner.warm_up()
    phases["warm_up"] = time.perf_counter() - clock
    _capture(runner, resolved, phases)
    runner.allow_compilation()
    return runner


def _capture(runner: TorchModelRunner, resolved: Resolved, phases: dict[str, float]) -> None:
    """Make the graphs that were resolved. Where graphs of prompts are nobody's wish, a start does not fail for them."""
    clock = time.perf_counter()
    if resolved.cuda_graph_max_bs:
        runner.capture(resolved.cuda_graph_max_bs)
        phases["graphs"] = time.perf_counter() - clock
    clock = time.perf_counter()
    if resolved.prompt_graph_max_tokens:
        try:
            runner.capture_prompts(min(resolved.prompt_graph_max_tokens, runner.context.limits.max_tokens_per_step))
        except ConfigurationError as error:
            if resolved.user.execution.prompt_graph_max_tokens:
                raise
            _log.warning("%s and be spared the attempt; their kernels are launched one by one", error)
        phases["prompt_graphs"] = time.perf_counter() - clock


def _least_of_ranks(pages: int, tp: Collective, device: torch.device) -> int:
    """One page count for all ranks: pages are named by rank 0's scheduler."""
    if tp.size == 1:
        return pages
    return int(tp.all_gather(torch.tensor([pages], device=device), dim=0).min())


def _all_ranks(value: bool, tp: Collective, device: torch.device) -> bool:
    """Whether `value` is true on all ranks."""
    if tp.size == 1:
        return value
    return bool(tp.all_gather(torch.tensor([int(value)], device=device), dim=0).min())


def _riders(plans: StepPlans) -> dict[str, np.ndarray]:
    """The host arrays that travel with the batch."""
    arrays = plans.sampling.arrays
    if plans.processing is not None:
        arrays = {**arrays, **plans.processing.arrays}
    if plans.prompts is not None:
        arrays = {**arrays, "prompt_targets": plans.prompts.targets}
    return arrays
