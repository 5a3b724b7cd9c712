"""`Parts` (the plugin classes of a rank), and what is built of them: build context, model runner.

Used by `processes.build_engine`, which loads the classes. Must not know a plugin by name or the
registry.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from frame import kernels
from frame.checkpoint.config_fields import ConfigFields
from frame.checkpoint.model_config import find_model
from frame.checkpoint.remote_code import load_class
from frame.core.blame import blaming
from frame.core.errors import ConfigurationError
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.build import BuildContext, Collective, Limits
from frame.core.interfaces.cache_groups import RESERVED_PAGES, Capacity
from frame.core.interfaces.device_drafter import DraftModelContext
from frame.core.interfaces.gemm_kernel import GemmChoice
from frame.core.interfaces.model import ModelContext
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.step_media import MediaSizes
from frame.core.interfaces.weight_format import FormatContext
from frame.core.kv_cache.geometry import DTYPES, GroupKey, KVGeometry, add_groups, kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, TORCH_BY_ROW, Sampler
from frame.diagnostics.finite_check import check_finite
from frame.entrypoints.processes.join_groups import Groups
from frame.entrypoints.processes.memory_plan import count_further_bytes, plan_rank, predict_memory
from frame.forward.declared_caches import find_free_layer, model_geometry
from frame.forward.hybrid_attention import GroupAttention, HybridAttention
from frame.forward.recorded_forward import record_decodes
from frame.forward.torch_compile import Forward, keep_out
from frame.host.progress import track
from frame.interfaces.sampler import RowSampler, SamplerContext, SupportsSlots
from frame.kernels.compile_ahead import compile_ahead, report_compilations
from frame.loading.capacity import activation_bytes, measure, plan_pages, plan_pools
from frame.loading.loader import Checkpoint, load_model
from frame.loading.sleep import tag_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydantic import BaseModel

    from frame.adapters.device_adapters import DeviceAdapters
    from frame.config.resolved import Resolved
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.device_drafter import DeviceDrafter, DraftModel
    from frame.core.interfaces.device_operations import DeviceOperations
    from frame.core.interfaces.gemm_kernel import GemmKernel, Speed
    from frame.core.interfaces.model import Model, ModelConfig
    from frame.core.interfaces.moe import MoEDispatcher, MoERunner
    from frame.core.interfaces.platform import Platform
    from frame.core.interfaces.rank_context import Pipeline, RankContext
    from frame.core.interfaces.sampling import LogitsProcessor
    from frame.core.interfaces.weight_format import WeightFormat
    from frame.interfaces.pooling import Pooler
    from frame.interfaces.sampler import TokenSampler
    from frame.interfaces.weights import WeightSource
    from frame.parallel.expert_moves import ExpertBalancer

T = TypeVar("T")

_log = logging.getLogger(__name__)
_MAX_GROUPS = 8  # groups with pages of their own, besides `tokens`


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """A plugin class and its validated options."""

    target: Callable[[Any, BaseModel | None], T]
    options: BaseModel | None = None

    def build(self, context: Any) -> T:
        """Construct the plugin. Every kind takes `(context, options)`."""
        return self.target(context, self.options)


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A GEMM kernel's name, class and speeds. `required`: the user named it."""

    name: str
    loaded: Loaded[GemmKernel]
    speeds: tuple[Speed, ...]
    required: bool

    def build(self, context: RankContext) -> GemmChoice:
        """Construct the kernel for one rank."""
        return GemmChoice(self.name, self.loaded.build(context), self.speeds, self.required)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The plugin classes of one rank. None: the model does not use this kind of plugin."""

    model: Loaded[Model]
    weight_source: Loaded[WeightSource]
    attention: Loaded[AttentionBackend]
    decode_attention: Loaded[AttentionBackend] | None = None  # None: `attention` computes decodes too
    weight_format: Loaded[WeightFormat] | None = None
    gemm_kernels: tuple[LoadedKernel, ...] = ()
    moe_runner: Loaded[MoERunner] | None = None
    moe_dispatcher: Loaded[MoEDispatcher] | None = None
    processors: tuple[Loaded[LogitsProcessor], ...] = ()
    sampler: Loaded[TokenSampler] | None = None
    samples_in_graphs: bool = True  # see `SamplerCapabilities.graphs`
    pooler: Loaded[Pooler] | None = None
    drafter: Loaded[DeviceDrafter] | None = None  # None: none runs on the device
    draft: Parts | None = None  # of `Resolved.draft`
    head_format: Loaded[WeightFormat] | None = None  # of a draft model with files of its own that no model plugin loads


def limits_of(resolved: Resolved) -> Limits:
    """The maximum sizes of a step: a full prefill chunk plus one decode token and one draft of each
    running request."""
    maximum = resolved.chunked_prefill_size + resolved.max_running_requests * (1 + resolved.max_drafted)
    is_padded = resolved.plan.num_groups > 1  # with prompts in the padding slot, which keep the groups in step
    return Limits(
        max_running_requests=resolved.max_running_requests + is_padded * (-(-maximum // resolved.max_context) + 1),
        max_tokens_per_step=maximum + is_padded,
        max_context=resolved.max_context,
        page_size=resolved.page_size,
        max_drafted=resolved.max_drafted,
        verifies_trees=resolved.tree is not None,
        max_single_rows=max(
            resolved.cuda_graph_max_bs, maximum if resolved.model.encoder_length else 0, resolved.tree.width if resolved.tree else 0
        ),
    )


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """What a rank's runner is built from. `is_cold`: Triton has to compile its kernels."""

    resolved: Resolved
    parts: Parts
    platform: Platform
    groups: Groups
    is_cold: bool = False


