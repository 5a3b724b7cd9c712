"""A plugin's record as plain data, for JSON output and the web page. Loads no plugin."""

from __future__ import annotations

import dataclasses
from typing import Any

from frame.core.interfaces.plugin import PluginRecord


def as_data(record: PluginRecord) -> dict[str, Any]:
    """A record as JSON data."""
    capabilities = record.capabilities
    is_data = dataclasses.is_dataclass(capabilities) and not isinstance(capabilities, type)
    return {
        **{name: getattr(record, name) for name in ("kind", "name", "summary", "distribution", "version", "target", "api", "rank")},
        "requires": list(record.requires),
        "capabilities": dataclasses.asdict(capabilities) if is_data else {},  # type: ignore[call-overload]
        "options": record.options.model_json_schema() if record.options else None,
        "problems": [str(problem) for problem in record.problems],
    }
