"""Public names of the plugin interfaces that changed, and the sentences that tell a plugin's author
the new ones.

Used by the registry and the loader where they refuse a plugin that was written for an earlier
interface version. A name keeps its row here until its interface drops plugins of that version.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

INTERFACES = "frame.core.interfaces"


@dataclass(frozen=True, slots=True)
class Rename:
    """`old` is `new` since `api`. `module` is the page of `frame.core.interfaces` that has the
    name."""

    api: str  # the first version with the new name, such as "attention/2"
    module: str
    old: str
    new: str


RENAMES = tuple(
    Rename(*row)
    for row in (
        ("attention/2", "attention", "AttentionNeeds", "AttentionRequirements"),
        ("attention/2", "batch", "AttentionOut", "AttentionOutput"),
        ("attention/2", "batch", "AttentionOut.of", "AttentionOutput.get_buffer"),
        ("model/2", "model", "ModelFacts", "ModelConfig"),
        ("model/2", "model", "ModelNeeds", "ModelRequirements"),
        ("model/2", "model", "SentenceFacts", "SentenceTransformersConfig"),
        ("model/2", "model", "Model.logits", "Model.compute_logits"),
        ("model/2", "model", "Model.ignored", "Model.ignored_weights"),
        ("model/2", "model", "Model.narrows", "Model.supports_token_selection"),
        ("model/2", "batch", "WantedTokens", "SelectedTokens"),
        ("quantization/2", "quantization", "QuantizationNeeds", "QuantizationRequirements"),
        ("quantization/2", "quantization", "QuantizationMethod.left_out", "QuantizationMethod.ignored_weights"),
        ("quantization/2", "quantization", "LinearMethod.create", "LinearMethod.create_weights"),
        ("quantization/2", "quantization", "LinearMethod.finish", "LinearMethod.process_weights"),
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
    )
)


def describe_renames(written_for: str, offered: str) -> str:
    """What a plugin for interface version `written_for` has to rename for `offered`, a clause; ""
    where no name changed."""
    kind, _, new = offered.partition("/")
    other, _, old = written_for.partition("/")
    if kind != other or not (old.isdecimal() and new.isdecimal()):
        return ""
    versions = {f"{kind}/{number}" for number in range(int(old) + 1, int(new) + 1)}
    return _clause(each for each in RENAMES if each.api in versions)


def describe_import(error: BaseException) -> str:
    """The renames of the interface page that an ImportError in the chain of `error` misses a name
    of, a sentence; "" for other errors."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, ImportError) and (current.name or "").startswith(f"{INTERFACES}."):
            page = (current.name or "").removeprefix(f"{INTERFACES}.")
            found = [each for each in RENAMES if each.module == page and f"{each.old!r}" in str(current)]
            if found:
                versions = " and ".join(dict.fromkeys(each.api for each in found))
                return f"The plugin was written for an earlier interface; this frame supports {versions}: {_clause(found)}."
        current = current.__cause__ or current.__context__
    return ""


def describe_missing(api: str, names: Iterable[str]) -> str:
    """The earlier names of abstract methods that a class of interface version `api` lacks, a
    clause; "" where none was renamed."""
    wanted = set(names)
    return _clause(each for each in RENAMES if each.api == api and each.new.rpartition(".")[2] in wanted)


def _clause(renames: Iterable[Rename]) -> str:
    pairs = dict.fromkeys((each.old, each.new) for each in renames)
    return f"rename {', '.join(f'{old} to {new}' for old, new in pairs)}" if pairs else ""
