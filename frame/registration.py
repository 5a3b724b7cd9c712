"""What a manifest uses to register plugins: the marker `hookimpl`, `KindRegistry`, the argument of
its hooks, `PluginOptions`, and `count_interpreter` for capabilities.

`frame.plugins` makes the argument, calls the hooks and keeps the records. Must not know a plugin.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from pydantic import BaseModel, ConfigDict

from frame.core.errors import PluginError
from frame.core.interfaces.plugin import Anything, Capabilities, PluginRecord, Reason
from frame.host.installation import install_command
from frame.interfaces.kinds import Kind

PROJECT = "frame"  # of pluggy; also the entry-point group
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class PluginOptions(BaseModel):
    """The settings of a plugin, which the user may set in `plugins.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Provenance:
    """The distribution whose entry point is being read."""

    distribution: str = ""
    version: str = ""


@dataclass
class KindRegistry:
    """The argument of a `register_<plural>(registry)` hook: adds plugins of one kind for one
    distribution."""

    kind: Kind
    owner: Provenance = Provenance()
    added: list[PluginRecord] = field(default_factory=list)
    suggested: dict[str, str] = field(default_factory=dict)  # name of a plugin -> the distribution that brings it
    classes: dict[str, type] = field(default_factory=dict)  # of targets that were given as classes
    assumed: frozenset[str] = frozenset()  # see `Registry`

    def suggest_distribution(self, name: str, distribution: str) -> None:
        """Name the distribution that brings plugin `name`, for the error when it is selected and
        not installed."""
        self.suggested[name] = distribution

    def add(
        self,
        name: str,
        target: str | type,
        *,
        capabilities: Capabilities | None = None,
        options: type[BaseModel] | None = None,
        requires: Sequence[str] = (),
        modules: Mapping[str, str] | None = None,
        summary: str = "",
        rank: int = 0,
        api: str | None = None,
    ) -> None:
        """Register `name`, implemented by `target`: "package.module:Class", which is imported only
        when it is selected, or the class itself.

        `api`: the interface version that the plugin was written for; a package should state it.
        Default: the version of this core. `modules`: Python modules that no package index has, each
        with a sentence that says how to install it. Raises PluginError if an argument is malformed
        or the name is added twice.
        """
        here = f"{self.kind.name} {name!r}"
        modules = {} if modules is None else modules
        if not name or any(c.isspace() or c == "/" for c in name):
            raise PluginError(f"{here}: a plugin's name must not be empty or hold spaces or '/'.")
        if any(record.name == name for record in self.added):
            raise PluginError(f"{here} is added twice by {self.owner.distribution or 'the same plugin'}; keep one.")
        if isinstance(target, type):
            target_class, target = target, f"{target.__module__}:{target.__qualname__}"
            self.classes[target] = target_class
        module, _, attribute = target.partition(":")
        if not module or not attribute:
            raise PluginError(f"{here}: the target is {target!r}; write it as 'package.module:Class'.")
        if capabilities is not None and not isinstance(capabilities, Capabilities):
            raise PluginError(f"{here}: capabilities need a method unsupported(requirements); {type(capabilities).__name__} has none.")
        if options is not None and not (isinstance(options, type) and issubclass(options, BaseModel)):
            raise PluginError(f"{here}: options must be a pydantic model class.")
        if isinstance(requires, str) or not all(isinstance(each, str) for each in requires):
            raise PluginError(f"{here}: requires is {requires!r}; give a list of requirements, such as ['my-kernels>=2'].")
        if not isinstance(modules, Mapping) or not all(isinstance(text, str) for pair in modules.items() for text in pair):
            raise PluginError(f"{here}: modules is {modules!r}; give each module's name with how to install it.")
        if not isinstance(rank, int):
            raise PluginError(f"{here}: rank is {rank!r}; give a whole number.")
        if not isinstance(summary, str):
            raise PluginError(f"{here}: summary is {summary!r}; give one sentence.")
        api = api or self.kind.api
        self.added.append(
            PluginRecord(
                kind=self.kind.name,
                name=name,
                target=target,
                api=api,
                capabilities=capabilities or Anything(),
                options=options,
                requires=tuple(requires),
                summary=summary,
                rank=rank,
                distribution=self.owner.distribution,
                version=self.owner.version,
                problems=(*list_unmet(tuple(requires), self.assumed), *_absent(modules)),  # `Registry.commit` adds others
            )
        )


def count_interpreter(requirements: Any, **changes: Any) -> Any:
    """The requirements as Triton kernels meet them: a CPU under TRITON_INTERPRET=1, which is slow
    and meant for tests, counts as a GPU. changes: to further requirements there."""
    if requirements.device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return replace(requirements, device="cuda", compute_capability=None, **changes)
    return requirements


def list_unmet(requires: tuple[str, ...], assumed: frozenset[str] = frozenset()) -> tuple[Reason, ...]:
    """Why requirements are not met here. `assumed`: distributions that count as installed."""
    return tuple(reason for text in requires if (reason := _unmet_requirement(text, assumed)) is not None)


def _absent(modules: Mapping[str, str]) -> tuple[Reason, ...]:
    absent = {name: remedy for name, remedy in modules.items() if importlib.util.find_spec(name.partition(".")[0]) is None}
    return tuple(Reason(f"it needs the Python module {name}, which is not installed; {remedy}") for name, remedy in absent.items())


def _unmet_requirement(text: str, assumed: frozenset[str]) -> Reason | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        return Reason(f"its requirement {text!r} is malformed: {str(error).splitlines()[0]}; write it as pip takes it")
    if requirement.name in assumed or (requirement.marker is not None and not requirement.marker.evaluate()):
        return None
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return Reason(f"it needs {requirement.name}{requirement.specifier}, which is not installed ({install_command(text)})")
    if not requirement.specifier.contains(installed, prereleases=True):
        return Reason(f"it needs {requirement.name}{requirement.specifier}, installed is {installed} ({install_command(text)})")
    return None
