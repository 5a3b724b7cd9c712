"""The part of `resolve` that chooses the platform, and ranks the plugins that it prefers. Pure; it
must not import or name a plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from frame.config.hardware import Hardware
from frame.config.resolution.plugins import KEYS
from frame.config.schema import FrameConfig
from frame.config.selection import Rejected, ResolveError, Selection, UnknownPluginError, by_rank
from frame.core.interfaces.platform import PlatformCapabilities
from frame.core.interfaces.plugin import PluginRecord, Reason

_PREFERRED = 1 << 20  # above every rank


def choose_platform(config: FrameConfig, hardware: Hardware, candidates: Sequence[PluginRecord]) -> Selection:
    """The platform that is named, or the best-ranked one that has a usable device. Raises
    ResolveError if the named one has none."""
    key, explicit = KEYS["platform"], config.execution.device
    note = f" ({hardware.note})" if hardware.note else ""
    rejected = [Rejected(record, reasons) for record in sorted(candidates, key=by_rank) if (reasons := _no_device(record, hardware, note))]
    refused = {candidate.record.name: candidate for candidate in rejected}
    usable = [record for record in sorted(candidates, key=by_rank) if record.name not in refused]
    if explicit is None:
        if not usable:
            raise ResolveError("No platform has a usable device.", rejected)
        devices = hardware.of(usable[0].name)
        why = f"the best-ranked platform with a device ({devices[0].name})" if devices else f"the host: no accelerator is usable{note}"
        return Selection(usable[0], why, tuple(rejected))
    if explicit in refused:
        if problems := refused[explicit].record.problems:
            raise ResolveError(f"{key} is {explicit}, which cannot be used: {'; '.join(map(str, problems))}.")
        change = f"{key}: {usable[0].name}" if usable else None
        raise ResolveError(f"{key} is {explicit}, but this machine has no usable {explicit} device{note}.", change=change)
    named = [record for record in usable if record.name == explicit]
    if not named:
        raise UnknownPluginError(key, "platform", explicit, {record.name for record in candidates})
    return Selection(named[0], "set by the user", tuple(rejected))


def _no_device(record: PluginRecord, hardware: Hardware, note: str) -> tuple[Reason, ...]:
    """Why a platform cannot be used on this machine; empty if it can."""
    if record.problems:
        return record.problems
    if get_capabilities(record).is_host or hardware.of(record.name):
        return ()
    return (Reason(f"this machine has no usable {record.name} device{note}"),)


def get_capabilities(record: PluginRecord) -> PlatformCapabilities:
    """The capabilities of a platform's record; those of the host where it has none."""
    return record.capabilities if isinstance(record.capabilities, PlatformCapabilities) else PlatformCapabilities()


def rank_preferred(records: Mapping[str, Sequence[PluginRecord]], preferred: Sequence[str]) -> Mapping[str, Sequence[PluginRecord]]:
    """The records, with those of the platform's `preferred` plugins ("kind/name") ranked first."""

    def ranked(record: PluginRecord) -> PluginRecord:
        return replace(record, rank=record.rank + _PREFERRED) if f"{record.kind}/{record.name}" in preferred else record

    return {kind: [ranked(record) for record in candidates] for kind, candidates in records.items()} if preferred else records
