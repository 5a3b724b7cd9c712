"""A plugin's own settings (`plugins.options`), validated against the options model of its record. Imports no plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from frame.core.errors import PluginError, did_you_mean
from frame.core.interfaces.plugin import PluginRecord


def plugin_options(record: PluginRecord, values: Mapping[str, Any]) -> BaseModel | None:
    """`values` in the plugin's options model; None when it has none. Raises PluginError that names the key and what it may be."""
    where = f"plugins.options.{record.kind}/{record.name}"
    if record.options is None:
        if values:
            raise PluginError(f"{where} has keys ({', '.join(values)}), but {record.name} takes no options; remove them.")
        return None
    known = set(record.options.model_fields) | {f.alias for f in record.options.model_fields.values() if f.alias}
    if record.options.model_config.get("extra") != "allow":
        for key in values:
            if key not in known:
                allowed = ", ".join(sorted(known)) or "none"
                raise PluginError(f"{where}.{key} is unknown{did_you_mean(key, known) or '.'} Its options: {allowed}.")
    try:
        return record.options.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise PluginError(f"{where}{'.' + key if key else ''} is {first['input']!r}: {first['msg']}.") from None
