"""Builds the scheduler of a `Resolved` configuration: prefix cache, eviction and scheduling
policies by name, limits, and what a step does with grammars and drafts. Used by `build_engine` and
by tests. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from frame.config.resolved import Resolved
from frame.core.errors import ConfigurationError
from frame.core.interfaces.attention import AttentionCapabilities
from frame.core.interfaces.cache import EvictionContext, PrefixCache, PrefixCacheCapabilities, PrefixCacheContext
from frame.core.interfaces.cache_groups import RESERVED_PAGES, PagePool
from frame.core.interfaces.kv_allocator import KVAllocatorCapabilities, KVAllocatorContext
from frame.core.interfaces.scheduling import SchedulingContext, SchedulingPolicy
from frame.core.kv_cache.page_allocator import GroupedAllocator, PageAllocator, PagedAllocator
from frame.core.messages import Finish
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import RequestTable
from frame.core.scheduling.running import RunningSet
from frame.core.scheduling.scheduler import Scheduler, SchedulerConfig
from frame.core.scheduling.step_features import (
    NoAdapters,
    NoMedia,
    NoTiers,
    PromptBudget,
    RequestAdapters,
    RequestMedia,
    RequestTiers,
    StepFeatures,
    StepGrammars,
)
from frame.interfaces.routing import RoutingContext
from frame.latency_budget import DEFAULT_MINIMUM, DEFAULT_TARGET, DecodeServerBudget, LatencyBudget
from frame.plugins.eviction_guard import GuardedEvictionPolicy
from frame.plugins.registry import Registry
from frame.speculation.draft_scheduler import DraftScheduler
from frame.structured_output.grammar_masks import GrammarCalls
from frame.structured_output.jump_forward import JumpForward

if TYPE_CHECKING:
    from frame.parallel.grouped_scheduler import GroupedScheduler
    from frame.structured_output.call_processes import ProcessPool

MakeTiers = Callable[[KVCacheManager], RequestTiers]
ROWS_A_TOKEN = 4  # of a step: one longer row slows all rows, by a tenth on an H200 beyond 32 rows


def no_tiers(kv_manager: KVCacheManager) -> RequestTiers:
    """The tiers of a scheduler that has none."""
    return NoTiers()


def build_schedulers(
    resolved: Resolved,
    registry: Registry,
    pools: int | Sequence[PagePool],
    on_finish: Callable[[Request, Finish], None] | None = None,
    make_adapters: Callable[[], RequestAdapters] = NoAdapters,
    make_group_tiers: Callable[[int, KVCacheManager], RequestTiers] | None = None,
    pool: ProcessPool | None = None,
) -> Scheduler | GroupedScheduler:
    """The scheduler of the engine; with attention groups, one of each behind one.
    make_group_tiers: makes the tiers of a group; None: there are none."""

    def build(group: int) -> Scheduler:
        make_tiers = no_tiers if make_group_tiers is None else partial(make_group_tiers, group)
        return build_scheduler(resolved, registry, pools, on_finish, make_adapters, make_tiers, pool=pool)

    if resolved.plan.num_groups == 1:
        return build(0)
    from frame.parallel.grouped_scheduler import GroupedScheduler
    from frame.parallel.replica_choice import ReplicaChooser

    policy = registry.create(resolved.choice("routing_policy"), RoutingContext(resolved.user.model.seed))
    return GroupedScheduler([build(group) for group in range(resolved.plan.num_groups)], ReplicaChooser(policy))


def build_scheduler(
    resolved: Resolved,
    registry: Registry,
    pools: int | Sequence[PagePool],
    on_finish: Callable[[Request, Finish], None] | None = None,
    make_adapters: Callable[[], RequestAdapters] = NoAdapters,
    make_tiers: MakeTiers = no_tiers,
    clock: Callable[[], float] = time.monotonic,
    pool: ProcessPool | None = None,
) -> Scheduler:
    """The scheduler over the KV pages of these pools, that of the tokens first. A number is that of
    the pages of a model with one cache group, the reserved page included."""
    user = resolved.user
    if isinstance(pools, int):
        pools = (PagePool("tokens", pools, resolved.page_size),)
    num_pages = pools[0].num_pages
    cached = tuple(pool for pool in pools if pool.kind != "write_once")  # whose pages the prefix cache holds
    _check_groups(resolved, registry, cached)
    eviction = resolved.plugins.get("eviction_policy")
    eviction_policy = (
        GuardedEvictionPolicy(registry.create(eviction[0], EvictionContext(resolved.page_size, num_pages))) if eviction else None
    )
    cache_context = PrefixCacheContext(resolved.page_size, num_pages, eviction_policy, cached)
    cache = registry.create(resolved.choice("prefix_cache"), cache_context)
    limits = SchedulingContext(
        max_running_requests=resolved.max_running_requests,
        token_budget=resolved.chunked_prefill_size,
        max_context=resolved.max_context,
        page_size=resolved.page_size,
        num_pages=num_pages,
    )
    policy = registry.create(resolved.choice("scheduling_policy"), limits)
    if policy.needs_matches and not cache.reuses:
        name, stored = resolved.choice("scheduling_policy").name, resolved.choice("prefix_cache").name
        raise ConfigurationError(
            f"scheduler.policy: {name} orders by cached prefixes, but the prefix cache {stored} stores none; try scheduler.policy: fcfs"
        )
    config = SchedulerConfig(
        page_size=resolved.page_size,
        num_pages=num_pages,
        max_running=resolved.max_running_requests,
        token_budget=resolved.chunked_prefill_size,
        max_context=resolved.max_context,
        vocab_size=resolved.model.vocab_size,
        max_queued=user.scheduler.max_queued_requests,
        eos_ids=resolved.model.eos_token_ids,
        request_timeout=user.scheduler.request_timeout,
        seed=user.model.seed,
        overlap=resolved.overlap,
        overlaps_drafts=_overlaps_drafts(resolved, registry, pools),
        pools=resolved.pooling is not None,
        whole_prompts=resolved.computes_whole_prompts,
        preemption=user.scheduler.preemption,
        short_prompt_share=user.scheduler.short_prompt_share,
        jump_forward=resolved.jump_forward,
        jump_rows=ROWS_A_TOKEN,
        jump_tokens=resolved.cuda_graph_max_bs,
        max_pinned_pages=int(user.cache.session_share * (num_pages - RESERVED_PAGES)),
    )
    allocator = create_allocator(resolved, registry, pools)
    budget = _make_budget(resolved)
    features: dict[str, Any] = {
        "adapters": make_adapters(),
        "media": _create_media(resolved, budget if isinstance(budget, LatencyBudget) else None),
        "make_tiers": make_tiers,
        "pool": pool,
    }
    if budget is not None:
        features["prompt_budget"] = budget
    scheduler = assemble_scheduler(config, cache, allocator, policy, clock, on_finish, **features)
    if drafters := resolved.plugins.get("drafter"):
        drafter, speculative = registry.create(drafters[0], resolved.drafter_context), user.speculative
        scheduler.speculation.enable(drafter, resolved.max_drafted, is_adaptive=speculative.adaptive, tree=resolved.tree)
    return scheduler


def _make_budget(resolved: Resolved) -> LatencyBudget | DecodeServerBudget | None:
    """How many prompt tokens a step has beside decodes; None: as many as without. Without a target,
    steps of models with experts have all: each reads the weights of nearly all experts."""
    target, tokens = resolved.user.scheduler.target_itl_ms, resolved.chunked_prefill_size
    if target is not None:
        return LatencyBudget(target / 1e3, tokens) if target else None
    if resolved.user.disaggregation.mode == "decode":
        return DecodeServerBudget(tokens)
    is_paced = tokens > DEFAULT_MINIMUM and not resolved.model.num_experts
    return LatencyBudget(DEFAULT_TARGET, tokens, DEFAULT_MINIMUM) if is_paced else None


def build_pool(resolved: Resolved) -> ProcessPool | None:
    """The processes that call grammars; None: the engine calls them."""
    count = resolved.grammar_mask_processes
    if not count or not resolved.plugins.get("grammar_backend") or resolved.tokenizer_path is None:
        return None
    from frame.entrypoints.processes.grammar_process import GrammarCallProcess, MaskMemory
    from frame.structured_output.call_processes import NUM_BUFFERS, ProcessPool
    from frame.structured_output.served_calls import JumpSettings

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    vocab_size = resolved.model.vocab_size
    memory = MaskMemory((NUM_BUFFERS, resolved.max_running_requests, -(-vocab_size // 32)))
    jumps = None
    if resolved.jump_forward:
        jumps = JumpSettings(resolved.jump_forward, ROWS_A_TOKEN, resolved.cuda_graph_max_bs, count)
    threads = max(1, min(cores, 2 * cores // count))  # the rows of few processes are slow at a time
    start = partial(GrammarCallProcess, resolved.model_dump_json(), vocab_size, memory, threads, jumps)
    return ProcessPool(start, count, memory.masks)


def create_allocator(resolved: Resolved, registry: Registry, pools: Sequence[PagePool]) -> PageAllocator:
    """The allocator of these pools, which chooses pages as the configuration says."""
    choice = resolved.choice("kv_allocator")
    capabilities = registry.get("kv_allocator", choice.name).capabilities
    wants_after = isinstance(capabilities, KVAllocatorCapabilities) and capabilities.after
    choosers = [registry.create(choice, KVAllocatorContext(pool.num_pages, pool.page_size, pool.kind)) for pool in pools]
    if len(pools) == 1:
        return PagedAllocator(pools[0].num_pages, choosers[0], wants_after=wants_after)
    return GroupedAllocator(pools, choosers, wants_after=wants_after)


def assemble_scheduler(
    config: SchedulerConfig,
    cache: PrefixCache,
    allocator: PageAllocator,
    policy: SchedulingPolicy,
    clock: Callable[[], float] = time.monotonic,
    on_finish: Callable[[Request, Finish], None] | None = None,
    adapters: RequestAdapters | None = None,
    media: RequestMedia | None = None,
    make_tiers: MakeTiers = no_tiers,
    prompt_budget: PromptBudget | None = None,
    pool: ProcessPool | None = None,
) -> Scheduler:
    """A scheduler with its grammar calls and speculation, which has no drafter yet."""
    table = RequestTable(config.max_running, config.max_pages)
    kv_manager = KVCacheManager(table, cache, allocator, config.page_size)
    running = RunningSet(table, kv_manager)
    jumps = JumpForward(running, config.jump_forward, config.jump_rows, config.jump_tokens) if config.jump_forward else None
    grammars: StepGrammars = GrammarCalls(config.vocab_size, jumps=jumps)
    if pool is not None:
        from frame.structured_output.remote_calls import RemoteCalls

        grammars = RemoteCalls(pool, running.extend_request)
    speculation = DraftScheduler(table, config.vocab_size, grammars, may_overlap=config.overlaps_drafts)
    features = StepFeatures(grammars, speculation, adapters or NoAdapters(), media or NoMedia(), make_tiers(kv_manager), prompt_budget)
    return Scheduler(config, running, policy, features, clock, on_finish)


def _create_media(resolved: Resolved, budget: LatencyBudget | None) -> RequestMedia:
    """What the scheduler does with media."""
    if resolved.model.encoder_length:
        from frame.media.sequence_encoder import SequenceEncoder

        return SequenceEncoder()
    if resolved.media is None:
        return NoMedia()
    from frame.media.media_scheduler import MediaScheduler

    note = None if budget is None else budget.note_encoded
    whole_prompts, max_context = resolved.computes_whole_prompts, resolved.max_context
    budget_tokens = resolved.chunked_prefill_size
    return MediaScheduler(resolved.media, budget_tokens, whole_prompts=whole_prompts, max_context=max_context, note_encoded=note)


def _overlaps_drafts(resolved: Resolved, registry: Registry, pools: Sequence[PagePool]) -> bool:
    """Whether a step with drafts may be planned before the one before it has its lengths. On a CPU
    a step has ended when it is launched."""
    if not resolved.overlap or any(pool.window is None for pool in pools[1:]) or resolved.plan.num_groups > 1:
        return False
    chosen = {choice.name for choice in resolved.plugins.get("attention_backend", ())}
    capabilities = [record.capabilities for record in registry.records("attention_backend") if record.name in chosen]
    return resolved.device == "cpu" or all(isinstance(each, AttentionCapabilities) and each.device_lengths for each in capabilities)


def _check_groups(resolved: Resolved, registry: Registry, pools: Sequence[PagePool]) -> None:
    """Raise ConfigurationError if the prefix cache does not serve models with several groups."""
    name = resolved.choice("prefix_cache").name
    capabilities = next(record.capabilities for record in registry.records("prefix_cache") if record.name == name)
    if len(pools) > 1 and not (isinstance(capabilities, PrefixCacheCapabilities) and capabilities.groups):
        kinds = ", ".join(pool.kind for pool in pools)
        raise ConfigurationError(f"cache.prefix: {name} stores one cache group, and the model has {kinds}; try cache.prefix: radix")
