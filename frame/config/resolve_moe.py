"""The part of `resolve` that fits a MoE dispatcher and a MoE runner to each other. Pure; it must
not import or name a plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from frame.config.resolve_plugins import KEYS, Choices
from frame.config.selection import ResolveError, Selection, by_rank, objections
from frame.core.interfaces.moe import MoECapabilities, MoERequirements
from frame.core.interfaces.parallel import ParallelPlan
from frame.core.interfaces.plugin import PluginRecord

DISPATCHER, RUNNER = "moe_dispatcher", "moe_runner"


def pair_experts(
    chosen: Choices,
    records: Mapping[str, Sequence[PluginRecord]],
    named: Mapping[str, str | None],
    requirements: MoERequirements,
    plan: ParallelPlan,
) -> None:
    """Replace the choices of a dispatcher and a runner by the best-ranked pair that shares a
    layout, where the two that were chosen share none. Raises ResolveError where no pair with the
    `named` ones does."""
    first, second = (chosen.selected[kind][-1].record for kind in (DISPATCHER, RUNNER))
    conflict = _find_conflict(first, second)
    if not conflict:
        return
    fits = {
        kind: [record for record in sorted(records.get(kind, ()), key=by_rank) if not objections(record, needed, chosen.impossible)]
        for kind, needed in ((DISPATCHER, replace(requirements, plan=plan, biased=False)), (RUNNER, requirements))
    }
    open_to = {kind: [r for r in fitting if named[kind] in (None, r.name)] for kind, fitting in fits.items()}
    pair = next(_pairs(open_to[DISPATCHER], open_to[RUNNER]), None)
    if pair is None:
        raise _refusal(first, second, conflict, fits)
    for kind, record, other in zip((DISPATCHER, RUNNER), pair, reversed(pair), strict=True):
        if record.name != chosen.selected[kind][-1].record.name:
            why = f"the best-ranked that fits {KEYS[other.kind]} {other.name}"
            chosen.selected[kind].pop()
            chosen.note(kind, KEYS[kind], Selection(record, why), is_open=True)


def _pairs(dispatchers: Sequence[PluginRecord], runners: Sequence[PluginRecord]) -> Iterator[tuple[PluginRecord, PluginRecord]]:
    for runner in runners:  # the runner's rank counts first: experts take most of the time
        for dispatcher in dispatchers:
            if not _find_conflict(dispatcher, runner):
                yield dispatcher, runner


def _find_conflict(dispatcher: PluginRecord, runner: PluginRecord) -> str:
    """Why the runner cannot take what the dispatcher produces; empty if it can."""
    produced, taken = dispatcher.capabilities, runner.capabilities
    if not (isinstance(produced, MoECapabilities) and isinstance(taken, MoECapabilities)) or set(produced.layouts) & set(taken.layouts):
        return ""
    return f"{dispatcher.name} produces the layout {' or '.join(produced.layouts)}, {runner.name} takes {' or '.join(taken.layouts)}"


def _refusal(first: PluginRecord, second: PluginRecord, conflict: str, fits: Mapping[str, Sequence[PluginRecord]]) -> ResolveError:
    """The nearest change replaces one of the two; the runner stays where that is possible."""
    for kind, pairs in ((DISPATCHER, _pairs(fits[DISPATCHER], [second])), (RUNNER, _pairs([first], fits[RUNNER]))):
        if (pair := next(pairs, None)) is not None:
            change = f"{KEYS[kind]}: {pair[0 if kind == DISPATCHER else 1].name}"
            break
    else:
        change = None
    remedy = "" if change else "; install a dispatcher or a runner for the other's layout"
    both = f"{KEYS[DISPATCHER]}: {first.name} and {KEYS[RUNNER]}: {second.name}"
    return ResolveError(f"{both} do not fit: {conflict}{remedy}.", change=change)
