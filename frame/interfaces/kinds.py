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
    Kind("platform", 2, "platforms: devices with their memory, streams and graphs",
         "core.interfaces.platform:Platform", "core.interfaces.platform:PlatformContext",
         "execution.device", "testing.ranks.platform:suite"),
    Kind("collective", 2, "collectives: operations on tensors of several ranks",
         "core.interfaces.collective:Collective", "core.interfaces.collective:CollectiveContext",
         "parallel.collective", "testing.ranks.collective:suite"),
    Kind("launcher", 1, "launchers: places and processes of the ranks",
         "interfaces.launcher:Launcher", "interfaces.launcher:LauncherContext",
         "parallel.launcher", "testing.ranks.launcher:suite"),
    Kind("model", 4, "model architectures",
         "core.interfaces.model:Model", "core.interfaces.model:ModelContext",
         "model.implementation", "testing.model.suite:suite"),
    Kind("attention_backend", 4, "attention backends",
         "core.interfaces.attention:AttentionBackend", "core.interfaces.rank_context:RankContext",
         "attention.backend", "testing.attention.suite:suite"),
    Kind("weight_format", 2, "formats of stored weights",
         "core.interfaces.weight_format:WeightFormat", "core.interfaces.weight_format:FormatContext",
         "model.quantization", "testing.weights.weight_format:suite"),
    Kind("adapter", 1, "formats of LoRA adapters",
         "interfaces.adapter:AdapterFormat", "interfaces.adapter:AdapterContext",
         "adapters.format", "testing.adapters.suite:suite"),
    Kind("modality", 1, "modalities: files of images, videos and audio as input of a model",
         "interfaces.modality:Modality", "interfaces.modality:ModalityContext",
         "media.modalities", "testing.modality.suite:suite", is_list=True),
    Kind("gemm_kernel", 2, "matrix products with stored weights",
         "core.interfaces.gemm_kernel:GemmKernel", "core.interfaces.rank_context:RankContext",
         "model.gemm_kernel", "testing.weights.gemm_kernel:suite"),
    Kind("moe_runner", 2, "expert GEMMs",
         "core.interfaces.moe:MoERunner", "core.interfaces.rank_context:RankContext",
         "moe.runner", "testing.moe.runner:suite"),
    Kind("moe_dispatcher", 3, "exchanges of tokens between the ranks of an expert layer",
         "core.interfaces.moe:MoEDispatcher", "core.interfaces.rank_context:RankContext",
         "moe.dispatcher", "testing.moe.dispatcher:suite"),
    Kind("weight_source", 1, "weight sources",
         "interfaces.weights:WeightSource", "interfaces.weights:WeightSourceContext",
         "model.load_format", "testing.weights.weight_source:suite"),
    Kind("weight_transfer", 1, "weight transfers: how tensors come from a trainer into a running engine",
         "interfaces.weight_transfer:WeightTransfer", "interfaces.weight_transfer:WeightTransferContext",
         "execution.weight_transfer", "testing.weight_transfer.suite:suite", is_list=True),
    Kind("scheduling_policy", 4, "scheduling policies",
         "core.interfaces.scheduling:SchedulingPolicy", "core.interfaces.scheduling:SchedulingContext",
         "scheduler.policy", "testing.scheduling.scheduling_policy:suite"),
    Kind("routing_policy", 1, "routing policies: choices of the replica of a request",
         "interfaces.routing:RoutingPolicy", "interfaces.routing:RoutingContext",
         "parallel.routing_policy", "testing.scheduling.routing_policy:suite"),
    Kind("prefix_cache", 2, "prefix caches",
         "core.interfaces.cache:PrefixCache", "core.interfaces.cache:PrefixCacheContext",
         "cache.prefix", "testing.scheduling.prefix_cache:suite"),
    Kind("eviction_policy", 2, "eviction policies of the prefix cache",
         "core.interfaces.cache:EvictionPolicy", "core.interfaces.cache:EvictionContext",
         "cache.eviction", "testing.scheduling.eviction_policy:suite"),
    Kind("kv_allocator", 1, "KV allocators: choices of the free pages of the KV cache that requests get",
         "core.interfaces.kv_allocator:KVAllocator", "core.interfaces.kv_allocator:KVAllocatorContext",
         "cache.allocator", "testing.scheduling.kv_allocator:suite"),
    Kind("kv_tier", 1, "KV cache tiers: places outside of the device that hold blocks of the KV cache",
         "core.interfaces.kv_tier:KVTier", "core.interfaces.kv_tier:KVTierContext",
         "cache.tiers", "testing.kv_tier.suite:suite", is_list=True),
    Kind("logits_processor", 3, "logits processors",
         "core.interfaces.sampling:LogitsProcessor", "core.interfaces.sampling:ProcessorContext",
         "sampling.processors", "testing.sampling.logits_processor:suite", is_list=True),
    Kind("sampler", 1, "samplers: draws of the next tokens from logits",
         "interfaces.sampler:TokenSampler", "interfaces.sampler:SamplerContext",
         "sampling.sampler", "testing.sampling.sampler:suite"),
    Kind("grammar_backend", 3, "grammar backends",
         "core.interfaces.sampling:GrammarBackend", "core.interfaces.sampling:GrammarContext",
         "sampling.grammar", "testing.sampling.grammar_backend:suite"),
    Kind("drafter", 1, "drafters of speculative decoding",
         "core.interfaces.drafter:Drafter", "core.interfaces.drafter:DrafterContext",
         "speculative.algorithm", "testing.drafter.suite:suite"),
    Kind("pooler", 1, "poolers: hidden states of a sequence as one vector",
         "interfaces.pooling:Pooler", "interfaces.pooling:PoolerContext",
         "model.pooling", "testing.pooling.pooler:suite"),
    Kind("key_store", 1, "key stores: whose API key a request has, and what it opens",
         "interfaces.keys:KeyStore", "interfaces.keys:KeyStoreContext",
         "server.key_store", "testing.serving.key_store:suite"),
    Kind("http_extension", 1, "routes, middleware and request hooks of the HTTP server",
         "interfaces.http:HttpExtension", "interfaces.http:HttpContext",
         "server.extensions", "testing.serving.http_extension:suite", is_list=True),
    Kind("reasoning_parser", 3, "reasoning parsers",
         "interfaces.parsing:ReasoningParser", "interfaces.parsing:ParserContext",
         "text.reasoning_parser", "testing.parsing.reasoning_parser:suite"),
    Kind("tool_call_parser", 3, "tool-call parsers",
         "interfaces.parsing:ToolCallParser", "interfaces.parsing:ParserContext",
         "text.tool_call_parser", "testing.parsing.tool_call_parser:suite"),
    Kind("stat_logger", 1, "stat loggers",
         "interfaces.stats:StatLogger", "interfaces.stats:StatLoggerContext",
         "log.stat_loggers", "testing.serving.stat_logger:suite", is_list=True),
    Kind("tracer", 1, "tracers: where the spans of requests go",
         "interfaces.tracing:Tracer", "interfaces.tracing:TracerContext",
         "server.tracer", "testing.serving.tracer:suite"),
    Kind("cli_command", 1, "subcommands of `frame`",
         "interfaces.cli:CliCommand", "interfaces.cli:CommandContext",
         "", "testing.serving.cli_command:suite"),
)  # fmt: skip

KINDS = MappingProxyType({kind.name: kind for kind in _ALL})
