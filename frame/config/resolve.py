"""Resolves the user's configuration, the machine, the model configuration and the plugin records
into a `Resolved` with reasons.

Used at start. Pure: it must not read files, and must not import or name a plugin. Values that the
user set are never rewritten: they are used as they are or refused. Resolving the `pinned` form of a
result gives the same result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from frame.checkpoint.model_config import find_model, name_model
from frame.config.hardware import Hardware
from frame.config.resolution.attention import choose_attention, choose_page_size
from frame.config.resolution.drafter import check_speculation, find_tree
from frame.config.resolution.machine import budgets, choose_grammar_sizes, choose_graph_sizes, dtypes_to_try
from frame.config.resolution.media import attends_in_both_directions, choose_media, may_serve, plan_media
from frame.config.resolution.parallel import (
    check_transfers,
    choose_collective,
    find_conflicts,
    find_host_conflicts,
    make_plan,
    require_launcher,
)
from frame.config.resolution.platform import choose_platform, get_capabilities, rank_preferred
from frame.config.resolution.plugins import (
    KEYS,
    Choices,
    check_unused_options,
    choose_adapter_formats,
    choose_gemm_kernels,
    choose_key_store,
    choose_list,
    choose_optional,
    choose_parser,
    pair_experts,
    plugin_choice,
    resolve_params,
)
from frame.config.resolution.task import check_step, choose_pooling, choose_task, find_adapter_conflicts, find_mode_conflicts, is_encoder
from frame.config.resolution.tiers import choose_tiers
from frame.config.resolved import PluginChoice, Resolved
from frame.config.schema import FrameConfig
from frame.config.section import PHASES
from frame.config.selection import PlainRequirements, ResolveError, Selection, by_rank, join_conflicts, nearest_change, select
from frame.core.errors import ConfigurationError
from frame.core.interfaces.attention import AttentionRequirements
from frame.core.interfaces.cache import PrefixCacheCapabilities, PrefixCacheRequirements
from frame.core.interfaces.collective import CollectiveRequirements
from frame.core.interfaces.drafter import DrafterRequirements, TreeShape
from frame.core.interfaces.gemm_kernel import GemmRequirements
from frame.core.interfaces.model import ModelCapabilities, ModelConfig, ModelRequirements, Pooling, Task, checkpoint_tasks
from frame.core.interfaces.moe import MoERequirements
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.plugin import PluginRecord
from frame.core.interfaces.weight_format import FormatRequirements
from frame.interfaces.kinds import KINDS
from frame.interfaces.modality import MediaPlan
from frame.interfaces.sampler import SamplerRequirements
from frame.interfaces.weights import WeightSourceRequirements

__all__ = ["ResolveError", "pinned", "resolve"]

_T = TypeVar("_T")

PLAIN_WEIGHTS = "none"  # what `model.quantization` calls weights as they are
NO_PARSER = "none"  # what `text.reasoning_parser` and `text.tool_call_parser` call no parser


def resolve(config: FrameConfig, hardware: Hardware, model_config: ModelConfig, records: Mapping[str, Sequence[PluginRecord]]) -> Resolved:
    """Choose every value that `config` leaves open. Raises ResolveError with the rejected
    candidates and the smallest change that helps; one ConflictsError where several parts of the
    configuration conflict."""
    platform = choose_platform(config, hardware, records.get("platform", ()))
    records = rank_preferred(records, get_capabilities(platform.record).preferred)
    (dtype, dtype_why), *others = dtypes_to_try(config, hardware, model_config, platform.record)

    def attempt(dtype: str, dtype_why: str) -> Resolved:
        return _Solver(config, hardware, model_config, records, platform, dtype).solve({"model.dtype": dtype_why})

    try:
        return attempt(dtype, dtype_why)
    except ResolveError as error:
        for other, other_why in others:
            with contextlib.suppress(ResolveError):
                refusals = " ".join(str(each).splitlines()[0] for each in error.conflicts)
                return attempt(other, f"{other_why}; {dtype} was refused: {refusals}")
        raise


def pinned(resolved: Resolved) -> FrameConfig:
    """The user's configuration with every open value set as resolved."""
    user = resolved.user
    single = {kind: choices[0].name for kind, choices in resolved.plugins.items() if len(choices) == 1 and not KINDS[kind].is_list}
    values: dict[str, Any] = {key: single[kind] for kind, key in KEYS.items() if kind in single}
    if len(pair := resolved.plugins["attention_backend"]) > 1:
        values[KEYS["attention_backend"]] = dict(zip(PHASES, (choice.name for choice in pair), strict=True))
    values |= {
        "model.path": resolved.model_path,
        "model.served_name": resolved.served_name,
        "model.tokenizer": resolved.tokenizer_path,
        "model.dtype": resolved.dtype,
        "model.task": resolved.task,
        "model.max_context": resolved.max_context,
        "cache.kv_dtype": resolved.kv_dtype,
        "cache.page_size": resolved.page_size,
        "cache.mem_fraction": resolved.mem_fraction,
        "cache.max_total_tokens": resolved.max_total_tokens,
        "scheduler.max_running_requests": resolved.max_running_requests,
        "scheduler.chunked_prefill_size": resolved.chunked_prefill_size,
        "scheduler.overlap": resolved.overlap,
        "sampling.defaults": resolved.sampling_defaults,
        "sampling.jump_forward": resolved.jump_forward,
        "sampling.grammar_mask_processes": resolved.grammar_mask_processes,
        "sampling.grammar_cache": resolved.grammar_cache,
        "media.enabled": resolved.media is not None,
        "execution.device": resolved.device,
        "execution.threads": resolved.threads,
        "execution.cuda_graph_max_bs": resolved.cuda_graph_max_bs,
        "execution.prompt_graph_max_tokens": resolved.prompt_graph_max_tokens,
    }
    if resolved.media is not None:
        values |= {f"media.{name}": getattr(resolved.media, name) for name in ("table_rows", "encode_budget", "processes")}
    data = user.model_dump()
    for key, value in values.items():
        section, _, name = key.partition(".")
        data[section][name] = value
    return FrameConfig.model_validate(data)


