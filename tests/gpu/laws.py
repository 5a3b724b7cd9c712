"""The conformance checks of every plugin of a family that says it runs on a GPU. Knows no family."""

from __future__ import annotations

from typing import Any

import torch

from frame.core.errors import PluginError
from frame.plugins.loader import load_registry
from frame.testing import conformance

NamedChecks = list[tuple[str, conformance.Check]]  # by plugin


def laws_on(device: str, kind: str, family: str) -> NamedChecks:
    """`kind` names the records, `family` what `conformance` calls them. None without the device."""
    if device == "cuda" and not torch.cuda.is_available():
        return []
    registry = load_registry(installed=False)
    found: NamedChecks = []
    for record in registry.records(kind):
        if device not in getattr(record.capabilities, "devices", ()) or record.problems or not _suits_card(record.capabilities):
            continue
        try:
            subject = conformance.find(registry, f"{family}:{record.name}", conformance.Setting(device=device, thorough=True))
            own = conformance.checks(family, subject)
        except PluginError:
            continue  # a library that this machine lacks (the record says which), or none of the suite's cases is for it
        found += [(record.name, check) for check in own]
    return found


def _suits_card(capabilities: Any) -> bool:
    chips = getattr(capabilities, "compute_capability", None)
    return chips is None or not torch.cuda.is_available() or chips[0] <= torch.cuda.get_device_capability() <= chips[1]


def ids(checks: NamedChecks) -> list[str]:
    return [f"{name}-{check.name}" for name, check in checks]
