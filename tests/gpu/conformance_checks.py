"""The conformance checks of every plugin of a kind that states the device; without the device there
are none. Names no plugin."""

from __future__ import annotations

from typing import Any

import torch

from frame.core.errors import PluginError
from frame.plugins.loader import load_registry
from frame.testing import conformance

NamedChecks = list[tuple[str, conformance.Check]]  # by plugin


def checks_on(device: str, kind: str) -> tuple[NamedChecks, dict[str, str]]:
    """The checks of a kind's plugins, and the reason for each plugin without checks."""
    if device == "cuda" and not torch.cuda.is_available():
        return [], {}
    registry = load_registry(installed=False)
    found: NamedChecks = []
    missing: dict[str, str] = {}
    for record in registry.records(kind):
        if device not in getattr(record.capabilities, "devices", ()):
            missing[record.name] = f"does not run on {device}"
        elif record.problems:
            missing[record.name] = str(record.problems[0])
        elif not _suits_card(record.capabilities):
            missing[record.name] = "is for other compute capabilities"
        else:
            try:
                subject = conformance.find(registry, f"{kind}:{record.name}", conformance.Setting(device=device, thorough=True))
                own = conformance.checks(kind, subject)
            except PluginError as error:
                missing[record.name] = str(error)
            else:
                found += [(record.name, check) for check in own]
    return found, missing


def _suits_card(capabilities: Any) -> bool:
    chips = getattr(capabilities, "compute_capability", None)
    return chips is None or not torch.cuda.is_available() or chips[0] <= torch.cuda.get_device_capability() <= chips[1]


def ids(checks: NamedChecks) -> list[str]:
    return [f"{name}-{check.name}" for name, check in checks]
