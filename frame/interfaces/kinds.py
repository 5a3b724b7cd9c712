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
    """One plugin kind. `interface` and `context` are "module:attribute" below `frame`."""

    name: str
    version: int  # of the interface that this core supports
    summary: str  # what its plugins are, a noun phrase
    key: str  # the setting that selects a plugin; "": none does
    interface: str  # the class to derive from
    context: str  # the first constructor argument; the second is the validated options, or None
    suite: str | None = None  # the module of the conformance suite; None: there is none
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
        return None if self.suite is None else f"{_PACKAGE}.{self.suite}:suite"


_ALL = (
    Kind("platform", 2, "platforms: devices with their memory, streams and graphs", "execution.device",
         "core.interfaces.platform:Platform", "core.interfaces.platform:PlatformContext", "testing.ranks.platform"),
    Kind("collective", 2, "collectives: operations on tensors of several ranks", "parallel.collective",
         "core.interfaces.collective:Collective", "core.interfaces.collective:CollectiveContext", "testing.ranks.collective"),
    Kind("launcher", 1, "launchers: places and processes of the ranks", "parallel.launcher",
         "interfaces.launcher:Launcher", "interfaces.launcher:LauncherContext", "testing.ranks.launcher"),
    Kind("model", 4, "model architectures", "model.implementation",
         "core.interfaces.model:Model", "core.interfaces.model:ModelContext", "testing.model.suite"),
    Kind("attention_backend", 4, "attention backends", "attention.backend",
         "core.interfaces.attention:AttentionBackend", "core.interfaces.rank_context:RankContext", "testing.attention.suite"),
    Kind("weight_format", 2, "formats of stored weights", "model.quantization",
         "core.interfaces.weight_format:WeightFormat", "core.interfaces.weight_format:FormatContext", "testing.weights.weight_format"),
    Kind("adapter", 1, "formats of LoRA adapters", "adapters.format",
         "interfaces.adapter:AdapterFormat", "interfaces.adapter:AdapterContext", "testing.adapters.suite"),
    Kind("modality", 1, "modalities: files of images, videos and audio as input of a model", "media.modalities",
         "interfaces.modality:Modality", "interfaces.modality:ModalityContext", "testing.modality.suite", is_list=True),
    Kind("gemm_kernel", 2, "matrix products with stored weights", "model.gemm_kernel",
         "core.interfaces.gemm_kernel:GemmKernel", "core.interfaces.rank_context:RankContext", "testing.weights.gemm_kernel"),
    Kind("moe_runner", 2, "expert GEMMs", "moe.runner",
         "core.interfaces.moe:MoERunner", "core.interfaces.rank_context:RankContext", "testing.moe.runner"),
    Kind("moe_dispatcher", 3, "exchanges of tokens between the ranks of an expert layer", "moe.dispatcher",
         "core.interfaces.moe:MoEDispatcher", "core.interfaces.rank_context:RankContext", "testing.moe.dispatcher"),
    Kind("weight_source", 1, "weight sources", "model.load_format",
         "interfaces.weights:WeightSource", "interfaces.weights:WeightSourceContext", "testing.weights.weight_source"),
    Kind("weight_transfer", 1, "weight transfers: how tensors come from a trainer into a running engine", "execution.weight_transfer",
         "interfaces.weight_transfer:WeightTransfer", "interfaces.weight_transfer:WeightTransferContext",
         "testing.weight_transfer.suite", is_list=True),
    Kind("scheduling_policy", 4, "scheduling policies", "scheduler.policy",
         "core.interfaces.scheduling:SchedulingPolicy", "core.interfaces.scheduling:SchedulingContext",
         "testing.scheduling.scheduling_policy"),
    Kind("routing_policy", 1, "routing policies: choices of the replica of a request", "parallel.routing_policy",
         "interfaces.routing:RoutingPolicy", "interfaces.routing:RoutingContext", "testing.scheduling.routing_policy"),
    Kind("prefix_cache", 2, "prefix caches", "cache.prefix",
         "core.interfaces.cache:PrefixCache", "core.interfaces.cache:PrefixCacheContext", "testing.scheduling.prefix_cache"),
    Kind("eviction_policy", 2, "eviction policies of the prefix cache", "cache.eviction",
         "core.interfaces.cache:EvictionPolicy", "core.interfaces.cache:EvictionContext", "testing.scheduling.eviction_policy"),
    Kind("kv_allocator", 1, "KV allocators: choices of the free pages of the KV cache that requests get", "cache.allocator",
         "core.interfaces.kv_allocator:KVAllocator", "core.interfaces.kv_allocator:KVAllocatorContext", "testing.scheduling.kv_allocator"),
    Kind("kv_tier", 1, "KV cache tiers: places outside of the device that hold blocks of the KV cache", "cache.tiers",
         "core.interfaces.kv_tier:KVTier", "core.interfaces.kv_tier:KVTierContext", "testing.kv_tier.suite", is_list=True),
    Kind("logits_processor", 3, "logits processors", "sampling.processors",
         "core.interfaces.sampling:LogitsProcessor", "core.interfaces.sampling:ProcessorContext",
         "testing.sampling.logits_processor", is_list=True),
    Kind("sampler", 1, "samplers: draws of the next tokens from logits", "sampling.sampler",
         "interfaces.sampler:TokenSampler", "interfaces.sampler:SamplerContext", "testing.sampling.sampler"),
    Kind("grammar_backend", 3, "grammar backends", "sampling.grammar",
         "core.interfaces.sampling:GrammarBackend", "core.interfaces.sampling:GrammarContext", "testing.sampling.grammar_backend"),
    Kind("drafter", 1, "drafters of speculative decoding", "speculative.algorithm",
         "core.interfaces.drafter:Drafter", "core.interfaces.drafter:DrafterContext", "testing.drafter.suite"),
    Kind("pooler", 1, "poolers: hidden states of a sequence as one vector", "model.pooling",
         "interfaces.pooling:Pooler", "interfaces.pooling:PoolerContext", "testing.pooling.pooler"),
    Kind("key_store", 1, "key stores: whose API key a request has, and what it opens", "server.key_store",
         "interfaces.keys:KeyStore", "interfaces.keys:KeyStoreContext", "testing.serving.key_store"),
    Kind("http_extension", 1, "routes, middleware and request hooks of the HTTP server", "server.extensions",
         "interfaces.http:HttpExtension", "interfaces.http:HttpContext", "testing.serving.http_extension", is_list=True),
    Kind("reasoning_parser", 3, "reasoning parsers", "text.reasoning_parser",
         "interfaces.parsing:ReasoningParser", "interfaces.parsing:ParserContext", "testing.parsing.reasoning_parser"),
    Kind("tool_call_parser", 3, "tool-call parsers", "text.tool_call_parser",
         "interfaces.parsing:ToolCallParser", "interfaces.parsing:ParserContext", "testing.parsing.tool_call_parser"),
    Kind("stat_logger", 1, "stat loggers", "log.stat_loggers",
         "interfaces.stats:StatLogger", "interfaces.stats:StatLoggerContext", "testing.serving.stat_logger", is_list=True),
    Kind("tracer", 1, "tracers: where the spans of requests go", "server.tracer",
         "interfaces.tracing:Tracer", "interfaces.tracing:TracerContext", "testing.serving.tracer"),
    Kind("cli_command", 1, "subcommands of `frame`", "",
         "interfaces.cli:CliCommand", "interfaces.cli:CommandContext", "testing.serving.cli_command"),
)  # fmt: skip

KINDS = MappingProxyType({kind.name: kind for kind in _ALL})
