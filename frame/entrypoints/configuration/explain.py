"""Explains a configuration: value, source, reason and rejected plugins of each setting, and plugin
records as plain data.

Used by `frame config` and the web page, so secrets are hidden. Must not know a command or a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import yaml

from frame.config.resolve import pinned
from frame.config.resolved import Resolved
from frame.config.schema import FrameConfig
from frame.core.interfaces.plugin import PluginRecord
from frame.entrypoints.configuration.flat_settings import by_key
from frame.entrypoints.configuration.sources import SECRETS, LoadedConfig


@dataclass(frozen=True, slots=True)
class Explained:
    """The explanation of one setting. value: in YAML. reason: why resolve chose the value; empty if
    the user set it. rejected: plugin name -> reasons against it."""

    key: str
    value: str
    source: str
    reason: str = ""
    rejected: dict[str, list[str]] = field(default_factory=dict)


def explain(key: str, loaded: LoadedConfig, resolved: Resolved | None) -> Explained:
    """Explain one setting. `resolved` None: only the user's value."""
    shown = as_yaml(value_of(pinned(resolved) if resolved else loaded.config, key))
    if key in SECRETS and shown != "null":
        shown = "***"
    reason = (resolved.reasons.get(key) or "") if resolved else ""
    return Explained(key, shown, loaded.source(key), reason, resolved.rejected.get(key, {}) if resolved else {})


def explain_all(loaded: LoadedConfig, resolved: Resolved) -> list[Explained]:
    """Explain every setting in the order of the schema, then the options of the chosen plugins."""
    settings = [explain(key, loaded, resolved) for key in by_key()]
    return settings + list(options(loaded, resolved))


def options(loaded: LoadedConfig, resolved: Resolved) -> Iterator[Explained]:
    """The options of the chosen plugins."""
    for kind, choices in sorted(resolved.plugins.items()):
        for choice in choices:
            for name, value in choice.options.items():
                key = f"plugins.options.{kind}/{choice.name}.{name}"
                yield Explained(key, as_yaml(value), loaded.source(key))


def value_of(config: FrameConfig, key: str) -> Any:
    """The value of a setting by its key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def as_yaml(value: Any) -> str:
    """A value as one line of YAML."""
    if value is None:
        return "null"
    value = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def as_data(record: PluginRecord) -> dict[str, Any]:
    """A record as JSON data."""
    capabilities = record.capabilities
    is_data = is_dataclass(capabilities) and not isinstance(capabilities, type)
    return {
        **{name: getattr(record, name) for name in ("kind", "name", "summary", "distribution", "version", "target", "api", "rank")},
        "requires": list(record.requires),
        "capabilities": asdict(capabilities) if is_data else {},  # type: ignore[call-overload]
        "options": record.options.model_json_schema() if record.options else None,
        "problems": [str(problem) for problem in record.problems],
    }
