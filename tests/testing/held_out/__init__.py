"""Plugins as third parties would write them: of each kind a right one (`TWIN`), and wrong ones
(`WRONG`), each with one bug that a user would meet.

They were written from the interfaces, the guides and the scaffolds alone, without a look at the
conformance suites, to measure how many of such bugs the suites find.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


class Wrong(dict[str, tuple[Any, str]]):
    """name -> (plugin class, the harm that its bug does to a user)."""

    def add(self, harm: str) -> Callable[[C], C]:
        """A decorator: the class is wrong, under its name in snake case."""

        def keep(plugin: C) -> C:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", plugin.__name__).lower()
            assert name not in self
            self[name] = plugin, harm
            return plugin

        return keep
