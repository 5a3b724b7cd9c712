"""The record that a plugin registers: light, frozen, readable without importing the plugin itself.

Knows neither pluggy nor entry points; `frame.plugins` fills records in, `frame.core.config.resolve` chooses among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a plugin cannot serve a need.

    `sentence` says what does not fit; `change` is the nearest configuration line that would make it fit
    (`cache.page_size: 64`), or None when no setting helps (wrong chip).
    """

    sentence: str
    change: str | None = None

    def __str__(self) -> str:
        return f"{self.sentence} (try {self.change})" if self.change else self.sentence


@runtime_checkable
class Capabilities(Protocol):
    """Plain frozen data about what a plugin can do. Every family has its own dataclass with this one method."""

    def unsupported(self, requirements: Any) -> list[Reason]:
        """All reasons why `requirements` cannot be served; an empty list means that they can."""
        ...


@dataclass(frozen=True, slots=True)
class Anything:
    """The capabilities of a plugin that serves every need."""

    def unsupported(self, requirements: Any) -> list[Reason]:
        return []


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin, as listed, validated and explained; `target` is imported only when the plugin is selected.

    `target` is "package.module:Class", `api` the version of the interface it was written for ("attention/1"),
    `requires` PEP 508 strings that are checked without an import, `rank` orders candidates for `auto`
    (higher is better), `options` the plugin's own settings. `distribution` and `version` say who brought it.
    `problems` are the registry's findings that hold whatever is asked for: wrong interface version, unmet requirement, name clash.
    """

    kind: str
    name: str
    target: str
    api: str
    capabilities: Capabilities = field(default_factory=Anything)
    options: type[BaseModel] | None = None
    requires: tuple[str, ...] = ()
    summary: str = ""
    rank: int = 0
    distribution: str = ""
    version: str = ""
    problems: tuple[Reason, ...] = ()
