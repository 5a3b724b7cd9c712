"""Choosing one plugin among records by their capabilities, with a reason for the choice and for every rejection.

Pure: knows records and needs only, never imports a plugin, and never names one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from frame.core.errors import ConfigurationError, did_you_mean
from frame.core.interfaces.plugin import PluginRecord, Reason


@dataclass(frozen=True, slots=True)
class PlainRequirements:
    """What is asked of a family that has no needs of its own."""

    device: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate and everything that speaks against it."""

    record: PluginRecord
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        owner = " ".join(part for part in (self.record.distribution, self.record.version) if part)
        return f"{self.record.name}{f' ({owner})' if owner else ''}: {'; '.join(map(str, self.reasons))}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen record, why, and who was turned down."""

    record: PluginRecord
    reason: str
    rejected: tuple[Rejected, ...] = ()


class ResolveError(ConfigurationError):
    """No combination serves what was asked. `rejected` holds every candidate with every reason, `change` the nearest remedy."""

    def __init__(self, message: str, rejected: Sequence[Rejected] = (), change: str | None = None) -> None:
        self.rejected = tuple(rejected)
        self.change = change
        lines = [message, *(f"  rejected {candidate}" for candidate in self.rejected)]
        if change:
            lines.append(f"Nearest change: {change}")
        super().__init__("\n".join(lines))


class UnknownPluginError(ResolveError):
    """A plugin was named that nobody registered; `kind` and `name` let the registry say more."""

    def __init__(self, key: str, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        names = sorted(known)
        listed = f" Installed: {', '.join(names)}." if names else f" No {kind} is installed."
        super().__init__(f"{key} names an unknown {kind} {name!r}{did_you_mean(name, names) or '.'}{listed}")


def objections(record: PluginRecord, requirements: Any, hopeless: Collection[str] = ()) -> tuple[Reason, ...]:
    """Everything that speaks against `record`: what the registry found, and what its capabilities say of `requirements`.
    `hopeless` are changes that this machine cannot make (`execution.device: cuda` without a GPU); they are not proposed."""
    if record.problems:
        return record.problems
    try:
        found = record.capabilities.unsupported(requirements)
    except Exception as error:  # noqa: BLE001 - a stranger's record must not end the start of another plugin
        return (Reason(f"its capability record fails with {type(error).__name__}: {error}"),)
    return tuple(Reason(reason.sentence) if reason.change in hopeless else reason for reason in found)


def select(
    key: str,
    candidates: Sequence[PluginRecord],
    requirements: Any,
    named: str | None,
    order: Callable[[PluginRecord], Any] | None = None,
    hopeless: Collection[str] = (),
) -> Selection | None:
    """The record that serves `requirements`: the `named` one, or the best by `order` (rank). None when nothing is named and nothing fits.

    `key` is the setting that names it. Raises ResolveError when the named one is unknown or does not fit.
    """
    judged = [(record, objections(record, requirements, hopeless)) for record in sorted(candidates, key=order or by_rank)]
    fits = [record for record, reasons in judged if not reasons]
    rejected = tuple(Rejected(record, reasons) for record, reasons in judged if reasons)
    if named is None:
        if not fits:
            return None
        others = f"the best-ranked of {len(fits)} that fit" if len(fits) > 1 else "the only one that fits"
        return Selection(fits[0], others, rejected)
    found = [record for record in fits if record.name == named]
    if found:
        return Selection(found[0], "set by the user", rejected)
    refused = [candidate for candidate in rejected if candidate.record.name == named]
    if not refused:
        raise UnknownPluginError(key, candidates[0].kind if candidates else "plugin", named, {r.name for r in candidates})
    change = nearest_change(refused) or (f"{key}: {fits[0].name}" if fits else nearest_change(rejected))
    raise ResolveError(f"{key}: {named} cannot serve this model, machine and configuration.", refused, change)


def by_rank(record: PluginRecord) -> tuple[int, str]:
    """Best rank first, then by name, so that a choice never depends on the order of installation."""
    return (-record.rank, record.name)


def nearest_change(rejected: Iterable[Rejected]) -> str | None:
    """The fewest settings that make one candidate fit: `cache.page_size: 64` (then NAME fits), or None when no setting helps."""
    best: tuple[int, str] | None = None
    for candidate in rejected:
        changes = list(dict.fromkeys(reason.change for reason in candidate.reasons if reason.change))
        if any(reason.change is None for reason in candidate.reasons):
            continue
        if best is None or len(changes) < best[0]:
            best = (len(changes), f"{' and '.join(changes)} (then {candidate.record.name} fits)")
    return best[1] if best else None
