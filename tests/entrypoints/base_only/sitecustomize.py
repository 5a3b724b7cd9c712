"""Hides every distribution but those of the base installation from a Python process: their modules
do not import, and `importlib.metadata` does not know them. Python runs this file at start when its
folder is on PYTHONPATH (`base_only.environment`).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from importlib.abc import MetaPathFinder

_given = json.loads(os.environ["FRAME_TEST_BASE_ONLY"])
_hidden = frozenset(_given["modules"])
_kept = frozenset(_given["distributions"])


class _Hider(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _hidden or name in _hidden:
            raise ModuleNotFoundError(f"No module named {name!r} (not part of the base installation)", name=name)


def _name_of(distribution) -> str:
    return str(distribution.metadata["Name"]).lower().replace("_", "-").replace(".", "-")


_discover = importlib.metadata.Distribution.discover


def _discover_kept(*args, **kwargs):
    return (found for found in _discover(*args, **kwargs) if _name_of(found) in _kept)


sys.meta_path.insert(0, _Hider())
importlib.metadata.Distribution.discover = staticmethod(_discover_kept)