def build_context(resolved: Resolved, parts: Parts, platform: Platform, groups: Groups, limits: Limits | None = None) -> BuildContext:
    """The context of one rank, with its attention backend, weight format, MoE runner and MoE
    dispatcher. limits: None: those of the configuration."""
    base = BuildContext(
        platform=platform,
        device=platform.device,
        dtype=DTYPES[resolved.dtype],
        tp=groups.tp,
        experts=groups.experts,
        pipeline=groups.pipeline,
        limits=limits or limits_of(resolved),
        task=resolved.task,
        load_code=partial(load_class, Path(resolved.model_path)) if resolved.user.model.trust_remote_code else None,
        kv_dtype=DTYPES[resolved.kv_dtype],
        plan=resolved.plan,
        deterministic=resolved.user.execution.deterministic,
        media=None if (media := resolved.media) is None else MediaSizes(media.table_rows, media.encode_budget, media.held_patches),
    )
    base = replace(base, track=track) if groups.tp.rank == 0 else base
    built: dict[str, Any] = {"attention": _build_attention(parts, base, resolved.model)}
    if parts.weight_format is not None:
        stored = resolved.model.config.get("quantization_config")
        built["weight_format"] = parts.weight_format.build(FormatContext(base.dtype, stored, Path(resolved.model_path)))
    if (settings := resolved.user.adapters).enabled:
        from frame.adapters.builder import make_device_adapters, plan_sizes

        sizes, routers = plan_sizes(settings.max_active, settings.max_rank, settings.pages), resolved.user.adapters.routers
        built["adapters"] = make_device_adapters(sizes, platform, base.dtype, groups.tp, routers, deterministic=base.deterministic)
    built["gemm_kernels"] = tuple(plugin.build(base) for plugin in parts.gemm_kernels)
    for name, plugin in (("moe_runner", parts.moe_runner), ("moe_dispatcher", parts.moe_dispatcher)):
        if plugin is not None:
            built[name] = plugin.build(base)
    return replace(base, **built)


def _build_attention(parts: Parts, base: BuildContext, model_config: ModelConfig) -> AttentionBackend:
    has_tables = model_config.sliding_window is not None or model_config.encoder_length > 0  # of groups besides `tokens`

    def build(plugin: Loaded[AttentionBackend]) -> AttentionBackend:
        return GroupAttention(partial(plugin.build, base)) if has_tables else plugin.build(base)

    if parts.decode_attention is None:
        return build(parts.attention)
    return HybridAttention(build(parts.attention), build(parts.decode_attention))


