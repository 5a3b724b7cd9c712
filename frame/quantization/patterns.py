"""Patterns of layer names, as the configurations of quantized checkpoints write them."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches: the name itself, an enclosing module, its last parts, `*` for
    anything, or a regular expression after `re:`."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}") or f".{pattern}." in name
