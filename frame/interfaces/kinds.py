"""The plugin kinds, one row each: interface version, class to derive from, setting that selects a
plugin, conformance suite.

Used by the registry, the hooks, the configuration, the scaffolds and the conformance kit, which all
call a kind by its one name. Plain strings, so that the table imports no interface module; a test
compares them with the modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

_PACKAGE = "frame"


@dataclass(frozen=True, slots=True)
class Kind:
    """One plugin kind. `interface`, `context` and `suite` are "module:attribute" below `frame`."""

    name: str
    version: int  # of the interface that this core supports
    summary: str  # what its plugins are, a noun phrase
    interface: str  # the class to derive from
    context: str  # the first constructor argument; the second is the validated options, or None
    key: str  # the setting that selects a plugin; "": none does
    suite: str | None = None  # the conformance suite; None: there is none
    is_list: bool = False  # `key` names any number of plugins

    @property
    def api(self) -> str:
        return f"{self.name}/{self.version}"

    @property
    def plural(self) -> str:
        return f"{self.name[:-1]}ies" if self.name.endswith("y") else f"{self.name}s"

    @property
    def hook(self) -> str:
        return f"register_{self.plural}"

    @property
    def change(self) -> str:
        """What a user can set instead of one of its plugins; "": no setting selects it."""
        if not self.key:
            return ""
        return f"leave it out of {self.key}" if self.is_list else f"name another plugin with {self.key}"

    @property
    def interface_path(self) -> str:
        """The class to derive from, as "package.module:Class"."""
        return f"{_PACKAGE}.{self.interface}"

    @property
    def context_path(self) -> str:
        """The class of the first constructor argument, as "package.module:Class"."""
        return f"{_PACKAGE}.{self.context}"

    @property
    def suite_path(self) -> str | None:
        """The function that yields the checks, as "package.module:function"."""
        return None if self.suite is None else f"{_PACKAGE}.{self.suite}"


_ALL = (
    Kind(
        name="platform",
        version=2,
        summary="platforms: devices with their memory, streams and graphs",
        interface="core.interfaces.platform:Platform",
        context="core.interfaces.platform:PlatformContext",
        key="execution.device",
        suite="testing.ranks.platform:suite",
    ),
    Kind(
        name="collective",
        version=2,
        summary="collectives: operations on tensors of several ranks",
        interface="core.interfaces.collective:Collective",
        context="core.interfaces.collective:CollectiveContext",
        key="parallel.collective",
        suite="testing.ranks.collective:suite",
    ),
    Kind(
        name="launcher",
        version=1,
        summary="launchers: places and processes of the ranks",
        interface="interfaces.launcher:Launcher",
        context="interfaces.launcher:LauncherContext",
        key="parallel.launcher",
        suite="testing.ranks.launcher:suite",
    ),
    Kind(
        name="model",
        version=4,
        summary="model architectures",
        interface="core.interfaces.model:Model",
        context="core.interfaces.model:ModelContext",
        key="model.implementation",
        suite="testing.model.suite:suite",
    ),
    Kind(
        name="attention_backend",
        version=4,
        summary="attention backends",
        interface="core.interfaces.attention:AttentionBackend",
        context="core.interfaces.rank_context:RankContext",
        key="attention.backend",
        suite="testing.attention.suite:suite",
    ),
    Kind(
        name="weight_format",
        version=2,
        summary="formats of stored weights",
        interface="core.interfaces.weight_format:WeightFormat",
        context="core.interfaces.weight_format:FormatContext",
        key="model.quantization",
        suite="testing.weights.weight_format:suite",
    ),
    Kind(
        name="adapter",
        version=1,
        summary="formats of LoRA adapters",
        interface="interfaces.adapter:AdapterFormat",
        context="interfaces.adapter:AdapterContext",
        key="adapters.format",
        suite="testing.adapters.suite:suite",
    ),
    Kind(
        name="modality",
        version=1,
        summary="modalities: files of images, videos and audio as input of a model",
        interface="interfaces.modality:Modality",
        context="interfaces.modality:ModalityContext",
        key="media.modalities",
        suite="testing.modality.suite:suite",
        is_list=True,
    ),
    Kind(
        name="gemm_kernel",
        version=2,
        summary="matrix products with stored weights",
        interface="core.interfaces.gemm_kernel:GemmKernel",
        context="core.interfaces.rank_context:RankContext",
        key="model.gemm_kernel",
        suite="testing.weights.gemm_kernel:suite",
    ),
    Kind(
        name="moe_runner",
        version=2,
        summary="expert GEMMs",
        interface="core.interfaces.moe:MoERunner",
        context="core.interfaces.rank_context:RankContext",
        key="moe.runner",
        suite="testing.moe.runner:suite",
    ),
    Kind(
        name="moe_dispatcher",
        version=3,
        summary="exchanges of tokens between the ranks of an expert layer",
        interface="core.interfaces.moe:MoEDispatcher",
        context="core.interfaces.rank_context:RankContext",
        key="moe.dispatcher",
        suite="testing.moe.dispatcher:suite",
    ),
    Kind(
        name="weight_source",
        version=1,
        summary="weight sources",
        interface="interfaces.weights:WeightSource",
        context="interfaces.weights:WeightSourceContext",
        key="model.load_format",
        suite="testing.weights.weight_source:suite",
    ),
    Kind(
        name="weight_transfer",
        version=1,
        summary="weight transfers: how tensors come from a trainer into a running engine",
        interface="core.interfaces.weight_transfer:WeightTransfer",
        context="core.interfaces.weight_transfer:WeightTransferContext",
        key="execution.weight_transfer",
        suite="testing.weight_transfer.suite:suite",
        is_list=True,
    ),
    Kind(
        name="scheduling_policy",
        version=4,
        summary="scheduling policies",
        interface="core.interfaces.scheduling:SchedulingPolicy",
        context="core.interfaces.scheduling:SchedulingContext",
        key="scheduler.policy",
        suite="testing.scheduling.scheduling_policy:suite",
    ),
    Kind(
        name="routing_policy",
        version=1,
        summary="routing policies: choices of the replica of a request",
        interface="interfaces.routing:RoutingPolicy",
        context="interfaces.routing:RoutingContext",
        key="parallel.routing_policy",
        suite="testing.scheduling.routing_policy:suite",
    ),
    Kind(
        name="prefix_cache",
        version=2,
        summary="prefix caches",
        interface="core.interfaces.cache:PrefixCache",
        context="core.interfaces.cache:PrefixCacheContext",
        key="cache.prefix",
        suite="testing.scheduling.prefix_cache:suite",
    ),
    Kind(
        name="eviction_policy",
        version=2,
        summary="eviction policies of the prefix cache",
        interface="core.interfaces.cache:EvictionPolicy",
        context="core.interfaces.cache:EvictionContext",
        key="cache.eviction",
        suite="testing.scheduling.eviction_policy:suite",
    ),
    Kind(
        name="kv_allocator",
        version=1,
        summary="KV allocators: choices of the free pages of the KV cache that requests get",
        interface="core.interfaces.kv_allocator:KVAllocator",
        context="core.interfaces.kv_allocator:KVAllocatorContext",
        key="cache.allocator",
        suite="testing.scheduling.kv_allocator:suite",
    ),
    Kind(
        name="kv_tier",
        version=1,
        summary="KV cache tiers: places outside of the device that hold blocks of the KV cache",
        interface="core.interfaces.kv_tier:KVTier",
        context="core.interfaces.kv_tier:KVTierContext",
        key="cache.tiers",
        suite="testing.kv_tier.suite:suite",
        is_list=True,
    ),
    Kind(
        name="logits_processor",
        version=3,
        summary="logits processors",
        interface="core.interfaces.sampling:LogitsProcessor",
        context="core.interfaces.sampling:ProcessorContext",
        key="sampling.processors",
        suite="testing.sampling.logits_processor:suite",
        is_list=True,
    ),
    Kind(
        name="sampler",
        version=1,
        summary="samplers: draws of the next tokens from logits",
        interface="core.interfaces.sampler:TokenSampler",
        context="core.interfaces.sampler:SamplerContext",
        key="sampling.sampler",
        suite="testing.sampling.sampler:suite",
    ),
    Kind(
        name="grammar_backend",
        version=3,
        summary="grammar backends",
        interface="core.interfaces.sampling:GrammarBackend",
        context="core.interfaces.sampling:GrammarContext",
        key="sampling.grammar",
        suite="testing.sampling.grammar_backend:suite",
    ),
    Kind(
        name="drafter",
        version=1,
        summary="drafters of speculative decoding",
        interface="core.interfaces.drafter:Drafter",
        context="core.interfaces.drafter:DrafterContext",
        key="speculative.algorithm",
        suite="testing.drafter.suite:suite",
    ),
    Kind(
        name="pooler",
        version=1,
        summary="poolers: hidden states of a sequence as one vector",
        interface="interfaces.pooling:Pooler",
        context="interfaces.pooling:PoolerContext",
        key="model.pooling",
        suite="testing.pooling.pooler:suite",
    ),
    Kind(
        name="key_store",
        version=1,
        summary="key stores: whose API key a request has, and what it opens",
        interface="interfaces.keys:KeyStore",
        context="interfaces.keys:KeyStoreContext",
        key="server.key_store",
        suite="testing.serving.key_store:suite",
    ),
    Kind(
        name="http_extension",
        version=1,
        summary="routes, middleware and request hooks of the HTTP server",
        interface="interfaces.http:HttpExtension",
        context="interfaces.http:HttpContext",
        key="server.extensions",
        suite="testing.serving.http_extension:suite",
        is_list=True,
    ),
    Kind(
        name="reasoning_parser",
        version=3,
        summary="reasoning parsers",
        interface="interfaces.parsing:ReasoningParser",
        context="interfaces.parsing:ParserContext",
        key="text.reasoning_parser",
        suite="testing.parsing.reasoning_parser:suite",
    ),
    Kind(
        name="tool_call_parser",
        version=3,
        summary="tool-call parsers",
        interface="interfaces.parsing:ToolCallParser",
        context="interfaces.parsing:ParserContext",
        key="text.tool_call_parser",
        suite="testing.parsing.tool_call_parser:suite",
    ),
    Kind(
        name="stat_logger",
        version=1,
        summary="stat loggers",
        interface="interfaces.stats:StatLogger",
        context="interfaces.stats:StatLoggerContext",
        key="log.stat_loggers",
        suite="testing.serving.stat_logger:suite",
        is_list=True,
    ),
    Kind(
        name="tracer",
        version=1,
        summary="tracers: where the spans of requests go",
        interface="interfaces.tracing:Tracer",
        context="interfaces.tracing:TracerContext",
        key="server.tracer",
        suite="testing.serving.tracer:suite",
    ),
    Kind(
        name="cli_command",
        version=1,
        summary="subcommands of `frame`",
        interface="interfaces.cli:CliCommand",
        context="interfaces.cli:CommandContext",
        key="",  # its name on the command line
        suite="testing.serving.cli_command:suite",
    ),
)

KINDS = MappingProxyType({kind.name: kind for kind in _ALL})
