"""Public names of the plugin interfaces that changed, names and modules that moved, and the
sentences that tell a plugin's author the new ones.

Used by the registry and the loader where they refuse a plugin that was written for an earlier
interface version, or that imports what has moved. A name keeps its row here until its
interface drops plugins of that version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from frame.interfaces.kinds import KINDS

INTERFACES = ("frame.core.interfaces", "frame.interfaces")  # packages of pages


@dataclass(frozen=True, slots=True)
class Rename:
    """`old` is `new` since `api`. Parentheses hold a constructor's arguments, or follow a method
    that no class of the interface declares. `module`: the page of
    `INTERFACES` that has the name."""

    api: str  # the first version with the new name, such as "attention_backend/2"
    module: str
    old: str
    new: str


# The kinds that replace each kind of an earlier interface. Two kinds: it was split, so that no name
# of the old one has one new name.
_QUANTIZATION = ("weight_format", "gemm_kernel")
FORMER_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": ("attention_backend",),
        "quantization": _QUANTIZATION,
        "quantization_method": _QUANTIZATION,
        "grammar": ("grammar_backend",),
    }
)

# Interfaces that the core never calls.
_MOVED_PAGES = (
    *("adapter", "cli", "http", "keys", "kinds", "launcher", "modality", "parsing"),
    *("pooling", "routing", "stats", "tracing", "weights"),
)

# Modules and packages that plugins may have imported, and where they are now.
MOVED_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "frame.core.config": "frame.config",
        "frame.core.drafting": "frame.speculation",
        "frame.core.engine_states": "frame.loading.engine_states",
        "frame.core.execution.components": "frame.entrypoints.processes.components",
        "frame.core.execution.finite_check": "frame.diagnostics.finite_check",
        "frame.core.execution.hybrid_attention": "frame.forward.hybrid_attention",
        "frame.core.execution.pooler": "frame.pooling.vector_head",
        "frame.core.execution.pooling_runner": "frame.pooling.pooling_runner",
        "frame.core.execution.profiling": "frame.diagnostics.profiling",
        "frame.core.execution.recorded_forward": "frame.forward.recorded_forward",
        "frame.core.execution.torch_compile": "frame.forward.torch_compile",
        "frame.core.fair_queue": "frame.fair_queue",
        "frame.core.grammars": "frame.structured_output",
        "frame.core.host_memory": "frame.host.host_memory",
        "frame.core.installation": "frame.host.installation",
        **{f"frame.core.interfaces.{page}": f"frame.interfaces.{page}" for page in _MOVED_PAGES},
        "frame.core.ipc.child_process": "frame.host.child_process",
        "frame.core.ipc.early_process": "frame.entrypoints.processes.early_process",
        "frame.core.ipc.interpreter": "frame.host.interpreter",
        "frame.core.ipc.results": "frame.parallel.rank_channels",
        "frame.core.ipc.socket_directory": "frame.host.socket_directory",
        "frame.core.ipc.kv_events": "frame.kv_events.publisher",
        "frame.core.kv_cache.capacity": "frame.loading.capacity",
        "frame.core.kv_cache.cache_events": "frame.kv_events.cache_events",
        "frame.core.kv_cache.eviction_guard": "frame.plugins.eviction_guard",
        "frame.core.kv_cache.memory_plan": "frame.entrypoints.processes.memory_plan",
        "frame.core.loading": "frame.loading",
        "frame.core.parallel": "frame.parallel",
        "frame.core.sampling.synthetic_acceptance": "frame.speculation.synthetic_acceptance",
        "frame.core.scheduling.speculation": "frame.speculation.draft_scheduler",
        "frame.core.text": "frame.text",
        "frame.models.layers.weights.plain_product": "frame.models.layers.weights.plain_gemm",
        "frame.models.layers.weights.products": "frame.models.layers.weights.gemms",
        "frame.testing.devices": "frame.plugins.devices",
        "frame.testing.weights.packed_weights": "frame.testing.weights.canonical_weights",
    }
)

# Names that moved from one interface page to another, as "module:name".
MOVED_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **{
            f"frame.interfaces.adapter:{name}": f"frame.core.interfaces.adapter_layers:{name}"
            for name in ("AdapterLayers", "LayerDelta", "Span", "StepAdapters")
        },
        "frame.interfaces.adapter:AdapterLoad": "frame.core.interfaces.batch:AdapterLoad",
        "frame.interfaces.adapter:AdapterOrder": "frame.core.interfaces.runner:AdapterOrder",
        "frame.interfaces.adapter:PendingOrder": "frame.core.interfaces.runner:PendingOrder",
        "frame.core.interfaces.attention:StateLayer": "frame.core.interfaces.batch:StateLayer",
        "frame.core.interfaces.cache:PageAllocator": "frame.core.kv_cache.page_allocator:PageAllocator",
        **{
            f"frame.core.interfaces.weight_transfer:{name}": f"frame.interfaces.weight_transfer:{name}"
            for name in ("WeightTransfer", "WeightTransferCapabilities", "WeightTransferContext")
        },
        "frame.core.interfaces.runner:MOST_SINGLE": "frame.core.interfaces.runner:MAX_SINGLE_TOKEN_ROWS",
    }
)

_STREAM_METHODS = ("synchronize", "create_stream", "create_event", "get_current_stream", "set_stream", "allocate_pinned")
_GRAPH_METHODS = ("create_graph_pool", "begin_capture", "end_capture", "is_capturing", "borrow")
_WEIGHTS = (
    ("Codes", "QuantType"),
    ("WeightScheme.codes", "WeightScheme.quant_type"),
    ("PackedWeight", "CanonicalWeight"),
    ("PackedWeight.codes", "CanonicalWeight.quantized"),
    ("PackedWeight.rounds_inputs", "CanonicalWeight.quantizes_inputs"),
)
_GROUP_METHODS = ("read", "unlock_group", "evict_group", "count_evictable", "count_locked")

RENAMES = tuple(
    Rename(*row)
    for row in (
        ("attention_backend/2", "attention", "AttentionNeeds", "AttentionRequirements"),
        ("attention_backend/2", "batch", "AttentionOut", "AttentionOutput"),
        ("attention_backend/2", "batch", "AttentionOut.of", "AttentionOutput.get_buffer"),
        ("model/2", "model", "ModelFacts", "ModelConfig"),
        ("model/2", "model", "ModelNeeds", "ModelRequirements"),
        ("model/2", "model", "SentenceFacts", "SentenceTransformersConfig"),
        ("model/2", "model", "Model.logits", "Model.compute_logits"),
        ("model/2", "model", "Model.ignored", "Model.ignored_weights"),
        ("model/2", "model", "Model.narrows", "Model.supports_token_selection"),
        ("model/2", "batch", "WantedTokens", "SelectedTokens"),
        ("moe_runner/2", "moe", "MoENeeds", "MoERequirements"),
        ("moe_runner/2", "moe", "Dispatched", "DispatchOutput"),
        ("moe_dispatcher/2", "moe", "MoENeeds", "MoERequirements"),
        ("moe_dispatcher/2", "moe", "Dispatched", "DispatchOutput"),
        ("scheduling_policy/2", "scheduling", "SchedulingPolicy.victim", "SchedulingPolicy.select_victim"),
        ("scheduling_policy/2", "scheduling", "SchedulingPolicy.preempts", "SchedulingPolicy.can_preempt"),
        ("logits_processor/2", "sampling", "LogitsProcessor.wants", "LogitsProcessor.applies_to"),
        ("logits_processor/2", "sampling", "LogitsProcessor.admit", "LogitsProcessor.add_slot"),
        ("logits_processor/2", "sampling", "LogitsProcessor.observe", "LogitsProcessor.observe_tokens"),
        ("logits_processor/2", "sampling", "LogitsProcessor.release", "LogitsProcessor.remove_slot"),
        ("model/3", "model", "Model(model_config, context)", "Model(context, options)"),
        ("scheduling_policy/3", "scheduling", "SchedulingPolicy(options)", "SchedulingPolicy(context, options)"),
        ("scheduling_policy/4", "scheduling", "SchedulingPolicy.order", "SchedulingPolicy.sort_waiting"),
        ("eviction_policy/2", "cache", "EvictionPolicy(options)", "EvictionPolicy(context, options)"),
        ("logits_processor/3", "sampling", "LogitsProcessor(vocab_size, max_slots, device, options)", "LogitsProcessor(context, options)"),
        ("grammar_backend/3", "sampling", "Grammar.fill", "Grammar.fill_mask"),
        ("grammar_backend/3", "sampling", "Grammar.accept", "Grammar.accept_token"),
        ("grammar_backend/3", "sampling", "GrammarBackend(tokenizer, vocab_size, options)", "GrammarBackend(context, options)"),
        ("grammar_backend/3", "sampling", "register_grammars", "register_grammar_backends"),
        ("platform/2", "platform", "FoundDevices", "UsableDevices"),
        ("platform/2", "platform", "Platform.is_asynchronous", "SupportsStreams"),
        *(("platform/2", "platform", f"Platform.{name}", f"SupportsStreams.{name}") for name in _STREAM_METHODS),
        *(("platform/2", "platform", f"Platform.{name}", f"SupportsGraphs.{name}") for name in _GRAPH_METHODS),
        ("platform/2", "platform", "Platform.check_synchronisation", "SupportsSynchronisationChecks.check_synchronisation"),
        ("collective/2", "collective", "Collective.reduce_add_norm", "SupportsReduceNorm.reduce_add_norm"),
        ("collective/2", "collective", "Collective.sum_product", "SupportsReduceMatmul.reduce_matmul"),
        ("collective/2", "collective", "Collective.start_send", "SupportsStartSend.start_send"),
        *(("prefix_cache/2", "cache", f"PrefixCache.{name}", f"SupportsCacheGroups.{name}") for name in _GROUP_METHODS),
        ("prefix_cache/2", "cache", "PrefixCache.outline", "SupportsOutline.outline"),
        ("prefix_cache/2", "cache", "PrefixCache.relock", "SupportsRelock.relock"),
        ("prefix_cache/2", "cache", "PrefixCache.reset", "evict_all"),
        ("prefix_cache/2", "cache", "PrefixCache.check_integrity", "check_integrity"),
        ("prefix_cache/2", "cache", "Match.longest", "Match.max_length"),
        ("gemm_kernel/2", "gemm_kernel", "Product", "Gemm"),
        ("gemm_kernel/2", "gemm_kernel", "GroupedProduct", "GroupedGemm"),
        ("model/4", "batch", "HiddenStateTaps", "HiddenStateOutputs"),
        ("model/4", "model", "finish()", "process_weights_after_loading()"),  # of any module of a model; the loader checks it, too
        ("attention_backend/4", "batch", "HostView.least_lens", "HostView.min_lens"),
        ("reasoning_parser/3", "parsing", "ReasoningParser(options)", "ReasoningParser(context, options)"),
        ("tool_call_parser/3", "parsing", "ToolCallParser(options)", "ToolCallParser(context, options)"),
        ("weight_format/2", "weight_format", "LayerFormat.decode", "LayerFormat.to_canonical"),
        ("weight_format/2", "weight_format", "LayerFormat.encode", "LayerFormat.quantize_weight"),
        ("weight_format/2", "weight_format", "LayerFormat.rounds", "LayerFormat.quantizes"),
        ("weight_format/2", "weight_format", "FormatCapabilities.codes", "FormatCapabilities.quant_types"),
        ("gemm_kernel/2", "gemm_kernel", "Speed.codes", "Speed.quant_type"),
        *((f"{kind}/2", "weight_format", old, new) for kind in _QUANTIZATION for old, new in _WEIGHTS),
    )
)


def describe_renames(written_for: str, offered: str) -> str:
    """What a plugin for interface version `written_for` has to change for `offered`, a clause; ""
    where no name changed."""
    kind, _, new = offered.partition("/")
    other, _, old = written_for.partition("/")
    successors = FORMER_KINDS.get(other, (other,))
    if kind not in successors or not (old.isdecimal() and new.isdecimal()):
        return ""
    if len(successors) > 1:
        return _replacement(other)
    versions = {f"{kind}/{number}" for number in range(int(old) + 1, int(new) + 1)}
    return _clause(each for each in RENAMES if each.api in versions)


def describe_import(error: BaseException) -> str:
    """The new place of what an ImportError in the chain of `error` misses, a sentence; "" for other
    errors. It misses an interface page or a name of one, or a module that has moved."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, ImportError) and (moved := _find_moved(current)) is not None:
            new = MOVED_MODULES.get(moved) or MOVED_NAMES[moved].replace(":", ".")
            return f"The plugin was written for an earlier frame: {moved.replace(':', '.')} is {new} now."
        package, _, page = (getattr(current, "name", None) or "").rpartition(".")
        if isinstance(current, ImportError) and package in INTERFACES:
            renames = [each for each in RENAMES if each.module == page and f"{each.old!r}" in str(current)]
            if renames:
                versions = " and ".join(dict.fromkeys(KINDS[each.api.partition("/")[0]].api for each in renames))
                return f"The plugin was written for an earlier interface; this frame supports {versions}: {_clause(renames)}."
            if isinstance(current, ModuleNotFoundError) and page in FORMER_KINDS:
                return f"The plugin was written for an earlier interface: {_replacement(page)}."
        current = current.__cause__ or current.__context__
    return ""