def build_sampler(parts: Parts, model_config: ModelConfig, num_slots: int, context: RankContext) -> Sampler:
    """The sampler with its plugin, and the logits processors in the order of `parts`."""
    vocab_size, device, operations = model_config.vocab_size, context.device, choose_operations(context)
    assert parts.sampler is not None, "a task that generates text has a sampler"
    reference = TORCH_BY_ROW if context.deterministic else TORCH
    plugin = parts.sampler.build(SamplerContext(vocab_size, num_slots + 1, device, operations, reference))
    own = ProcessorContext(vocab_size, num_slots, device, model_config.eos_token_ids)
    keeps_slots = plugin if isinstance(plugin, SupportsSlots) else None
    processors = Processors([each.build(own) for each in parts.processors], num_slots, keeps_slots)
    rows, in_graphs = plugin if isinstance(plugin, RowSampler) else None, parts.samples_in_graphs
    return Sampler(processors, plugin.make_operations() if in_graphs or rows is None else operations, rows, in_graphs=in_graphs)


def choose_operations(context: RankContext) -> DeviceOperations:
    """The device operations of a runner: Triton kernels where they run."""
    if not kernels.can_use_triton(context.device):
        return TORCH_BY_ROW if context.deterministic else TORCH
    from frame.kernels.sampling.operations import TRITON

    return TRITON


def build_runner(plan: RunnerPlan) -> TorchModelRunner:
    """Build one rank's runner, of one stage of a pipeline or of one attention group: load the
    weights and size the KV cache. Raises CheckpointError for invalid weights and CapacityError if
    memory does not suffice."""
    resolved, parts, platform, tp, pipeline = plan.resolved, plan.parts, plan.platform, plan.groups.tp, plan.groups.pipeline
    phases: dict[str, float] = {}
    clock = time.perf_counter()
    model_config, user, device = resolved.model, resolved.user, platform.device
    platform.activate()
    torch.manual_seed(resolved.user.model.seed)  # of the device, too
    platform.release_memory()  # of an earlier engine of this process
    before = platform.measure_memory()
    context = build_context(resolved, parts, platform, plan.groups)
    phases["context"] = time.perf_counter() - clock
    checkpoint = Checkpoint(Path(resolved.weights_folder), parts.weight_source.build, user.model.seed)
    check_memory = partial(plan_rank, resolved, context, before=before)  # before anything is read
    make = partial(parts.model.build, ModelContext.from_build(context, replace(model_config, config=ConfigFields(model_config.config))))
    with tag_memory(user.execution.sleep != "off", platform, "weights"):
        model, report = load_model(make, context, checkpoint, check_memory)
        phases.update(report.seconds)
        clock = time.perf_counter()
        drafter = _build_drafter(resolved, parts, model, context)
    configured = kv_geometry(model_config, tp.size, resolved.page_size, resolved.kv_dtype)
    geometry = model_geometry(model, configured, None if drafter is None else drafter.model)
    if pipeline is not None:
        geometry = add_groups(geometry, _list_groups(geometry, pipeline.hidden, device))
        _check_stages(resolved, geometry)
    _check_tree(resolved, geometry)
    further = count_further_bytes(resolved, model, context, before)
    activations = activation_bytes(model_config, context.limits, context.dtype) + further
    draft_bytes = drafter.bytes if drafter else 0
    planned = predict_memory(resolved, context, geometry, report.planned and report.planned + draft_bytes, before, further)
    memory = measure(platform, report.bytes + draft_bytes, activations, resolved.plan.num_devices)
    ranks = (context.ep_group, *([] if pipeline is None else [pipeline.hidden]))
    pages = _min_of_ranks(plan_pages(geometry, context.limits, memory, resolved.mem_fraction, resolved.max_total_tokens), ranks, device)
    pools = plan_pools(geometry, context.limits, (pages - RESERVED_PAGES) * resolved.page_size)
    pools = tuple(replace(each, num_pages=_min_of_ranks(each.num_pages, ranks, device)) for each in pools)
    with tag_memory(user.execution.sleep != "off", platform, "kv_cache"):
        pool = KVPool(geometry, (pages, *(each.num_pages for each in pools)), device, choose_operations(context).move_rows)
    adapters = _allocate_adapters(context)
    phases["cache"] = time.perf_counter() - clock
    capacity = Capacity(pages, resolved.page_size, geometry.bytes_per_token, phases, pools)
    if resolved.pooling is None:
        sampler = build_sampler(parts, model_config, context.limits.max_running_requests, context)
        runner = _runner_class(pipeline)(model, model_config, context, pool, sampler, capacity)
        _set_media(runner)
        if drafter is not None:
            _set_drafter(runner, drafter, resolved)
        if (length := user.speculative.synthetic_acceptance_length) is not None:
            _accept_at_random(runner, length, user.speculative.num_steps)
    else:
        runner = _build_pooling_runner(plan, model, context, pool, capacity)
    runner.adapters = adapters
    runner.forward = record_decodes(model.forward, context)
    clock = time.perf_counter()
    runner.resolve_backend()
    phases["attention"] = time.perf_counter() - clock
    clock = time.perf_counter()
    with blaming("in a warm-up step"):
        if kernels.can_use_triton(device) and not runner.is_true_on_all_ranks(not plan.is_cold):
            with compile_ahead(tp.rank, tp.size, context.track):
                runner.warm_up()
                _capture_graphs(runner, resolved, {}, is_dry=True)
            phases["kernels"] = time.perf_counter() - clock
            clock = time.perf_counter()
        runner.warm_up()
        check_finite(runner)
    if user.execution.torch_compile:  # after an uncompiled warm-up, in which backends set up their persistent state
        keep_out(context.attention, "run", "run_mla")
        runner.forward = Forward(model.forward, user.execution.torch_compile_max_bs)
        with blaming("in a warm-up step with torch.compile"):
            runner.warm_up(is_compiled=True)
    phases["warm_up"] = time.perf_counter() - clock
    _capture_graphs(runner, resolved, phases)
    runner.allow_compilation()
    report_compilations(device)
    if resolved.plan.balances_experts:
        runner.balancer = _build_balancer(resolved, model, context)
    if planned is not None and tp.rank == 0:
        for sentence in planned.find_deviations(report.bytes + draft_bytes, capacity.max_total_tokens, platform.measure_memory()):
            _log.warning("%s", sentence)
    return runner


