"""The JSON Schema of configuration files, with the options of every installed plugin, for editors
and validators. Reads plugin records only."""

from __future__ import annotations

from typing import Any

from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.flat_settings import settings
from frame.interfaces.kinds import KINDS
from frame.plugins.registry import Registry

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema(registry: Registry) -> dict[str, Any]:
    """JSON Schema (2020-12) of a configuration file on this installation."""
    schema = FrameConfig.model_json_schema()
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    _allow_auto(definitions)
    _name_plugins(definitions, registry)
    definitions["PluginsSection"]["properties"]["options"] = _options(definitions, registry)
    return {"$schema": DIALECT, "title": "frame configuration", **{key: value for key, value in schema.items() if key != "title"}}


def _allow_auto(definitions: dict[str, Any]) -> None:
    """Allow `auto` for settings that resolve can choose."""
    for setting in settings():
        owner = _section(definitions, setting.path[0])["properties"][setting.path[1]]
        owner.pop("flag", None)
        if setting.is_open and "anyOf" in owner:
            owner["anyOf"].append({"const": "auto"})


def _name_plugins(definitions: dict[str, Any], registry: Registry) -> None:
    """Add the names of installed plugins as examples, for completion. Other names stay valid, since
    a file may be for another machine."""
    for kind in (kind for kind in KINDS.values() if kind.key):
        section, _, name = kind.key.partition(".")
        owner = _section(definitions, section)["properties"][name]
        names = [record.name for record in registry.records(kind.name)]
        if names:
            lists = [each for each in (owner, *owner.get("anyOf", ())) if "items" in each]  # of a list that may be open
            (lists[0]["items"] if kind.is_list else owner)["examples"] = names


def _options(definitions: dict[str, Any], registry: Registry) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for kind, records in registry.all_records().items():
        for record in records:
            if record.options is None:
                properties[f"{kind}/{record.name}"] = {"type": "object", "maxProperties": 0, "description": record.summary}
                continue
            inner = record.options.model_json_schema(ref_template="#/$defs/{model}")
            definitions.update(inner.pop("$defs", {}))
            inner.setdefault("additionalProperties", False)
            properties[f"{kind}/{record.name}"] = inner
    return {
        "type": "object",
        "description": "Options of plugins: kind/name -> the plugin's own settings.",
        "properties": properties,
        "additionalProperties": {"type": "object"},
    }


def _section(definitions: dict[str, Any], section: str) -> Any:
    model = FrameConfig.model_fields[section].annotation
    return definitions[model.__name__ if model is not None else section]