@dataclass
class _Solver:
    """One attempt with a fixed platform and dtype. Fills `chosen`, `reasons` and `conflicts`."""

    config: FrameConfig
    hardware: Hardware
    model_config: ModelConfig
    records: Mapping[str, Sequence[PluginRecord]]
    platform: Selection
    dtype: str
    chosen: Choices = field(default_factory=Choices)
    reasons: dict[str, str] = field(default_factory=dict)
    conflicts: list[ConfigurationError] = field(default_factory=list)

    def solve(self, reasons: Mapping[str, str]) -> Resolved:
        config = self.config
        key = KEYS["platform"]
        self.chosen.impossible = frozenset(f"{key}: {candidate.record.name}" for candidate in self.platform.rejected)
        self.chosen.note("platform", key, self.platform, is_open=config.execution.device is None)
        self.reasons.update({key: why for key, why in reasons.items() if why})
        kv_dtype = self._value("cache.kv_dtype", config.cache.kv_dtype, self.dtype, "the computing type")
        task, pooling = self._families(kv_dtype)
        page_size = self._page_size()
        whole_prompts = pooling is not None and pooling.needs_whole_prompts(self.model_config.encoder)
        self._collect(self._prefix_cache, PrefixCacheRequirements(page_size, whole_prompts))
        self._collect(choose_tiers, self.chosen, self.records, config, self._plain, self.plan, self.hardware)
        max_context = self._collect(self._max_context, page_size) or self.model_config.max_context
        sizes = self._sizes(task, whole_prompts, kv_dtype, max_context)
        media = self._media(task, sizes["chunked_prefill_size"], max_context)
        plugins: dict[str, list[PluginChoice]] = {kind: [] for kind in self.chosen.selected}
        self._collect(check_unused_options, config, self.records, self.chosen)
        for kind, selections in self.chosen.selected.items():
            for selection in selections:
                if (choice := self._collect(plugin_choice, selection.record, config)) is not None:
                    plugins[kind].append(choice)
        params = self._collect(resolve_params, self.chosen, self.records, config.sampling.defaults, self.model_config.sampling)
        if self.conflicts:
            raise join_conflicts(self.conflicts)
        path = str(find_model(config.model.path))
        served_name = self._value("model.served_name", config.model.served_name, name_model(config.model.path), "from model.path")
        named = config.model.tokenizer and str(find_model(config.model.tokenizer))
        tokenizer = None if config.model.skip_tokenizer_init else self._value("model.tokenizer", named, path, "the model's own")
        return Resolved(
            user=config,
            model_path=path,
            served_name=served_name,
            tokenizer_path=tokenizer,
            model=replace(self.model_config, chat_template=""),  # long, and not used any more
            device=self.device,
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            plan=self.plan,
            max_context=max_context,
            page_size=page_size,
            tree=self.tree,
            max_total_tokens=config.cache.max_total_tokens,
            task=task,
            pooling=pooling,
            media=media,
            plugins=plugins,
            reasons=self.reasons | self.chosen.reasons,
            rejected=self.chosen.rejected,
            lacking_media=self.chosen.lacking_media,
            **sizes,
            **(params or {}),
        )

    def _collect(self, choose: Callable[..., _T], *arguments: Any) -> _T | None:
        """Call `choose`. Its conflict is recorded, so that one error has all, and None returned."""
        try:
            return choose(*arguments)
        except ConfigurationError as error:
            self.conflicts.append(error)
            return None

    def _families(self, kv_dtype: str) -> tuple[Task, Pooling | None]:
        """Choose the task and the plugins of all kinds."""
        task = self._collect(self._task) or checkpoint_tasks(self.model_config.architecture)[0]
        pooling = self._collect(self._model, task)
        if pooling is not None and self.plan.num_groups > 1:
            sentence = f"parallel.dp_attention is true, but model.task is {task}."
            self.conflicts.append(ResolveError(sentence, change="parallel.dp_attention: false"))
        self.conflicts += find_conflicts(self.plan, self.model_config, self.platform.record, self.hardware, self.config.model.quantization)
        self.conflicts += find_host_conflicts(self.config)
        media = {"media": may_serve(self.config, self.model_config), "spans": self._has_spans()}
        on_cpu = self.device == "cpu"
        self.conflicts += find_mode_conflicts(self.config, self.model_config, task, self.tree, on_cpu=on_cpu, **media)
        self.conflicts += find_adapter_conflicts(self.config, self.model_config)
        ranks, named = self.plan.num_ranks, self.config.parallel.launcher
        links = CollectiveRequirements(self.device, ranks, self.plan.hosts, self._compatible, self.config.execution.deterministic)
        self._collect(choose_collective, self.chosen, self.records, self.config, links, self.hardware.of(self.device))
        self._collect(self._select, "launcher", require_launcher(self.config), named, f"No launcher starts {ranks} rank(s)")
        self._collect(self._quantization)
        named = self.config.model.load_format
        sources = WeightSourceRequirements(ranks, named is not None, self.model_config.quantization)
        self._collect(self._select, "weight_source", sources, named, "No weight source reads the checkpoint")
        self._collect(self._attention, kv_dtype)
        self._collect(self._experts)
        self._policies(task)
        return task, pooling

    def _model_has(self, feature: str) -> bool:
        """Whether the capabilities of the chosen model plugin have this flag."""
        selected = self.chosen.selected.get("model")
        return bool(selected and getattr(selected[-1].record.capabilities, feature, False))

    def _has_spans(self) -> bool:
        selected = self.chosen.selected.get("model")
        return bool(selected and attends_in_both_directions(selected[-1].record.capabilities, self.model_config))

    def _experts(self) -> None:
        moe, model, mode = self.config.moe, self.model_config, self.config.execution.deterministic
        if not model.num_experts:
            for key, value in (("moe.runner", moe.runner), ("moe.dispatcher", moe.dispatcher)):
                if value is not None:
                    raise ResolveError(f"{key} is {value}, but {model.architecture} has no experts.", change=f"{key}: auto")
            return
        biased = self._model_has("biased_experts")
        requirements = MoERequirements(self.device, self._capability(), self.dtype, self._compatible, biased, mode)
        named = {"moe_dispatcher": moe.dispatcher, "moe_runner": moe.runner}
        for kind, name in named.items():
            needed = replace(requirements, plan=self.plan, biased=False) if kind == "moe_dispatcher" else requirements
            self._collect(self._select, kind, needed, name, f"No {kind} serves experts on {self.device} in {self.dtype}")
        if all(kind in self.chosen.selected for kind in named):
            self._collect(pair_experts, self.chosen, self.records, named, requirements, self.plan)

    def _sizes(self, task: Task, whole_prompts: bool, kv_dtype: str, max_context: int) -> dict[str, Any]:
        """The sizes of a step, by name."""
        sizes = self._values(budgets(self.config, self.hardware, self.platform.record, self.model_config, kv_dtype))
        if whole_prompts:
            chunk = sizes["chunked_prefill_size"]
            sizes["chunked_prefill_size"] = self._collect(self._whole_prompts, chunk, max_context) or chunk
        graphs = self._collect(self._graph_sizes, task, sizes["max_running_requests"])
        sizes |= graphs or {"cuda_graph_max_bs": 0, "prompt_graph_max_tokens": 0}
        return sizes | self._values(choose_grammar_sizes(self.config, self.hardware, self.platform.record, sizes))

    def _media(self, task: Task, chunk: int, max_context: int) -> MediaPlan | None:
        """Choose the modalities. -> how media are placed; None: requests have text alone."""
        served = self._collect(choose_media, self.chosen, self.records, self.config, self.model_config, self._plain, task, self.plan)
        if not served:
            return None
        reads, cores = self.chosen.selected["model"][0].record.capabilities, self.hardware.cpu_cores
        plan, reasons = plan_media(self.config, self.model_config, reads, served, self.dtype, chunk, max_context, cores)
        self.reasons |= reasons
        return plan

    def _graph_sizes(self, task: Task, max_running: int) -> dict[str, Any]:
        """The sizes of captured steps, by name."""
        tokens, platform = -(-max_running // self.config.parallel.pp), self.platform.record
        if self.config.speculative.algorithm is not None:  # a graph has a row for each drafted token
            tokens *= 1 + (self.tree.num_nodes if self.tree else self.config.speculative.num_steps)
        sizes = choose_graph_sizes(self.chosen, self.config, self.model_config, platform, task, tokens)
        return self._values(sizes)

    def _values(self, entries: Sequence[tuple[str, Any, Any, str]]) -> dict[str, Any]:
        """The value of each (setting, user's value, default, reason), by the setting's name."""
        return {key.partition(".")[2]: self._value(key, explicit, value, why) for key, explicit, value, why in entries}

    @property
    def plan(self) -> ParallelPlan:
        return make_plan(self.config)

    @property
    def tree(self) -> TreeShape | None:
        """The form of drafts; None: chains, or there is no drafter."""
        return find_tree(self.config, self.records.get("drafter", ()))

    @property
    def device(self) -> str:
        """The platform's name."""
        return self.platform.record.name

    @property
    def _compatible(self) -> tuple[str, ...]:
        """The platforms whose plugins run on this one too."""
        return get_capabilities(self.platform.record).compatible

    @property
    def _plain(self) -> PlainRequirements:
        return PlainRequirements(self.device, self._compatible)

    def _value(self, key: str, explicit: Any, chosen: Any, why: str) -> Any:
        """The user's value, or else `chosen`, whose reason is recorded."""
        if explicit is not None:
            return explicit
        self.reasons[key] = why
        return chosen

    def _capability(self) -> tuple[int, int] | None:
        devices = self.hardware.of(self.device)
        return min((each.compute_capability for each in devices if each.compute_capability is not None), default=None)

    def _task(self) -> Task:
        task, why = choose_task(self.config, self.model_config)
        if why:
            self.reasons["model.task"] = why
        return task

    def _model(self, task: Task) -> Pooling | None:
        """Choose the model plugin and adapt the model configuration to it. -> how vectors are
        pooled; None for the task generate."""
        parallel, execution, architecture = self.config.parallel, self.config.execution, self.model_config.architecture
        modes = execution.torch_compile, self.config.adapters.enabled, execution.deterministic, self.device
        requirements = ModelRequirements(architecture, parallel.tp, task, parallel.pp, self.plan.num_groups > 1, *modes)

        def exact_first(record: PluginRecord) -> tuple[bool, int, str]:
            return (getattr(record.capabilities, "architectures", ()) is None, *by_rank(record))

        subject = f"No model plugin serves {requirements.architecture} for {task} on {requirements.tp} tensor-parallel rank(s)"
        subject += f" and {parallel.pp} stages" if parallel.pp > 1 else ""
        selection = self._select("model", requirements, self.config.model.implementation, subject, exact_first)
        capabilities = selection.record.capabilities
        if self.model_config.kind == "mla" and isinstance(capabilities, ModelCapabilities) and capabilities.expands_mla:
            self.model_config = replace(self.model_config, kind="mha", latent=None, num_kv_heads=self.model_config.num_heads)
        if isinstance(capabilities, ModelCapabilities) and is_encoder(capabilities, self.model_config):
            self.model_config = replace(self.model_config, encoder=True)
        if task == "generate":
            return None
        pooling, why = choose_pooling(self.config, self.model_config, task)
        if why:
            self.reasons["model.pooling"] = f"{pooling.mode}: {why}"
        record = self._select("pooler", self._plain, pooling.mode, "").record
        return replace(pooling, whole_prompts=getattr(record.capabilities, "whole_prompts", True))

    def _whole_prompts(self, chunk: int, max_context: int) -> int:
        """Most tokens of a step if each prompt is computed in one step."""
        if self.config.scheduler.chunked_prefill_size is None and chunk < max_context:
            self.reasons["scheduler.chunked_prefill_size"] = "holds the longest prompt, which is computed in one step"
            return max_context
        check_step(self.config, chunk, max_context)
        return chunk

    def _quantization(self) -> None:
        stored, named = self.model_config.quantization, self.config.model.quantization
        open_choice = None if stored else PLAIN_WEIGHTS
        subject = f"No weight format loads {stored or 'plain'} weights"
        selection = self._select("weight_format", FormatRequirements(stored), named or open_choice, subject)
        if named is None:
            self.chosen.reasons["model.quantization"] = f"the checkpoint's weights are {stored or 'plain'}"
        requirements = GemmRequirements(self.device, self._capability(), self.dtype, self._compatible, self.config.execution.deterministic)
        choose_gemm_kernels(self.chosen, self.records, self.config.model.gemm_kernel, requirements, selection.record)

    def _attention(self, kv_dtype: str) -> None:
        model_config = self.model_config
        requirements = AttentionRequirements(
            device=self.device,
            compatible=self._compatible,
            deterministic=self.config.execution.deterministic,
            compute_capability=self._capability(),
            kind=model_config.kind,
            head_dim=model_config.head_dim,
            v_head_dim=model_config.v_head_dim,
            latent=model_config.latent,
            other_head_dims=model_config.other_head_dims,
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            page_size=self.config.cache.page_size,
            sliding_window=model_config.sliding_window is not None,
            soft_cap=bool(model_config.config.get("attn_logit_softcapping")),
            sinks=self._model_has("sinks"),
            sparse=self._model_has("sparse"),
            chunked=self._model_has("chunked"),
            spans=self._has_spans() and may_serve(self.config, self.model_config),
            bidirectional=model_config.encoder,
            tree_mask=self.tree is not None,
            group=model_config.num_heads // max(1, model_config.num_kv_heads),
            device_name=next((accelerator.name for accelerator in self.hardware.of(self.device)), None),
        )
        page = f", pages of {requirements.page_size} tokens" if requirements.page_size else ""
        subject = (
            f"No attention backend serves {model_config.kind} attention with head size {model_config.head_dim} "
            f"on {self.device} in {self.dtype} "
            f"with a {kv_dtype} KV cache{page}"
        )
        choose_attention(self.chosen, self.records, self.config.attention.backend, requirements, subject)

    def _page_size(self) -> int:
        records = [selection.record for selection in self.chosen.selected.get("attention_backend", ())]
        return int(self._value("cache.page_size", self.config.cache.page_size, *choose_page_size(records)))

    def _prefix_cache(self, requirements: PrefixCacheRequirements) -> None:
        """Choose the prefix cache, and the eviction policy if it takes one."""
        subject = f"No prefix cache stores pages of {requirements.page_size} tokens"
        record = self._select("prefix_cache", requirements, self.config.cache.prefix, subject).record
        if isinstance(record.capabilities, PrefixCacheCapabilities) and not record.capabilities.eviction_policy:
            self.reasons["cache.eviction"] = f"not used: the prefix cache {record.name} takes no eviction policy"
        else:
            self._select("eviction_policy", PlainRequirements(self.device), self.config.cache.eviction, "")

    def _policies(self, task: Task) -> None:
        config, requirements = self.config, self._plain
        self._collect(self._select, "scheduling_policy", requirements, config.scheduler.policy, "")
        self._collect(self._select, "kv_allocator", requirements, config.cache.allocator, "No KV allocator is installed")
        named, key = config.parallel.routing_policy, KEYS["routing_policy"]
        if config.parallel.dp > 1:
            self._collect(self._select, "routing_policy", requirements, named, "No routing policy chooses replicas")
        elif named is not None:
            self.conflicts.append(ResolveError(f"{key} is {named}, but parallel.dp is 1: there is one replica.", change=f"{key}: null"))
        self._collect(check_transfers, config)
        self._collect(choose_key_store, self.chosen, self.records, config.server)
        if config.server.tracer is not None or config.server.otlp_endpoint is not None:
            self._collect(choose_optional, self.chosen, self.records, "tracer", config.server.tracer, requirements)
        transfers = ("weight_transfer", config.execution.weight_transfer)
        for kind, names in (("http_extension", config.server.extensions), ("stat_logger", config.log.stat_loggers), transfers):
            self._collect(choose_list, self.chosen, self.records, kind, names, requirements)
        if config.adapters.enabled:
            self._collect(choose_adapter_formats, self.chosen, self.records, config.adapters.format, requirements)
        self._collect(self._drafter, task)
        if task != "generate":  # nothing is sampled
            return
        self._collect(choose_list, self.chosen, self.records, "logits_processor", config.sampling.processors, requirements)
        mode, drafts = config.execution.deterministic, config.speculative.algorithm is not None
        draws = SamplerRequirements(self.device, self._capability(), self._compatible, mode, drafts)
        self._collect(self._select, "sampler", draws, config.sampling.sampler, f"No sampler runs on {self.device}")
        if not config.model.skip_tokenizer_init:
            self._collect(choose_optional, self.chosen, self.records, "grammar_backend", config.sampling.grammar, requirements)
        for kind, name in (("reasoning_parser", config.text.reasoning_parser), ("tool_call_parser", config.text.tool_call_parser)):
            if name is not None and name != NO_PARSER:
                self._collect(self._select, kind, requirements, name, "")
            elif name is None and not config.model.skip_tokenizer_init:
                choose_parser(self.chosen, self.records, kind, self.model_config.chat_template)

    def _drafter(self, task: Task) -> None:
        """Choose the drafter that the user names; without a name there is none."""
        is_named = check_speculation(self.config, task, self.model_config, self.plan.num_groups, self.tree)
        config = self.config.speculative
        requirements = DrafterRequirements(
            device=self.device, draft_model=config.draft_model_path is not None, draft_layers=self.model_config.num_draft_layers,
            pp=self.config.parallel.pp, compatible=self._compatible,
        )  # fmt: skip
        if is_named:
            self._select("drafter", requirements, config.algorithm, "")

    def _select(self, kind: str, requirements: Any, named: str | None, subject: str, order: Any = None) -> Selection:
        key, candidates = KEYS[kind], self.records.get(kind, ())
        selection = select(key, candidates, requirements, named, order, self.chosen.impossible, kind)
        if selection is None:
            rejected = self.chosen.reject(key, kind, self.records, requirements)
            missing = requirements.checkpoint if isinstance(requirements, FormatRequirements) else None
            raise ResolveError(f"{subject}.", rejected, nearest_change(rejected), missing)
        self.chosen.note(kind, key, selection, is_open=named is None)
        return selection

    def _max_context(self, page_size: int) -> int:
        explicit, total, trained = self.config.model.max_context, self.config.cache.max_total_tokens, self.model_config.max_context
        if explicit is not None and explicit > trained:
            raise ResolveError(
                f"model.max_context is {explicit}, but the model was made for {trained} tokens.", change=f"model.max_context: {trained}"
            )
        if total is not None and total < page_size:
            raise ResolveError(
                f"cache.max_total_tokens is {total}, less than one page of {page_size} tokens.",
                change=f"cache.max_total_tokens: {page_size}",
            )
        if explicit is not None and total is not None and total < explicit:
            raise ResolveError(
                f"cache.max_total_tokens is {total}, less than one request of model.max_context ({explicit}).",
                change=f"model.max_context: {total}",
            )
        if total is not None and total < trained:
            return int(self._value("model.max_context", explicit, total, f"the KV cache holds {total} tokens, the model takes {trained}"))
        max_length = self.model_config.sentence and self.model_config.sentence.max_tokens
        if explicit is None and max_length and max_length < trained:
            return int(self._value("model.max_context", None, max_length, f"sentence_bert_config.json; positions go to {trained}"))
        return int(self._value("model.max_context", explicit, trained, "what the checkpoint was made for"))
