"""The part of `resolve` that chooses attention backends: one for all rows, or one for prefill and
one for decode.

Without a name it decides by measured speeds, where the plugins' records have them, and by rank.
Pure; it must not import or name a plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from frame.config.resolution.plugins import KEYS, Choices
from frame.config.section import phase_backends
from frame.config.selection import Rejected, ResolveError, Selection, by_rank, nearest_change, objections, select
from frame.core.interfaces.attention import AttentionCapabilities, AttentionRequirements, Phase
from frame.core.interfaces.plugin import PluginRecord, Reason

KIND = "attention_backend"
KEY = KEYS[KIND]
UNITS: Mapping[str, str] = {"extend": "TFLOP/s", "decode": "TB/s"}
PHASES: Mapping[str, Phase] = {"prefill": "extend", "decode": "decode"}  # by the names that users give them
PREFERRED_PAGE_SIZE = 16  # tokens


def choose_attention(
    chosen: Choices, records: Mapping[str, Sequence[PluginRecord]], setting: str | None, requirements: AttentionRequirements, subject: str
) -> None:
    """Record one selection, or two: for prefill, then for decode. Raises ResolveError, whose text
    begins with `subject`."""
    candidates = records.get(KIND, ())
    named = phase_backends(setting)
    prefill, decode = (named.get(user) for user in PHASES)
    if prefill == decode and prefill is not None:
        _one(chosen, candidates, prefill, requirements, subject)
        return
    fitting = [
        _fitting(chosen, candidates, name, _of_phase(requirements, phase), phase)
        for name, phase in zip((prefill, decode), PHASES.values(), strict=True)
    ]
    best = _pair(fitting[0], fitting[1], requirements.deterministic)
    if best is None and (prefill is not None or decode is not None):
        single = next((r for r in sorted(candidates, key=by_rank) if not objections(r, requirements)), None)
        _refuse(prefill, decode, fitting, single, requirements.deterministic)
    if best is None or (best[0].record.name == best[1].record.name and prefill is None and decode is None):
        name, why = (None, None) if best is None else (best[0].record.name, best[0].reason)
        _one(chosen, candidates, name, requirements, subject, why)
        return
    _note(chosen, best, named)
    taken = [candidate.record.name for candidate in best]
    chosen.reject(KEY, KIND, {KIND: [record for record in candidates if record.name not in taken]}, requirements)


def _of_phase(requirements: AttentionRequirements, phase: Phase) -> AttentionRequirements:
    return replace(requirements, phases=(phase,), graphs=requirements.graphs and phase == "decode")


def _one(
    chosen: Choices,
    candidates: Sequence[PluginRecord],
    name: str | None,
    requirements: AttentionRequirements,
    subject: str,
    why: str | None = None,
) -> None:
    selection = select(KEY, candidates, requirements, name, None, chosen.impossible, KIND)
    if selection is None:
        rejected = chosen.reject(KEY, KIND, {KIND: candidates}, requirements)
        raise ResolveError(f"{subject}.", rejected, nearest_change(rejected))
    chosen.note(KIND, KEY, selection if why is None else replace(selection, reason=why), is_open=why is not None or name is None)


def _fitting(
    chosen: Choices, candidates: Sequence[PluginRecord], name: str | None, requirements: AttentionRequirements, phase: Phase
) -> list[Selection]:
    """The candidates for a phase, best first; only the named one, if there is one, which must
    fit."""
    if name is not None:
        selection = select(KEY, candidates, requirements, name, None, chosen.impossible, KIND)
        return [Selection(selection.record, "set by the user")] if selection is not None else []
    fits = [record for record in sorted(candidates, key=by_rank) if not objections(record, requirements, chosen.impossible)]
    card, speeds = _comparable(fits, requirements, phase)
    if fits and fits[0].name not in speeds:  # without a measurement of the best-ranked one, ranks decide
        reason = f"the best-ranked of {len(fits)} that fit" if len(fits) > 1 else "the only one that fits"
        return [Selection(record, reason) for record in fits]
    order = sorted((record for record in fits if record.name in speeds), key=lambda record: -speeds[record.name])
    listed = ", ".join(f"{record.name} {speeds[record.name]:g}" for record in order)
    where = f"this card ({card})" if card == requirements.device_name else f"{card}, a card of the same compute capability"
    reason = f"the fastest as measured on {where}, in {UNITS[phase]}: {listed}"
    return [Selection(record, reason) for record in order] + [Selection(r, "not measured here") for r in fits if r.name not in speeds]


def _comparable(records: Sequence[PluginRecord], requirements: AttentionRequirements, phase: Phase) -> tuple[str | None, dict[str, float]]:
    """A card on which at least two backends were measured, preferably this machine's, and their
    speeds by name."""
    measured = {r.name: r.capabilities.speeds(requirements, phase) for r in records if isinstance(r.capabilities, AttentionCapabilities)}
    cards = dict.fromkeys(card for speeds in measured.values() for card in speeds)
    for card in sorted(cards, key=lambda card: card != requirements.device_name):
        comparable = {name: speeds[card] for name, speeds in measured.items() if card in speeds}
        if len(comparable) > 1:
            return card, comparable
    return None, {}


def _pair(extends: Sequence[Selection], decodes: Sequence[Selection], deterministic: bool) -> tuple[Selection, Selection] | None:
    """The first backend for prefill with the first one for decode that can use the same KV
    cache."""
    for extend in extends:
        for decode in decodes:
            if not _find_conflict(extend.record, decode.record, deterministic):
                return extend, decode
    return None


def _find_conflict(extend: PluginRecord, decode: PluginRecord, deterministic: bool) -> str:
    """Why two backends cannot use the same KV cache; empty if they can."""
    first, second = extend.capabilities, decode.capabilities
    if extend.name == decode.name or not (isinstance(first, AttentionCapabilities) and isinstance(second, AttentionCapabilities)):
        return ""
    if deterministic:
        return "under execution.deterministic one of them computes all tokens"
    if first.layout != second.layout:
        return f"their caches differ: {first.layout} and {second.layout}"
    if first.stores_kv != second.stores_kv:
        return "one of them writes K and V itself and the other does not"
    if shared_page_sizes((extend, decode)) == ():
        return "they support no common page size"
    return ""


def shared_page_sizes(records: Sequence[PluginRecord]) -> tuple[int, ...] | None:
    """The page sizes that all of these backends support; None: any."""
    shared: tuple[int, ...] | None = None
    for record in records:
        sizes = getattr(record.capabilities, "page_sizes", None)
        if sizes is not None:
            shared = tuple(sizes) if shared is None else tuple(size for size in shared if size in sizes)
    return shared


def _refuse(
    prefill: str | None, decode: str | None, fitting: Sequence[Sequence[Selection]], single: PluginRecord | None, deterministic: bool
) -> None:
    """`single`: the best-ranked backend that computes both phases."""
    pairs = [(extend.record, other.record) for extend in fitting[0] for other in fitting[1]]
    sentences = [(other, f"beside {extend.name}, {_find_conflict(extend, other, deterministic)}") for extend, other in pairs]
    rejected = [Rejected(other, (Reason(sentence),)) for other, sentence in sentences]
    named = " and ".join(f"{user}: {name}" for user, name in (("prefill", prefill), ("decode", decode)) if name is not None)
    sentence = f"{KEY}: no pair of backends with {named} serves this model, machine and configuration."
    raise ResolveError(sentence, rejected, f"{KEY}: {single.name}" if single is not None else None)


def _note(chosen: Choices, pair: tuple[Selection, Selection], named: Mapping[str, str]) -> None:
    for candidate in pair:
        chosen.note(KIND, KEY, candidate, is_open=False)
    if len(named) < len(PHASES):
        chosen.reasons[KEY] = "; ".join(f"{user}: {c.record.name} is {c.reason}" for user, c in zip(PHASES, pair, strict=True))


def choose_page_size(records: Sequence[PluginRecord]) -> tuple[int, str]:
    """(tokens of a page that all of these attention backends support, why)."""
    sizes = shared_page_sizes(records)
    if sizes is None or PREFERRED_PAGE_SIZE in sizes:
        return PREFERRED_PAGE_SIZE, "small enough to share prefixes finely, large enough for short page tables"
    size = min(sizes, key=lambda size: (abs(size - PREFERRED_PAGE_SIZE), size))
    names = " and ".join(record.name for record in records)
    return size, f"of the page sizes {list(sizes)} of {names} the nearest to {PREFERRED_PAGE_SIZE}"