def _find_moved(error: ImportError) -> str | None:
    """The key of `MOVED_MODULES` or `MOVED_NAMES` that an import did not find."""
    for old in (*MOVED_MODULES, *MOVED_NAMES):
        parent, _, name = old.replace(":", ".").rpartition(".")
        if error.name == old or (error.name == parent and f"cannot import name {name!r}" in str(error)):
            return old
    return None


def describe_missing(api: str, plugin: type) -> str:
    """The earlier names that a class of interface version `api` has in place of abstract methods, a
    clause; "" for none."""
    missing, kind = getattr(plugin, "__abstractmethods__", ()), api.partition("/")[0]
    old = (each for each in RENAMES if each.api.startswith(f"{kind}/") and hasattr(plugin, each.old.rpartition(".")[2]))
    return _clause(each for each in old if each.new.rpartition(".")[2] in missing)


def describe_hook(name: str) -> str:
    """What to write in place of hook `name` of an earlier interface, a clause; "" for others."""
    for former in FORMER_KINDS:
        if name == f"register_{former}s":
            return _replacement(former)
    return ""


def _replacement(former: str) -> str:
    kinds = (KINDS[name] for name in FORMER_KINDS[former])
    return f"replace {former} by {' and '.join(f'{kind.api} (hook {kind.hook})' for kind in kinds)}"


def _clause(renames: Iterable[Rename]) -> str:
    pairs = dict.fromkeys((each.old, each.new) for each in renames)
    return f"rename {', '.join(f'{old} to {new}' for old, new in pairs)}" if pairs else ""
