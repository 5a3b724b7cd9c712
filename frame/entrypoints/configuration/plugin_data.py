"""A plugin's record as plain data, for JSON output and the web page. Loads no plugin."""

from __future__ import annotations

import dataclasses
from typing import Any

from frame.core.interfaces.plugin import PluginRecord


def as_data(record: PluginRecord) -> dict[str, Any]:
    """A record as JSON data."""
    capabilities = record.capabilities
    return {
        "kind": record.kind,
        "name": record.name,
        "summary": record.summary,
        "distribution": record.distribution,
        "version": record.version,
        "target": record.target,
        "api": record.api,
        "rank": record.rank,
        "requires": list(record.requires),
        "capabilities": dataclasses.asdict(capabilities) if _is_data(capabilities) else {},  # type: ignore[call-overload]
        "options": record.options.model_json_schema() if record.options else None,
        "problems": [str(problem) for problem in record.problems],
    }


def _is_data(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