def _runner_class(pipeline: Pipeline | None) -> type[TorchModelRunner]:
    if pipeline is None:
        return TorchModelRunner
    from frame.parallel.stage_runner import StageRunner

    return StageRunner


def _build_pooling_runner(plan: RunnerPlan, model: Model, context: BuildContext, pool: KVPool, capacity: Capacity) -> TorchModelRunner:
    from frame.entrypoints.relevance import list_label_ids
    from frame.interfaces.pooling import PoolerContext
    from frame.pooling.pooling_runner import PoolingRunner
    from frame.pooling.vector_head import VectorHead

    resolved, model_config, pooler = plan.resolved, plan.resolved.model, plan.parts.pooler
    if pooler is None:
        raise ValueError("the task generates text and has no pooler")
    built = pooler.build(PoolerContext(model_config.hidden_size, context.device, context.dtype))
    head = model.compute_logits if resolved.task == "classify" else None
    vector_head = VectorHead(built, head, list_label_ids(resolved), context.device)
    return PoolingRunner(model, model_config, context, pool, vector_head, capacity)


def _allocate_adapters(context: BuildContext) -> DeviceAdapters | None:
    """Allocate the pool of adapters, for which the plan of the KV cache has left room."""
    if context.adapters is None:
        return None
    from frame.adapters.builder import allocate_adapters

    return allocate_adapters(context)


def _set_media(runner: TorchModelRunner) -> None:
    """Let the runner read media, for which the plan of the KV cache has left room."""
    blocks = None if runner.inputs.groups is None else runner.inputs.groups.blocks
    if blocks is not None:
        from frame.media.files import map_features

        blocks.read_features = map_features
    if runner.context.media is not None:
        from frame.media.encoder import MediaEncoder

        runner.inputs.media = MediaEncoder(runner.model, runner.context)


