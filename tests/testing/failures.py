"""Runs a suite on a class that no registry knows."""

from __future__ import annotations

from frame.core.interfaces.plugin import PluginRecord
from frame.testing import conformance


def failures(kind: str, target: type) -> dict[str, str]:
    """The checks that a class fails, with what they say."""
    record = PluginRecord(kind, "broken", "tests:Broken", "any/1")
    found = {}
    for check in conformance.checks(kind, conformance.Subject(record, target, None, conformance.Setting())):
        try:
            check.run()
        except conformance.SkipCheck:
            continue
        except AssertionError as error:
            found[check.name] = str(error)
    return found
