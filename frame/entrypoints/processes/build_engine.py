"""The inner composition root: builds a rank's engine from a `Resolved` configuration and the
registry (plugins, weights, scheduler).

Runs in the engine's thread or process and imports torch. `frame.entrypoints.processes.launch`
decides where that is.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frame.checkpoint.config_fields import ConfigFields
from frame.config.resolve import PLAIN_WEIGHTS
from frame.config.resolved import Resolved
from frame.core.blame import blaming
from frame.core.engine import Engine, EngineOptions, Observers
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.cache_groups import Capacity
from frame.core.interfaces.drafter import DrafterCapabilities
from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmKernel
from frame.core.interfaces.model import ModelContext
from frame.core.interfaces.platform import Platform, PlatformContext, SupportsSleep, SupportsStreams
from frame.core.interfaces.runner import ModelRunner
from frame.core.interfaces.sampling import GRAMMAR_KINDS, GrammarBackend, GrammarCapabilities
from frame.core.ipc.transport import Transport
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.messages import Finish
from frame.core.scheduling.request import Request
from frame.core.scheduling.step_features import NoAdapters, RequestAdapters, RequestTiers
from frame.entrypoints.processes.build_scheduler import build_pool, build_schedulers
from frame.entrypoints.processes.components import Loaded, LoadedKernel, Parts, RunnerPlan, build_runner, prepare_drafter
from frame.entrypoints.processes.grammar_process import GrammarProcess, load_backend
from frame.entrypoints.processes.join_groups import Place, join_groups
from frame.entrypoints.tracing import Tracing
from frame.interfaces.weight_transfer import WeightTransferContext
from frame.kernels.cache import KernelCache, count_compilations, select_cache_folder, start_key
from frame.loading.engine_states import EngineStates
from frame.loading.loader import UpdatedModel
from frame.loading.weight_commands import CommandSettings, WeightCommands, list_transfers
from frame.loading.weight_update import UpdateSource, UpdatingRunner, WeightUpdater
from frame.parallel.rank_channels import BatchSender, ResultReceiver, Traced
from frame.plugins.loader import observers as find_observers
from frame.plugins.registry import Registry
from frame.structured_output.grammar_compiler import GrammarCompiler, GrammarSettings

if TYPE_CHECKING:
    import torch

    from frame.adapters.adapter_reader import ChosenFormat
    from frame.adapters.commands import AdapterCommands
    from frame.adapters.places import AdapterPlaces
    from frame.core.scheduling.kv_cache_manager import KVCacheManager
    from frame.kv_tiers.build import TierSettings
    from frame.loading.update_copy import UpdateCopy
    from frame.parallel.tp_follower import OrderedTiers
    from frame.structured_output.call_processes import ProcessPool


def load_parts(resolved: Resolved, registry: Registry) -> Parts:
    """Import the chosen plugins. Raises PluginError if they are not those resolved."""

    def all_of(kind: str) -> list[Loaded[Any]]:
        return [Loaded(*registry.choose(choice)) for choice in resolved.plugins.get(kind, ())]

    def only(kind: str) -> Loaded[Any] | None:
        return next(iter(all_of(kind)), None)

    attention = all_of("attention_backend")
    graphs = [getattr(registry.get("sampler", each.name).capabilities, "graphs", True) for each in resolved.plugins.get("sampler", ())]
    return Parts(
        model=all_of("model")[0],
        weight_source=all_of("weight_source")[0],
        attention=attention[0],
        decode_attention=attention[1] if len(attention) > 1 else None,
        weight_format=only("weight_format"),
        gemm_kernels=load_kernels(resolved, registry),
        moe_runner=only("moe_runner"),
        moe_dispatcher=only("moe_dispatcher"),
        processors=tuple(all_of("logits_processor")),
        sampler=only("sampler"),
        samples_in_graphs=all(graphs),
        pooler=only("pooler"),
        drafter=load_device_drafter(resolved, registry),
        head_format=load_head_format(registry),
        draft=None if resolved.draft is None else load_parts(resolved.draft, registry),
    )


def load_device_drafter(resolved: Resolved, registry: Registry) -> Loaded[Any] | None:
    """The drafter, if it runs on the device."""
    for choice in resolved.plugins.get("drafter", ()):
        capabilities = registry.get("drafter", choice.name).capabilities
        if isinstance(capabilities, DrafterCapabilities) and capabilities.runs_on == "device":
            return Loaded(*registry.choose(choice))
    return None


def load_head_format(registry: Registry) -> Loaded[Any]:
    """The weight format of heads that draft for a model of any format."""
    return Loaded(registry.load(registry.get("weight_format", PLAIN_WEIGHTS)))


def load_kernels(resolved: Resolved, registry: Registry, absent: type[GemmKernel] | None = None) -> tuple[LoadedKernel, ...]:
    """The GEMM kernels that fit the device, the one that the user named among them. If none is, the
    first batch-invariant one multiplies a type. absent: in place of one not installed."""
    kernels, named = [], resolved.user.model.gemm_kernel
    for choice in resolved.plugins.get("gemm_kernel", ()):
        capabilities = registry.get("gemm_kernel", choice.name).capabilities
        speeds = capabilities.speeds if isinstance(capabilities, GemmCapabilities) else ()
        required = resolved.user.execution.deterministic if named is None else choice.name == named
        is_absent = absent is not None and not registry.is_installed("gemm_kernel", choice.name)
        loaded = Loaded(absent) if absent is not None and is_absent else Loaded(*registry.choose(choice))
        kernels.append(LoadedKernel(choice.name, loaded, speeds, required))
    return tuple(kernels)


@blaming("at start")
def build_rank(resolved: Resolved, registry: Registry, place: Place | None = None) -> TorchModelRunner:
    """The model runner of a rank: joins the process group, loads the rank's part of the weights,
    allocates its KV cache. Raises PluginError for the fault of a plugin."""
    return _build_rank(resolved, registry, place or Place())[0]


def _build_rank(resolved: Resolved, registry: Registry, place: Place) -> tuple[TorchModelRunner, dict[str, Any] | None]:
    """The runner, and on a GPU the counts of kernels compiled and loaded."""
    platform = create_platform(resolved, registry, place)
    platform.activate()

    def build(parts: Parts, is_cold: bool) -> TorchModelRunner:
        groups = join_groups(resolved, registry, place, platform)
        return build_runner(RunnerPlan(resolved, parts, platform, groups, is_cold))

    if not isinstance(platform, SupportsStreams):
        runner = build(load_parts(resolved, registry), is_cold=False)
        _attach_loader(resolved, registry, runner)
        return runner, None
    clock = time.perf_counter()
    kernels = kernel_cache(resolved, platform.device_name)
    was_warm = kernels.is_warm
    start_key()
    with count_compilations() as counts:
        parts = load_parts(resolved, registry)
        plugins = time.perf_counter() - clock
        runner = build(parts, is_cold=not was_warm)
    runner.capacity.phases["plugins"] = plugins
    _attach_loader(resolved, registry, runner)
    kernels.mark_complete(counts)
    return runner, {"cache": "warm" if was_warm else "cold", **asdict(counts)}


def create_platform(resolved: Resolved, registry: Registry, place: Place) -> Platform:
    target, options = registry.choose(resolved.choice("platform"))
    platform: Platform = target(PlatformContext(place.local_index, resolved.threads), options)
    return platform


def kernel_cache(resolved: Resolved, chip: str) -> KernelCache:
    """The kernel cache of this chip for this configuration."""
    plugins = sorted((kind, choice.name, choice.version) for kind, choices in resolved.plugins.items() for choice in choices)
    model_config = resolved.model
    shape = (model_config.architecture, model_config.config, resolved.dtype, resolved.kv_dtype, resolved.page_size)
    modes = ("deterministic",) * resolved.user.execution.deterministic
    sizes = (str(resolved.plan), resolved.max_running_requests, resolved.chunked_prefill_size, resolved.max_context, *modes)
    key = hashlib.sha256(repr((plugins, shape, sizes)).encode()).hexdigest()[:16]
    return KernelCache(select_cache_folder(chip), key)


def add_profiling(resolved: Resolved, runner: TorchModelRunner, place: Place | None) -> ModelRunner:
    """The runner, wrapped for profiling where execution.profile_dir is set."""
    folder = resolved.user.execution.profile_dir
    if folder is None:
        return runner
    from frame.diagnostics.profiling import ProfiledRunner

    activities = runner.context.platform.profiler_activities
    return ProfiledRunner(runner, Path(folder), 0 if place is None else place.rank, activities)


def add_updates(
    resolved: Resolved, registry: Registry, runner: ModelRunner, rank: TorchModelRunner, number: int = 0, copy: UpdateCopy | None = None
) -> ModelRunner:
    """The runner, with updates of the weights of `rank`, the engine's rank `number`. copy: keeps
    the tensors of trainers."""
    context = replace(rank.context, adapters=None)
    choice = resolved.choice("weight_source")

    def open_models() -> list[UpdatedModel]:
        parts = load_parts(resolved, registry)
        model = replace(resolved.model, config=ConfigFields(resolved.model.config))
        models = [UpdatedModel(rank.model, partial(parts.model.build, ModelContext.from_build(context, model)))]
        if parts.drafter is not None and parts.drafter.build(resolved.drafter_context).get_folder() is None:
            from frame.speculation.draft_runner import DraftRunner

            prepared = prepare_drafter(resolved, parts, rank.model, context)
            if prepared is not None and isinstance(rank.drafts, DraftRunner):
                models.append(UpdatedModel(rank.drafts.model, prepared[0]))
        return models

    source = UpdateSource(resolved.model.architecture, Loaded(*registry.choose(choice)).build, resolved.user.model.seed)
    receiver = WeightTransferContext(context.device, number, resolved.plan.num_ranks, resolved.user.execution.update_timeout)
    chosen = resolved.plugins.get("weight_transfer", ())
    connect = {choice.name: partial(registry.create, choice, receiver) for choice in chosen}
    updater, tensors = WeightUpdater(open_models, source, context.platform), None
    if connect:
        from frame.loading.tensor_update import TensorUpdates

        tensors = TensorUpdates(open_models, connect, context.platform, copy)
    return add_sleep(resolved, UpdatingRunner(runner, updater, tensors), rank, lambda: [each.model for each in updater.models])


def add_sleep(resolved: Resolved, runner: ModelRunner, rank: TorchModelRunner, list_models: Callable[[], list[Any]]) -> ModelRunner:
    """The runner, with releases of its memory where execution.sleep is set. list_models: makes the
    list of the models that an update rewrites."""
    platform, pool = rank.context.platform, rank.inputs.kv
    if find_sleep_obstacle(resolved, platform) or not isinstance(platform, SupportsSleep):
        return runner
    from frame.loading.sleep import SleepingRunner

    tensors = {
        "weights": lambda: [parameter for model in list_models() for parameter in model.parameters()],
        "kv_cache": lambda: pool.tensors if isinstance(pool, KVPool) else [],
    }
    return SleepingRunner(runner, platform, tensors)


def find_sleep_obstacle(resolved: Resolved, platform: Platform) -> str:
    """Why this engine cannot release its memory; empty if it can."""
    if resolved.user.execution.sleep == "off":
        return "execution.sleep is off: serve with --sleep-mode wait"
    if not isinstance(platform, SupportsSleep):
        return f"the platform {resolved.choice('platform').name} cannot release memory: set execution.sleep to off."
    if resolved.plugins.get("kv_tier"):
        return "cache tiers copy blocks of the KV cache in the background: serve without cache.tiers."
    return ""


def _make_update_copy(resolved: Resolved) -> UpdateCopy | None:
    folder = resolved.user.execution.keep_updates
    if folder is None:
        return None
    from frame.loading.update_copy import UpdateCopy

    current = None if resolved.weights_path is None else Path(resolved.weights_path)
    return UpdateCopy(Path(folder), Path(resolved.model_path), current)


def _make_weight_commands(
    resolved: Resolved, registry: Registry, runner: ModelRunner, info: dict[str, Any], copy: UpdateCopy | None
) -> WeightCommands:
    chosen = resolved.plugins.get("weight_transfer", ())
    settings = CommandSettings(
        obstacle=find_update_obstacle(resolved),
        transfers=list_transfers([(each.name, registry.get("weight_transfer", each.name).capabilities) for each in chosen]),
        timeout=resolved.user.execution.update_timeout,
        find_copy=None if copy is None else lambda: copy.current,
        awaits=resolved.awaits_weights,
    )
    return WeightCommands(runner, info, settings)


def find_update_obstacle(resolved: Resolved) -> str:
    """Why the weights of this engine cannot be updated; empty if they can."""
    if resolved.plan.balances_experts:
        return "parallel.eplb moves experts, and moved experts cannot be updated yet: turn it off."
    if resolved.media is not None:
        return "the model reads media, whose encoded rows are kept, so its weights cannot be updated yet: restart with the checkpoint."
    return ""


def add_group(resolved: Resolved, runner: ModelRunner, rank: TorchModelRunner, number: int) -> ModelRunner:
    """The runner of rank `number`, for batches of attention groups where there are several."""
    plan = resolved.plan
    if plan.num_groups == 1:
        return runner
    from frame.parallel.attention_groups import GroupRunner

    return GroupRunner(runner, plan.find_group(number), rank.inputs.table.padding_slot, resolved.max_context)


def build_grammars(resolved: Resolved, registry: Registry, pool: ProcessPool | None = None) -> GrammarCompiler | None:
    """The grammar compiler, where there are a grammar backend and a tokenizer. A backend that the
    configuration names is loaded now, so that its failure stops the start; one chosen automatically
    is loaded in a thread, on a CPU for the first grammar."""
    choices, sampling = resolved.plugins.get("grammar_backend"), resolved.user.sampling
    if not choices or resolved.tokenizer_path is None:
        return None
    make: Callable[[], GrammarBackend] = cache(partial(load_backend, resolved, registry) if pool is None else pool.start_backend)
    if sampling.grammar is not None:
        make()
    capabilities = registry.get("grammar_backend", choices[0].name).capabilities
    settings = GrammarSettings(
        kinds=capabilities.kinds if isinstance(capabilities, GrammarCapabilities) else GRAMMAR_KINDS,
        workers=max(1, sampling.grammar_workers),
        queue_timeout=sampling.grammar_timeout,
        cache_bytes=resolved.grammar_cache,
        budget=sampling.grammar_budget,
        request_timeout=resolved.user.scheduler.request_timeout,
    )
    compiler = GrammarCompiler(make, settings, partial(GrammarProcess, resolved) if sampling.grammar_workers else None)
    return compiler.prepare() if resolved.device != "cpu" else compiler  # a CPU may need its cores for the first requests


@blaming("at start")
def build_engine(
    resolved: Resolved,
    registry: Registry,
    transport: Transport,
    place: Place | None = None,
    followers: BatchSender | None = None,
    heartbeat: float | None = None,
    tracing: Tracing | None = None,
    results: Sequence[ResultReceiver] = (),
) -> tuple[Engine, dict[str, Any]]:
    """The engine of rank 0, and the data of its `Ready`. Raises PluginError."""
    clock, place = time.perf_counter(), place or Place()
    rank, kernels = _build_rank(resolved, registry, place)
    capacity = rank.capacity
    copy = _make_update_copy(resolved)
    runner = add_group(resolved, add_updates(resolved, registry, add_profiling(resolved, rank, place), rank, 0, copy), rank, 0)
    if followers is not None:
        runner = _lead(runner, followers, results, place)
    hooks = find_observers(registry)
    callbacks: list[Callable[[Request, Finish], None]] = []
    if (on_finish := hooks.on_request_finished) is not None:
        callbacks.append(lambda request, finish: on_finish(**_finished(request, finish)))
    if tracing is not None:
        callbacks.append(tracing.add_engine_spans)
        if followers is not None:
            callbacks.append(partial(_tell_followers, followers))
    memory = asdict(rank.context.platform.measure_memory())
    info = {**describe_engine(resolved, capacity), "memory": memory, "start_seconds": round(time.perf_counter() - clock, 3)}
    if kernels is not None:
        info["kernels"] = kernels
    adapters, make_adapters = _build_adapters(resolved, runner, rank)
    weights = _make_weight_commands(resolved, registry, runner, info, copy)
    options = EngineOptions(
        overlap=resolved.overlap,
        check_integrity=resolved.user.execution.check_integrity,
        heartbeat=heartbeat,
        info=info,
        device_memory=rank.context.platform.count_reserved,
        expert_imbalance=rank.list_imbalance,
        adapters=adapters,
        make_states=partial(EngineStates, weights=weights, sleep_obstacle=find_sleep_obstacle(resolved, rank.context.platform)),
        check_params=rank.processors.check_params,
    )
    pool, tiers = build_pool(resolved), build_tiers(resolved, registry, rank, followers)
    engine = Engine(
        build_schedulers(resolved, registry, capacity.pools, _join_callbacks(callbacks), make_adapters, tiers, pool),
        runner,
        transport,
        options,
        Observers(on_step=hooks.on_step, on_stop=hooks.on_stop),
        build_grammars(resolved, registry, pool),
    )
    if hooks.on_start is not None:
        hooks.on_start(resolved=resolved)
    return engine, info


def load_formats(resolved: Resolved, registry: Registry, dtype: torch.dtype) -> list[ChosenFormat]:
    """The adapter formats of the configuration."""
    from frame.adapters.adapter_reader import ChosenFormat
    from frame.interfaces.adapter import AdapterCapabilities, AdapterContext

    formats = []
    for choice in resolved.plugins.get("adapter", ()):
        capabilities = registry.get("adapter", choice.name).capabilities
        if isinstance(capabilities, AdapterCapabilities):
            formats.append(ChosenFormat(choice.name, capabilities.reads, registry.create(choice, AdapterContext(dtype))))
    return formats


def _attach_loader(resolved: Resolved, registry: Registry, runner: TorchModelRunner) -> None:
    if runner.adapters is not None:
        from frame.adapters.builder import attach_loader

        attach_loader(runner, load_formats(resolved, registry, runner.context.dtype))


def _build_adapters(
    resolved: Resolved, runner: ModelRunner, rank: TorchModelRunner
) -> tuple[AdapterCommands | None, Callable[[], RequestAdapters]]:
    """What carries out the commands for adapters, and what makes the places of each scheduler."""
    if rank.adapters is None:
        return None, NoAdapters
    from frame.adapters.builder import build_commands, plan_sizes
    from frame.adapters.places import AdapterPlaces, AdapterVersions

    versions, places, settings = AdapterVersions(), list[AdapterPlaces](), resolved.user.adapters
    sizes = plan_sizes(settings.max_active, settings.max_rank, settings.pages)

    def make() -> AdapterPlaces:
        places.append(AdapterPlaces(versions, sizes.places, sizes.pages))
        return places[-1]

    return build_commands(runner, rank, versions, places), make


def prepare_engine_tiers(resolved: Resolved, registry: Registry) -> TierSettings | None:
    """The settings of the KV cache tiers; None: there are none."""
    if not resolved.plugins.get("kv_tier"):
        return None
    from frame.kv_tiers.build import prepare_tiers

    return prepare_tiers(resolved, lambda name: registry.get("kv_tier", name).capabilities, registry.create)


def _prepare_tiers(resolved: Resolved, registry: Registry, pool: object) -> tuple[TierSettings, KVPool] | None:
    """The settings of the tiers, and the pool whose pages they keep."""
    settings = prepare_engine_tiers(resolved, registry)
    return None if settings is None or not isinstance(pool, KVPool) else (settings, pool)


def build_tiers(
    resolved: Resolved, registry: Registry, rank: TorchModelRunner, followers: BatchSender | None
) -> Callable[[int, KVCacheManager], RequestTiers] | None:
    """What makes the KV cache tiers of the schedulers, by attention group."""
    if (prepared := _prepare_tiers(resolved, registry, rank.inputs.kv)) is None:
        return None
    from frame.kv_tiers.build import ControllerBuilder

    return ControllerBuilder(*prepared, rank.context.platform, followers).build


def follow_tiers(resolved: Resolved, registry: Registry, rank: TorchModelRunner, number: int) -> OrderedTiers | None:
    """The KV cache tiers of rank `number`, which follows rank 0."""
    if (prepared := _prepare_tiers(resolved, registry, rank.inputs.kv)) is None:
        return None
    from frame.kv_tiers.build import build_follower

    return build_follower(*prepared, rank.context.platform, number)


def _lead(runner: ModelRunner, followers: BatchSender, results: Sequence[ResultReceiver], place: Place) -> ModelRunner:
    """The runner of rank 0, which sends each batch to the other ranks too."""
    from frame.parallel.attention_groups import GroupRunner, LeadingGroupRunner
    from frame.parallel.tp_follower import LeadingRunner

    if isinstance(runner, GroupRunner):
        return LeadingGroupRunner(runner, followers, results, place.watch)
    return LeadingRunner(runner, followers, results[0] if results else None, place.watch)


def _tell_followers(followers: BatchSender, request: Request, finish: Finish) -> None:
    """Tell the other ranks that a traced request has ended, so that they send its spans."""
    if request.trace:
        followers.send_order(Traced(request.rid, request.trace))


def describe_engine(resolved: Resolved, capacity: Capacity) -> dict[str, Any]:
    """The engine's properties for clients, as JSON values."""
    return {
        "model": resolved.served_name,
        "architecture": resolved.model.architecture,
        "weight_version": resolved.weight_version,
        "device": resolved.device,
        "dtype": resolved.dtype,
        "kv_dtype": resolved.kv_dtype,
        "tp": resolved.plan.tp,
        "parallel": str(resolved.plan),
        "vocab_size": resolved.model.vocab_size,
        "max_context": resolved.max_context,
        "max_running_requests": resolved.max_running_requests,
        "max_total_tokens": capacity.max_total_tokens,
        "page_size": capacity.page_size,
        "overlap": resolved.overlap,
        "cuda_graph_max_bs": resolved.cuda_graph_max_bs,
        "prompt_graph_max_tokens": resolved.prompt_graph_max_tokens,
        "plugins": {kind: [choice.name for choice in choices] for kind, choices in resolved.plugins.items()},
        "phases": {name: round(seconds, 3) for name, seconds in capacity.phases.items()},
    }


def _join_callbacks(calls: Sequence[Callable[[Request, Finish], None]]) -> Callable[[Request, Finish], None] | None:
    """One function that calls all of them; None for an empty list."""
    if len(calls) < 2:
        return calls[0] if calls else None

    def call_all(request: Request, finish: Finish) -> None:
        for call in calls:
            call(request, finish)

    return call_all


def _finished(request: Request, finish: Finish) -> dict[str, Any]:
    return {
        "rid": request.rid,
        "reason": finish.reason,
        "prompt_tokens": request.prompt_len,
        "output_tokens": request.output_len,
        "cached_tokens": max(0, request.num_cached_tokens),
    }
