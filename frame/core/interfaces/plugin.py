"""`PluginRecord`: what a plugin registers. It is readable without importing the plugin.

`frame.plugins` makes records and `frame.config.resolve` chooses among them. Must not know
pluggy or entry points.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a plugin does not meet a requirement."""

    sentence: str  # what does not fit
    change: str | None = None  # the nearest setting that fits ("cache.page_size: 64"); None: no setting helps

    def __str__(self) -> str:
        return f"{self.sentence} (try {self.change})" if self.change else self.sentence


@runtime_checkable
class Capabilities(Protocol):
    """Frozen data about what a plugin can do. Every kind has its own dataclass with this method."""

    def unsupported(self, requirements: Any) -> list[Reason]:
        """All reasons why the plugin does not meet `requirements`; empty: it does."""
        ...


@dataclass(frozen=True, slots=True)
class Anything:
    """The capabilities of a plugin that meets all requirements."""

    def unsupported(self, requirements: Any) -> list[Reason]:
        return []


def list_batch_obstacles(able: Any, requirements: Any) -> list[Reason]:
    """Why a plugin cannot serve `execution.deterministic`: `batch_invariant` of the capabilities
    `able`, on the devices of `invariant_on` if it has that and any, against the requirements."""
    devices = getattr(able, "invariant_on", ())
    if not requirements.deterministic or (able.batch_invariant and (not devices or requirements.device in devices)):
        return []
    return [Reason("its results depend on the other rows of a batch", "execution.deterministic: false")]


def list_device_obstacles(able: Any, requirements: Any) -> list[Reason]:
    """Why kernels cannot run: `devices`, `dtypes` and `min_compute_capability` of the capabilities
    `able` against `device`, `dtype` and `compute_capability` of the requirements, and
    `list_batch_obstacles`."""
    reasons = []
    if requirements.device not in able.devices:
        reasons.append(Reason(f"runs on {' or '.join(able.devices)}, not on {requirements.device}"))
    if requirements.dtype not in able.dtypes:
        reasons.append(Reason(f"does not compute in {requirements.dtype}", f"model.dtype: {able.dtypes[0]}"))
    low = able.min_compute_capability
    if low and requirements.compute_capability and requirements.compute_capability < low:
        reasons.append(Reason(f"needs compute capability {low[0]}.{low[1]} or later"))
    return [*reasons, *list_batch_obstacles(able, requirements)]


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin, as listed, checked and explained. `target` is imported only when the plugin is
    selected."""

    kind: str
    name: str
    target: str  # "package.module:Class"
    api: str  # the interface version that it was written for ("attention_backend/4")
    capabilities: Capabilities = field(default_factory=Anything)
    options: type[BaseModel] | None = None  # the plugin's own settings
    requires: tuple[str, ...] = ()  # PEP 508 strings, checked without an import
    summary: str = ""
    rank: int = 0  # orders the candidates of `auto`, higher first
    distribution: str = ""  # the package that registered it, and its version
    version: str = ""
    problems: tuple[Reason, ...] = ()  # why it can never be used: interface version, missing requirement, name clash
