"""The parts of `resolve` that concern drafters: the form of drafts, what does not fit them, and the
configuration of a draft model, which is that of the target with another checkpoint.

Used by `resolve`, and by `prepare` for drafters whose model is that of a model plugin. Pure. Must
not know a drafter by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from frame.config.resolution.plugins import plugin_options
from frame.config.schema import FrameConfig
from frame.config.selection import ResolveError
from frame.core.errors import PluginError
from frame.core.interfaces.drafter import MAX_STEPS, MAX_TREE_KEYS, DrafterCapabilities, TreeOptions, TreeShape

if TYPE_CHECKING:
    from frame.config.resolved import Resolved
    from frame.core.interfaces.model import ModelConfig, Task
    from frame.core.interfaces.plugin import PluginRecord

MAX_PADDING = 1024  # tokens by which the vocabularies of two sizes of a model may differ


def find_drafter(resolved: Resolved, records: Mapping[str, Sequence[PluginRecord]]) -> DrafterCapabilities:
    """What the chosen drafter can do; nothing where there is none."""
    names = [choice.name for choice in resolved.plugins.get("drafter", ())]
    capabilities = [record.capabilities for record in records.get("drafter", ()) if record.name in names]
    return next((each for each in capabilities if isinstance(each, DrafterCapabilities)), DrafterCapabilities())


def resolve_draft_model(resolved: Resolved, model_config: ModelConfig, resolve: Callable[[FrameConfig], Resolved]) -> Resolved:
    """The configuration of the target with that of its draft model. model_config: of the draft
    checkpoint; resolve: for this machine and model. Raises ResolveError if it does not fit the
    target."""
    difference = abs(model_config.vocab_size - resolved.model.vocab_size)
    if difference > MAX_PADDING:
        raise ResolveError(
            f"speculative.draft_model_path has a vocabulary of {model_config.vocab_size} tokens, and the model one of "
            f"{resolved.model.vocab_size}; name a checkpoint of the same vocabulary."
        )
    try:
        draft = resolve(_configure(resolved, keeps_attention=model_config.kind == resolved.model.kind))
    except ResolveError as error:
        raise ResolveError(f"speculative.draft_model_path cannot be used: {error}") from None
    return resolved.model_copy(update={"draft": draft})


def _configure(resolved: Resolved, *, keeps_attention: bool) -> FrameConfig:
    """The draft model's configuration: steps, pages, types, graphs and ranks of the target, and
    open choices of plugins; keeps_attention: but for the attention backend."""
    data, opened = resolved.user.model_dump(), FrameConfig().model_dump()
    for section in ("moe", "speculative", "text", *(() if keeps_attention else ("attention",))):
        data[section] = opened[section]
    if resolved.tree is not None and data["attention"]["backend"] is None:  # another one may have no mask for trees
        data["attention"]["backend"] = resolved.choice("attention_backend").name
    data["model"] |= {
        "path": resolved.user.speculative.draft_model_path,
        "served_name": None,
        "tokenizer": None,
        "skip_tokenizer_init": True,
        "implementation": None,
        "quantization": None,
        "gemm_kernel": None,
        "dtype": resolved.dtype,
        "max_context": resolved.max_context,
    }
    data["cache"] |= {"page_size": resolved.page_size, "kv_dtype": resolved.kv_dtype, "max_total_tokens": resolved.max_total_tokens}
    data["scheduler"] |= {
        "max_running_requests": resolved.max_running_requests,
        "chunked_prefill_size": resolved.chunked_prefill_size,
        "overlap": resolved.overlap,
    }
    graphs = {"cuda_graph_max_bs": resolved.cuda_graph_max_bs, "prompt_graph_max_tokens": 0}
    data["execution"] |= {"device": resolved.device, "threads": resolved.threads, **graphs}
    return FrameConfig.model_validate(data)


def check_speculation(config: FrameConfig, task: Task, model_config: ModelConfig, num_groups: int, tree: TreeShape | None) -> bool:
    """-> whether a drafter is named. num_groups: attention groups. tree: of drafts. Raises
    ResolveError."""
    speculative = config.speculative
    length = speculative.synthetic_acceptance_length
    if length is not None and length > speculative.num_steps + 1:
        raise ResolveError(
            f"speculative.synthetic_acceptance_length is {length}, and speculative.num_steps {speculative.num_steps} allows"
            f" {speculative.num_steps + 1} tokens a step; lower the one or raise the other."
        )
    if config.sampling.grammar_mask_processes and (speculative.algorithm is not None or num_groups > 1):
        what = "drafts" if num_groups == 1 else "attention groups (parallel.dp_attention)"
        sentence = f"sampling.grammar_mask_processes is {config.sampling.grammar_mask_processes}, and these processes take no {what}."
        raise ResolveError(sentence, change="sampling.grammar_mask_processes: 0")
    if speculative.algorithm is None:
        if length is not None:
            raise ResolveError("speculative.synthetic_acceptance_length is set; name a drafter in speculative.algorithm.")
        if speculative.draft_model_path is not None:
            raise ResolveError("speculative.draft_model_path is set; name a drafter that reads it in speculative.algorithm.")
        if speculative.num_steps != type(speculative).model_fields["num_steps"].default:
            raise ResolveError(f"speculative.num_steps is {speculative.num_steps}; name a drafter in speculative.algorithm.")
        return False
    if task != "generate":
        raise ResolveError(
            f"speculative.algorithm is {speculative.algorithm}, but no tokens are drawn for model.task {task}.",
            change="speculative.algorithm: null",
        )
    if num_groups > 1 or model_config.encoder_length:
        what = "encoder-decoder models" if model_config.encoder_length else "attention groups (parallel.dp_attention)"
        sentence = f"speculative.algorithm is {speculative.algorithm}, and {what} verify no drafts."
        raise ResolveError(sentence, change="speculative.algorithm: null")
    if tree is not None:
        _check_tree(config, model_config, tree)
    return True


def find_tree(config: FrameConfig, records: Sequence[PluginRecord]) -> TreeShape | None:
    """The form of the drafts of the named drafter; None: chains, or there is none. records: of
    drafters. Options that are not valid, which other parts report, have no tree."""
    name, num_steps = config.speculative.algorithm, config.speculative.num_steps
    record = next((each for each in records if each.name == name), None)
    if record is None:
        return None
    with contextlib.suppress(PluginError):
        options = plugin_options(record, config.plugins.options.get(f"drafter/{name}", {}))
        if isinstance(options, TreeOptions):
            nodes = (options.num_draft_tokens or min(num_steps * options.eagle_topk, MAX_STEPS) + 1) - 1
            return None if options.eagle_topk == 1 and nodes == num_steps else TreeShape(options.eagle_topk, num_steps, nodes)
    return None


def _check_tree(config: FrameConfig, model_config: ModelConfig, tree: TreeShape) -> None:
    speculative, where = config.speculative, f"plugins.options.drafter/{config.speculative.algorithm}"
    shape = f"speculative.num_steps is {tree.depth} and {where}.eagle_topk {tree.width}"
    if tree.num_extended > MAX_TREE_KEYS:
        raise ResolveError(f"{shape}: (num_steps - 1) * eagle_topk must be at most {MAX_TREE_KEYS}; lower one of them.")
    maximum = min(MAX_STEPS, tree.width + tree.num_extended * tree.width)
    if not tree.depth <= tree.num_nodes <= maximum:
        raise ResolveError(f"{shape}: {where}.num_draft_tokens may be {tree.depth + 1} to {maximum + 1}, not {tree.num_nodes + 1}.")
    what = {
        "drafts that are accepted at random (speculative.synthetic_acceptance_length)": speculative.synthetic_acceptance_length is not None,
        "layers with a window": model_config.sliding_window is not None,
        "stages (parallel.pp)": config.parallel.pp > 1,
    }
    for name in (name for name, is_used in what.items() if is_used):
        raise ResolveError(f"{where} asks for trees, which do not work with {name}; remove eagle_topk and num_draft_tokens.")