def _check_stages(resolved: Resolved, geometry: KVGeometry) -> None:
    """Raise ConfigurationError if the stages of a pipeline cannot verify drafts."""
    if resolved.user.speculative.algorithm is not None and any(group.kind == "snapshot" for group in geometry.groups):
        raise ConfigurationError(
            "speculative.algorithm cannot be used with the recurrent layers of this model in pipeline stages, of which the "
            "last one alone has the accepted tokens: remove it, or set parallel.pp to 1"
        )


def _check_tree(resolved: Resolved, geometry: KVGeometry) -> None:
    """Raise ConfigurationError if drafts are trees, which the model cannot verify."""
    if resolved.tree is None:
        return
    problem, maximum = "", resolved.tree.num_extended
    if any(group.kind != "tokens" for group in geometry.groups):
        problem = "layers with states or an indexer verify chains alone"
    elif resolved.max_context <= maximum:
        problem = f"trees read {maximum} tokens after the last one, and model.max_context is {resolved.max_context}"
    if problem:
        raise ConfigurationError(f"the option eagle_topk of {resolved.choice('drafter').name} is above 1, and {problem}; set it to 1")


def _build_balancer(resolved: Resolved, model: Model, context: BuildContext) -> ExpertBalancer:
    """The balancer of the model's layers with experts. Raises ConfigurationError if their weights
    cannot be moved."""
    from frame.parallel.expert_moves import ExpertBalancer, list_movable

    settings = resolved.user.parallel
    layers = list_movable(model)
    if not layers and context.pipeline is None:  # a stage may have none
        raise ConfigurationError("parallel.eplb is true, but the model's implementation cannot move experts; set it to false")
    if not all(layer.list_tensors() for layer in layers):
        raise ConfigurationError(
            "parallel.eplb moves plain and float8 experts that a MoE runner multiplies, and a GEMM kernel has packed those of this "
            "model; set parallel.eplb to false"
        )
    return ExpertBalancer(layers, context.ep_group, settings.eplb_interval, settings.eplb_stage_bytes)


@dataclass(frozen=True, slots=True)
class _Drafter:
    """The loaded model of a device drafter. `attention`: its own backend; None: the target's."""

    model: DraftModel
    bytes: int
    attention: AttentionBackend | None


def _build_drafter(resolved: Resolved, parts: Parts, target: Model, build: BuildContext) -> _Drafter | None:
    """Build and load the model of a device drafter, if there is one."""
    if (prepared := prepare_drafter(resolved, parts, target, build)) is None:
        return None
    make, context, checkpoint = prepared
    model, report = load_model(make, context, checkpoint)
    kinds = {group.kind for group in model_geometry(model, KVGeometry((), 1, build.dtype)).groups}
    # the indexer of a prediction layer has an index of its own, a draft model one of the target
    known = {"tokens"} if parts.draft is not None else {"tokens", "sidecar"}
    if not kinds <= known or (parts.draft is not None and not kinds):
        raise ConfigurationError("speculative.draft_model_path has layers with a window, a state or an indexer; name a draft model without")
    return _Drafter(model, report.bytes, context.attention)


def _set_drafter(runner: TorchModelRunner, drafter: _Drafter, resolved: Resolved) -> None:
    """Draft with this model after each step that asks for drafts."""
    from frame.speculation.draft_passes import DraftPasses
    from frame.speculation.draft_runner import DraftRunner

    passes = DraftPasses(drafter.model, drafter.attention, runner.inputs, runner.agree_tokens)
    drafts = DraftRunner(passes, resolved.max_drafted, resolved.tree, is_alone=runner.context.tp.size == 1)
    runner.set_drafts(drafts, resolved.max_drafted, 0 if resolved.tree is None else resolved.tree.depth)


def _accept_at_random(runner: TorchModelRunner, length: float, num_steps: int) -> None:
    from frame.speculation.synthetic_acceptance import SyntheticAcceptance

    runner.inputs.planner.choose_accepted = SyntheticAcceptance(length, num_steps).choose
    _log.warning("speculative.synthetic_acceptance_length is set: drafts are accepted at random, and outputs are wrong")


