"""Finds the choices of `auto` that other packages have moved: what frame's own plugins would have
given instead. Pure; it must not import or name a plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from frame.config.hardware import Hardware
from frame.config.resolution.plugins import FRAME_DISTRIBUTION, KEYS
from frame.config.resolve import resolve
from frame.config.resolved import Resolved
from frame.config.selection import ResolveError
from frame.core.interfaces.model import ModelConfig
from frame.core.interfaces.plugin import PluginRecord


def find_moves(
    resolved: Resolved, hardware: Hardware, model_config: ModelConfig, records: Mapping[str, Sequence[PluginRecord]]
) -> list[str]:
    """One sentence for each setting that the user left open and that has another plugin because a
    package is installed."""
    open_kinds = [kind for kind, key in KEYS.items() if key in resolved.reasons and resolved.plugins.get(kind)]
    open_kinds = [kind for kind in open_kinds if kind != "adapter"]  # a further format leaves the others as they are
    if all(choice.distribution == FRAME_DISTRIBUTION for kind in open_kinds for choice in resolved.plugins[kind]):
        return []
    in_tree = {kind: [record for record in group if record.distribution == FRAME_DISTRIBUTION] for kind, group in records.items()}
    user = resolved.user
    in_tree_names = {f"{record.kind}/{record.name}" for group in in_tree.values() for record in group}
    named = {kind: names for kind, names in user.plugins.options.items() if kind in in_tree_names}
    plain = user.model_copy(update={"plugins": user.plugins.model_copy(update={"options": named})})
    try:
        before = resolve(plain, hardware, model_config, in_tree)
    except ResolveError:  # without the other packages nothing would start
        return []
    moves = []
    for kind in open_kinds:
        now, then = ([choice.name for choice in each.plugins.get(kind, ())] for each in (resolved, before))
        brought = sorted({f"{c.distribution} {c.version}" for c in resolved.plugins[kind] if c.distribution != FRAME_DISTRIBUTION})
        key = KEYS[kind]
        chosen, default_choice, remedy = " and ".join(now), " and ".join(then), f"{key}: {_value(then)}" if then else ""
        if kind == "gemm_kernel":  # every kernel that fits is loaded; the reason has those that multiply
            chosen, default_choice = resolved.reasons[key], before.reasons[key]
            foreign = [f"{kind}/{c.name}" for c in resolved.plugins[kind] if c.distribution != FRAME_DISTRIBUTION]
            remedy = f"plugins.deny: [{', '.join(foreign)}]"
        if chosen != default_choice and then and brought:
            moves.append(
                f"{key}: auto chooses {chosen} because {' and '.join(brought)} is installed; "
                f"frame's own choice is {default_choice} (set {remedy} to keep it)"
            )
    return moves


def _value(names: Sequence[str]) -> str:
    """A setting's value for one plugin, or for one of prefill and one of decode."""
    return names[0] if len(names) == 1 else f"prefill={names[0]},decode={names[1]}"
