"""Resolves the configuration of a draft model: that of the target with another checkpoint.

Used by `prepare`, for drafters whose model is that of a model plugin. Pure, as `resolve`. Must
not know a drafter by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from frame.core.config.resolve import resolve
from frame.core.config.schema import FrameConfig
from frame.core.config.selection import ResolveError
from frame.core.interfaces.drafter import DrafterCapabilities

if TYPE_CHECKING:
    from frame.core.config.hardware import Hardware
    from frame.core.config.resolved import Resolved
    from frame.core.interfaces.model import ModelConfig
    from frame.core.interfaces.plugin import PluginRecord

MAX_PADDING = 1024  # tokens by which the vocabularies of two sizes of a model may differ


def find_drafter(resolved: Resolved, records: Mapping[str, Sequence[PluginRecord]]) -> DrafterCapabilities:
    """What the chosen drafter can do; nothing where there is none."""
    names = [choice.name for choice in resolved.plugins.get("drafter", ())]
    found = [record.capabilities for record in records.get("drafter", ()) if record.name in names]
    return next((each for each in found if isinstance(each, DrafterCapabilities)), DrafterCapabilities())


def resolve_draft_model(
    resolved: Resolved, hardware: Hardware, model_config: ModelConfig, records: Mapping[str, Sequence[PluginRecord]]
) -> Resolved:
    """The configuration of the target with that of its draft model. model_config: of the draft
    checkpoint. Raises ResolveError if it does not fit the target."""
    difference = abs(model_config.vocab_size - resolved.model.vocab_size)
    if difference > MAX_PADDING:
        raise ResolveError(
            f"speculative.draft_model_path has a vocabulary of {model_config.vocab_size} tokens, and the model one of "
            f"{resolved.model.vocab_size}; name a checkpoint of the same vocabulary."
        )
    try:
        draft = resolve(_configure(resolved, keeps_attention=model_config.kind == resolved.model.kind), hardware, model_config, records)
    except ResolveError as error:
        raise ResolveError(f"speculative.draft_model_path cannot be used: {error}") from None
    return resolved.model_copy(update={"draft": draft})


def _configure(resolved: Resolved, *, keeps_attention: bool) -> FrameConfig:
    """The draft model's configuration: steps, pages, types, graphs and ranks of the target, and
    open choices of plugins; keeps_attention: but for the attention backend."""
    data, opened = resolved.user.model_dump(), FrameConfig().model_dump()
    for section in ("moe", "speculative", "text", *(() if keeps_attention else ("attention",))):
        data[section] = opened[section]
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