def prepare_drafter(
    resolved: Resolved, parts: Parts, target: Model, build: BuildContext
) -> tuple[Callable[[], DraftModel], BuildContext, Checkpoint] | None:
    """What builds the model of a device drafter, its context, whose attention backend is None if it
    is the target's, and its checkpoint; None where no drafter runs on the device."""
    if parts.drafter is None:
        return None
    build = replace(build, adapters=None, media=None)  # drafters draft with the base's weights, and read the target's rows
    drafter, source, attention, make = parts.drafter.build(resolved.drafter_context), parts.weight_source, None, None
    config = drafter.read_config(resolved.model)
    if parts.draft is not None and resolved.draft is not None:
        build = build_context(resolved.draft, parts.draft, build.platform, Groups(build.tp), build.limits)
        config, source, attention = resolved.draft.model, parts.draft.weight_source, build.attention
        make = partial(parts.draft.model.build, ModelContext.from_build(build, config))
    elif parts.head_format is not None and drafter.get_folder() is not None:
        build = replace(build, weight_format=parts.head_format.build(FormatContext(build.dtype)))
    context = DraftModelContext(target, ModelContext.from_build(build, config), find_free_layer(target, resolved.model.num_layers), make)
    checkpoint = Checkpoint(find_model(drafter.get_folder() or resolved.weights_folder), source.build, resolved.user.model.seed)
    # the target's layers have prepared its backend
    return partial(drafter.build_model, context), replace(build, attention=attention), checkpoint


def _capture_graphs(runner: TorchModelRunner, resolved: Resolved, phases: dict[str, float], *, is_dry: bool = False) -> None:
    """Capture the resolved CUDA graphs. is_dry: run their sizes once instead. A failure to capture
    piecewise graphs is an error only if the user set their size."""
    clock = time.perf_counter()
    if resolved.cuda_graph_max_bs:
        runner.capture_decode_graphs(resolved.cuda_graph_max_bs, is_dry=is_dry)
        phases["graphs"] = time.perf_counter() - clock
    clock = time.perf_counter()
    if _wants_pieces(runner, resolved):
        try:
            maximum = min(resolved.prompt_graph_max_tokens, runner.context.limits.max_tokens_per_step)
            runner.capture_piecewise_graphs(maximum, is_dry=is_dry)
        except ConfigurationError as error:
            if resolved.user.execution.prompt_graph_max_tokens:
                raise
            _log.warning("%s to skip the attempt; these steps run without graphs", error)
        phases["prompt_graphs"] = time.perf_counter() - clock


def _wants_pieces(runner: TorchModelRunner, resolved: Resolved) -> bool:
    """Whether to capture piecewise graphs. Recurrent layers have them on request only: the speed
    of their pieces has not been measured. Raises ConfigurationError if the user asks for what
    cannot be captured."""
    groups, asked, obstacle = runner.inputs.groups, resolved.user.execution.prompt_graph_max_tokens, ""
    if runner.drafts is not None and runner.drafts.model.tapped_layers:
        obstacle = f"the drafter {resolved.user.speculative.algorithm} reads hidden states in the middle of a step"
    elif groups is not None and groups.windows:
        obstacle = "layers with windows have page tables of their own"
    if asked and obstacle:
        raise ConfigurationError(f"execution.prompt_graph_max_tokens is {asked}, but {obstacle}; set --prompt-graph-max-tokens 0.")
    return bool(resolved.prompt_graph_max_tokens) and not obstacle and (groups is None or bool(asked))


def _min_of_ranks(pages: int, groups: Sequence[Collective], device: torch.device) -> int:
    """The minimum page count over the ranks of these groups: rank 0's scheduler assigns the pages
    of all."""
    for group in (each for each in groups if each.size > 1):
        pages = int(group.all_gather(torch.tensor([pages], device=device), dim=0).min())
    return pages


def _list_groups(geometry: KVGeometry, stages: Collective, device: torch.device) -> list[GroupKey]:
    """The groups with pages of their own, besides `tokens`, of all stages, in the order of the
    model's layers. 0 stands for a group of states, other numbers for a window."""
    windows = [group.window or 0 for group in geometry.groups[1 : geometry.num_pools]]
    padded = torch.tensor(windows + [-1] * (_MAX_GROUPS - len(windows)), device=device)
    every = dict.fromkeys(window for window in stages.all_gather(padded, dim=0).tolist() if window >= 0)
    return [("window", window) if window else ("snapshot", None) for window in every]
