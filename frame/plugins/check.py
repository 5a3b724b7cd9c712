"""`python -m frame.plugins.check KIND NAME [FILE …]`: loads one plugin in this process, which
isolates a crash of the plugin.

Prints one JSON object: {"ok": bool, "error": str | null, "class": str | null}. Used by `frame
plugins check`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from frame.config.server_sections import PluginsSection
from frame.core.errors import PluginError
from frame.plugins.loader import load_configured


def check(kind: str, name: str, paths: Sequence[str] = ()) -> dict[str, object]:
    """Load the plugin. An error of the plugin is part of the result, and not raised."""
    try:
        registry = load_configured(PluginsSection(paths=tuple(paths)))
        loaded = registry.load(registry.get(kind, name))
    except PluginError as error:
        return {"ok": False, "error": str(error), "class": None}
    return {"ok": True, "error": None, "class": f"{loaded.__module__}.{loaded.__qualname__}"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(check(sys.argv[1], sys.argv[2], sys.argv[3:])) + "\n")
