"""The layers that formats which quantize while loading leave unquantized."""

from __future__ import annotations

import re

from frame.quantization import IgnoreOptions


class IgnoredLayers:
    """The layers that the option `ignore` excludes from quantization while loading."""

    def __init__(self, options: IgnoreOptions) -> None:
        self._pattern = re.compile("|".join(f"(?:{pattern})" for pattern in options.ignore)) if options.ignore else None

    def matches(self, name: str) -> bool:
        return self._pattern is not None and self._pattern.search(name) is not None
