"""The part of `resolve` that decides whether media are served, and how they are placed.

Pure; it must not import or name a plugin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from frame.config.resolution.plugins import KEYS, Choices, choose_list
from frame.config.schema import FrameConfig
from frame.config.selection import PlainRequirements, ResolveError, Selection, by_rank
from frame.core.interfaces.model import ModelCapabilities, ModelConfig, Task
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.plugin import PluginRecord
from frame.interfaces.modality import EncoderCost, MediaPlan, ModalityCapabilities

KIND = "modality"
TEXT_ALONE = "media.enabled: false"
_TABLE_BYTES = 512 << 20
_MIN_ROWS, _MAX_ROWS = 4096, 65_536
_MIN_PROCESSES, _MAX_PROCESSES = 2, 8  # an image of 1,920 x 1,080 takes about 85 ms of a core
_CONFIGS = {"image": "vision_config", "video": "vision_config", "audio": "audio_config"}  # of config.json, by modality
# Seconds for an operation of an encoder over those for one of a prompt: 80 ms for 8,160 patches of
# Qwen3-VL-8B on an H200, beside 30 ms for 2,056 prompt tokens
_SLOWNESS = 6.0
_LAYERS = ("depth", "num_hidden_layers", "encoder_layers", "vt_num_hidden_layers")  # names of an encoder's sizes in config.json
_HIDDEN = ("embed_dim", "hidden_size", "d_model", "vt_hidden_size")
_INNER = ("intermediate_size", "encoder_ffn_dim", "vt_intermediate_size")
_WIDTHS = {"float32": 4}  # bytes of a number; others have 2


def may_serve(config: FrameConfig, model_config: ModelConfig) -> bool:
    """Whether a model that reads media may be served with them, before its plugins are chosen."""
    return config.media.enabled is not False and model_config.has_processor and bool(model_config.full_config)


def attends_in_both_directions(capabilities: Any, model_config: ModelConfig) -> bool:
    """Whether placeholders of an item attend to each other in both directions (`MediaSpans`)."""
    spans = getattr(capabilities, "media_spans", False)
    return spans is True or (bool(spans) and model_config.config.get("use_bidirectional_attention") == spans)


def choose_media(
    chosen: Choices,
    records: Mapping[str, Sequence[PluginRecord]],
    config: FrameConfig,
    model_config: ModelConfig,
    requirements: PlainRequirements,
    task: Task,
    plan: ParallelPlan,
) -> tuple[str, ...]:
    """The modalities that are served; () for text alone, with the reason. Raises ResolveError where
    the user wants media and something stands against it."""
    media = config.media
    if media.enabled is False:
        chosen.reasons[KEYS[KIND]] = "none: media.enabled is false"
        return ()
    capabilities = next((each.record.capabilities for each in chosen.selected.get("model", ())), None)
    readable = _find_readable(capabilities, model_config)
    loads_drafter = any(getattr(each.record.capabilities, "loads_model", False) for each in chosen.selected.get("drafter", ()))
    has_spans = attends_in_both_directions(capabilities, model_config)
    obstacles = _find_obstacles(config, model_config, readable, task, plan, loads_drafter=loads_drafter, has_spans=has_spans)
    obstacle = next(obstacles, None)
    if obstacle is not None:
        why, change = obstacle
        if media.enabled or media.modalities:
            name = "media.enabled is true" if media.enabled else "media.modalities is set"
            raise ResolveError(f"{name}, but {why}.", change=change)
        chosen.reasons["media.enabled"] = f"false: {why}"
        return ()
    served = _choose_plugins(chosen, records, media.modalities, readable, requirements)
    if not served and media.enabled:
        rejected = chosen.reject(KEYS[KIND], KIND, records, requirements)
        raise ResolveError("media.enabled is true, but no modality can be used.", rejected, change=TEXT_ALONE)
    lacking = [name for name in readable if name not in served]
    if media.modalities is None:
        chosen.lacking_media |= {name: _explain(chosen, records, name) for name in lacking}
    if media.enabled is None:
        without = f"; not {' and '.join(lacking)}, whose plugins cannot be used" if lacking and served else ""
        unusable = f"false: no plugin for {' and '.join(readable)} can be used"
        chosen.reasons["media.enabled"] = f"true: the model reads {' and '.join(served)}{without}" if served else unusable
    return served


def plan_media(
    config: FrameConfig,
    model_config: ModelConfig,
    capabilities: Any,
    served: tuple[str, ...],
    dtype: str,
    chunk: int,
    max_context: int,
    cores: int,
) -> tuple[MediaPlan, dict[str, str]]:
    """The sizes of the table and of a step and the number of processes, and the reasons of those
    that the user left open."""
    media, reasons = config.media, dict[str, str]()
    sections = model_config.full_config
    vision = sections.get("vision_config") or {}
    rows, budget = media.table_rows, media.encode_budget
    if not rows:
        layers = len(vision.get("deepstack_visual_indexes") or ())
        row_bytes = model_config.hidden_size * (1 + layers) * _WIDTHS.get(dtype, 2)
        rows = max(_MIN_ROWS, min(_MAX_ROWS, _TABLE_BYTES // row_bytes, 2 * max_context))
        reasons["media.table_rows"] = f"{rows * row_bytes >> 20} MiB of {row_bytes} bytes each, at most for two whole prompts"
    if budget is None:
        merged = math.prod(vision.get("merge_kernel_size") or [int(vision.get("spatial_merge_size") or 1)] * 2)
        budget = max(_MIN_ROWS, chunk * merged)
        reasons["media.encode_budget"] = f"rows of a step's prompt tokens, {merged} of these positions each"
    processes = media.processes
    if processes is None:
        processes = max(_MIN_PROCESSES, min(_MAX_PROCESSES, cores // 4))
        reasons["media.processes"] = f"{processes}: a quarter of {cores} cores, from {_MIN_PROCESSES} to {_MAX_PROCESSES}"
    plan = MediaPlan(
        table_rows=rows,
        encode_budget=budget,
        modalities=served,
        whole_items=attends_in_both_directions(capabilities, model_config),
        rotary_positions=model_config.has_mrope,
        processes=processes,
        costs={name: cost for name in served if (cost := find_cost(sections.get(_CONFIGS.get(name, "")) or {}, model_config))},
    )
    return plan, reasons


def _find_readable(capabilities: Any, model_config: ModelConfig) -> tuple[str, ...]:
    """The modalities that the model plugin and the checkpoint both have encoders for."""
    if not isinstance(capabilities, ModelCapabilities) or model_config.encoder_length:
        return ()
    full = model_config.full_config
    return tuple(name for name in capabilities.modalities if full.get(_CONFIGS.get(name, "")) is not None)


def _find_obstacles(
    config: FrameConfig,
    model_config: ModelConfig,
    readable: tuple[str, ...],
    task: Task,
    plan: ParallelPlan,
    *,
    loads_drafter: bool,
    has_spans: bool,
) -> Iterator[tuple[str, str]]:
    """What stands against media, each with the change that helps."""
    vision = model_config.full_config.get("vision_config") or {}
    if not readable:
        yield f"the model {model_config.architecture} reads text alone here", TEXT_ALONE
    if model_config.config.get("use_bidirectional_attention") == "vision" and not has_spans:
        yield "use_bidirectional_attention is vision in its config.json, which the model plugin implements for text alone", TEXT_ALONE
    if not model_config.has_processor:
        yield "the checkpoint has no preprocessor_config.json", TEXT_ALONE
    if task != "generate":
        yield f"model.task is {task}, which takes text alone", "model.task: generate"
    if config.model.skip_tokenizer_init:
        yield "model.skip_tokenizer_init is true, and placeholders need a tokenizer", "model.skip_tokenizer_init: false"
    if plan.num_groups > 1:
        yield "parallel.dp_attention takes text alone", "parallel.dp_attention: false"
    if config.parallel.nnodes > 1:
        yield f"parallel.nnodes is {config.parallel.nnodes}, and features are files of one host", "parallel.nnodes: 1"
    if loads_drafter:
        yield f"the draft model of speculative.algorithm: {config.speculative.algorithm} reads text alone", TEXT_ALONE
    deep, first = len(vision.get("deepstack_visual_indexes") or ()), model_config.num_layers // config.parallel.pp
    if config.parallel.pp > 1 and deep > first:
        yield f"the encoder's output goes to {deep} layers, and the first of {config.parallel.pp} stages has {first}", "parallel.pp: 1"


def _choose_plugins(
    chosen: Choices,
    records: Mapping[str, Sequence[PluginRecord]],
    named: Sequence[str] | None,
    readable: tuple[str, ...],
    requirements: PlainRequirements,
) -> tuple[str, ...]:
    """Choose the named plugins, or for each modality the best one. -> what is served."""
    if named is not None:
        choose_list(chosen, records, KIND, named, requirements)
        served = [_reads(each.record) for each in chosen.selected[KIND]]
        wrong = next((name for name in served if name not in readable or served.count(name) > 1), None)
        if wrong is not None:
            why = "twice" if wrong in readable else f"and the model reads {' and '.join(readable)}"
            raise ResolveError(f"media.modalities has a plugin for {wrong}, {why}.", change=f"media.modalities: {','.join(readable)}")
        return tuple(served)
    refused = {each.record.name for each in chosen.reject(KEYS[KIND], KIND, records, requirements)}
    usable = [record for record in sorted(records.get(KIND, ()), key=by_rank) if record.name not in refused]
    best = {name: record for record in reversed(usable) for name in [_reads(record)] if name in readable}
    served = [name for name in readable if name in best]
    chosen.selected[KIND] = [Selection(best[name], "reads it") for name in served]
    chosen.reasons[KEYS[KIND]] = f"what the model reads: {', '.join(served) or 'none'}"
    return tuple(served)


def _explain(chosen: Choices, records: Mapping[str, Sequence[PluginRecord]], modality: str) -> str:
    """Why no plugin for a modality can be used."""
    rejected = chosen.rejected.get(KEYS[KIND], {})
    why = ["; ".join(rejected[each.name]) for each in records.get(KIND, ()) if _reads(each) == modality and each.name in rejected]
    return "; ".join(why) or "no plugin reads it"


def _reads(record: PluginRecord) -> str:
    """What a part of a request says, whose files the plugin reads."""
    return record.capabilities.modality if isinstance(record.capabilities, ModalityCapabilities) else record.name


def find_cost(section: Mapping[str, Any], model_config: ModelConfig) -> EncoderCost | None:
    """section: the encoder's configuration. None: it does not name its sizes."""
    num_layers, hidden = (next((int(section[name]) for name in names if section.get(name)), 0) for names in (_LAYERS, _HIDDEN))
    if not (num_layers and hidden):
        return None
    inner = next((int(section[name]) for name in _INNER if section.get(name)), 0) or int(float(section.get("mlp_ratio") or 4) * hidden)
    share = _SLOWNESS * num_layers / _count_products(model_config)
    return EncoderCost(num_layers, share * (4 * hidden**2 + 2 * hidden * inner), share * 2 * hidden)


def _count_products(model_config: ModelConfig) -> int:
    """Multiplications of the decoder for a token, as a model with plain layers has them."""
    stored, hidden = model_config.config, model_config.hidden_size
    inner = int(stored.get("intermediate_size") or 4 * hidden)
    if model_config.num_experts:
        inner = int(stored.get("moe_intermediate_size") or inner) * int(stored.get("num_experts_per_tok") or 1)
    heads = 2 * (model_config.num_heads + model_config.num_kv_heads) * model_config.head_dim
    return model_config.num_layers * hidden * (heads + 3 * inner)
