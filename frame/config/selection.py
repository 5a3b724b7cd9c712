"""Selects a plugin among records by their capabilities, with a reason for the choice and for each
rejection.

Used by `resolve` and its parts. Pure: it must not import or name a plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frame.core.errors import ConfigurationError, did_you_mean
from frame.core.interfaces.plugin import PluginRecord, Reason


@dataclass(frozen=True, slots=True)
class PlainRequirements:
    """The requirements of plugin kinds that have no requirements class of their own."""

    device: str
    compatible: tuple[str, ...] = ()  # further platforms whose plugins run on this device too


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejected candidate with all its reasons."""

    record: PluginRecord
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        owner = " ".join(word for word in (self.record.distribution, self.record.version) if word)
        return f"{self.record.name}{f' ({owner})' if owner else ''}: {'; '.join(map(str, self.reasons))}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected record, the reason, and the rejected ones."""

    record: PluginRecord
    reason: str
    rejected: tuple[Rejected, ...] = ()


class ResolveError(ConfigurationError):
    """No candidate fits the configuration. `rejected`: all candidates with their reasons; `change`:
    the smallest change that helps. `missing`: the `quant_method` that no weight format reads."""

    def __init__(self, message: str, rejected: Sequence[Rejected] = (), change: str | None = None, missing: str | None = None) -> None:
        self.rejected = tuple(rejected)
        self.change = change
        self.missing = missing
        lines = [message, *(f"  rejected {candidate}" for candidate in self.rejected)]
        if change:
            lines.append(f"Nearest change: {change}")
        super().__init__("\n".join(lines))

    @property
    def conflicts(self) -> tuple[ConfigurationError, ...]:
        """The conflicts that this error reports."""
        return (self,)


class ConflictsError(ResolveError):
    """Several conflicts of one configuration, in one error."""

    def __init__(self, conflicts: Sequence[ConfigurationError]) -> None:
        self._conflicts = tuple(conflicts)
        numbered = [f"{number}. {each}" for number, each in enumerate(self._conflicts, 1)]
        super().__init__("\n".join([f"The configuration has {len(self._conflicts)} conflicts:", *numbered]))

    @property
    def conflicts(self) -> tuple[ConfigurationError, ...]:
        return self._conflicts


def join_conflicts(conflicts: Sequence[ConfigurationError]) -> ConfigurationError:
    """One error for these conflicts, at least one; the conflict itself where there is only one."""
    return conflicts[0] if len(conflicts) == 1 else ConflictsError(conflicts)


class UnknownPluginError(ResolveError):
    """A setting names a plugin that is not registered. The registry uses `kind` and `name` to add
    what it knows of broken plugins. `key`: the setting."""

    def __init__(self, key: str, kind: str, name: str, known: Iterable[str]) -> None:
        self.key = key
        self.kind = kind
        self.name = name
        names = sorted(known)
        listed = f" Installed: {', '.join(names)}." if names else f" No {kind} is installed."
        super().__init__(f"{key} names an unknown {kind} {name!r}{did_you_mean(name, names) or '.'}{listed}")


def objections(record: PluginRecord, requirements: Any, impossible: Collection[str] = ()) -> tuple[Reason, ...]:
    """The reasons against `record`: problems that the registry found, or requirements that its
    capabilities do not meet.

    `impossible`: changes that this machine cannot make (`execution.device: cuda` without a GPU),
    which are not proposed.
    """
    if record.problems:
        return record.problems
    try:
        reasons = _unsupported(record, requirements)
    except Exception as error:  # noqa: BLE001 - a third party's record must not prevent the use of other plugins
        return (Reason(f"its capability record fails with {type(error).__name__}: {error}"),)
    return tuple(Reason(reason.sentence) if reason.change in impossible else reason for reason in reasons)


def _unsupported(record: PluginRecord, requirements: Any) -> Sequence[Reason]:
    """The reasons on `requirements.device`; none if there are none on one of
    `requirements.compatible`, whose plugins run there too."""
    reasons = record.capabilities.unsupported(requirements)
    for device in getattr(requirements, "compatible", ()):
        if not reasons or not record.capabilities.unsupported(replace(requirements, device=device, compatible=())):
            return ()
    return reasons


def select(
    key: str,
    candidates: Sequence[PluginRecord],
    requirements: Any,
    named: str | None,
    order: Callable[[PluginRecord], Any] | None = None,
    impossible: Collection[str] = (),
    kind: str = "",
) -> Selection | None:
    """Select the `named` record or, without a name, the first by `order` (rank) that meets
    `requirements`; None if none does.

    `key`: the setting that names it; `kind`: what an unknown one is called where there are no
    candidates. Raises ResolveError if the named one is unknown or does not
    fit.
    """
    judged = [(record, objections(record, requirements, impossible)) for record in sorted(candidates, key=order or by_rank)]
    fits = [record for record, reasons in judged if not reasons]
    rejected = tuple(Rejected(record, reasons) for record, reasons in judged if reasons)
    if named is None:
        if not fits:
            return None
        others = f"the best-ranked of {len(fits)} that fit" if len(fits) > 1 else "the only one that fits"
        return Selection(fits[0], others, rejected)
    matches = [record for record in fits if record.name == named]
    if matches:
        return Selection(matches[0], "set by the user", rejected)
    refused = [candidate for candidate in rejected if candidate.record.name == named]
    if not refused:
        raise UnknownPluginError(key, candidates[0].kind if candidates else kind, named, {r.name for r in candidates})
    change = nearest_change(refused) or (f"{key}: {fits[0].name}" if fits else nearest_change(rejected))
    raise ResolveError(f"{key}: {named} cannot serve this model, machine and configuration.", refused, change)


def by_rank(record: PluginRecord) -> tuple[int, str]:
    """Sort key: highest rank first, then by name, so that the order of installation does not
    matter."""
    return (-record.rank, record.name)


def nearest_change(rejected: Iterable[Rejected]) -> str | None:
    """The smallest set of changes that makes one candidate fit, as "cache.page_size: 64 (then NAME
    fits)"; None if no setting helps."""
    best: tuple[int, str] | None = None
    for candidate in rejected:
        changes = list(dict.fromkeys(reason.change for reason in candidate.reasons if reason.change))
        if any(reason.change is None for reason in candidate.reasons):
            continue
        if best is None or len(changes) < best[0]:
            best = (len(changes), f"{' and '.join(changes)} (then {candidate.record.name} fits)")
    return best[1] if best else None
