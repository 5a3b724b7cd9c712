"""Finds plugins: reads the entry points of group `frame`, in-tree and third-party alike, and fills
a registry.

A broken entry point is recorded, and the others are read. Also returns the registered observers as
plain callables.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, distributions, version
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import pluggy

from frame.config.resolution.plugins import FRAME_DISTRIBUTION
from frame.config.server_sections import PluginsSection
from frame.core.errors import PluginError, did_you_mean
from frame.interfaces.kinds import KINDS
from frame.plugins import hookspecs
from frame.plugins.files import add_class, add_classes, explain_absence, find_classes, load_file
from frame.plugins.manifests import guarded
from frame.plugins.registry import BrokenPlugin, Registry, cause_chain
from frame.plugins.renames import describe_hook
from frame.registration import PROJECT, Provenance

__all__ = ["FRAME_DISTRIBUTION", "Observers", "load_configured", "load_registry", "observers"]

COMMANDS = "frame_commands"  # the entry-point group of subcommands
GROUPS = (PROJECT, COMMANDS)
EVENTS = ("on_start", "on_step", "on_request_finished", "on_stop")

_log = logging.getLogger(__name__)
_KIND_OF_HOOK = MappingProxyType({kind.hook: kind.name for kind in KINDS.values()})


def load_configured(plugins: PluginsSection, classes: Sequence[type] = (), assumed: frozenset[str] = frozenset()) -> Registry:
    """Return all plugins that a configuration allows, its `plugins.paths` and `classes` included.
    `assumed`: see `Registry`. Raises PluginError for a file or a class that cannot be read."""
    registry = load_registry(plugins.allow, plugins.deny, assumed=assumed)
    _add_files(registry, plugins.paths)
    add_classes(registry, classes)
    return registry


def load_commands(plugins: PluginsSection) -> Registry:
    """Return the subcommands of the packages and files that a configuration allows. Reads no
    manifest of a package. Raises PluginError for a file that cannot be read."""
    registry = _make_registry(plugins.deny)
    is_allowed = _make_filter(plugins.allow, plugins.deny)
    _add_commands(registry, [(owner, entry) for owner, entry in _entry_points() if is_allowed(owner.distribution)])
    _add_files(registry, plugins.paths)
    return registry


def _add_files(registry: Registry, paths: Sequence[str]) -> None:
    for path in paths:
        with guarded(path, may_be_slow=True):
            module, version = load_file(path)
        owner = Provenance(path, version)
        hooked = [name for name, value in vars(module).items() if hasattr(value, f"{PROJECT}_impl")]
        if hooked:
            try:
                _add_manifest(registry, registry.hooks, module, owner)
            except (KeyboardInterrupt, MemoryError):
                raise
            except BaseException as error:  # a hook may raise any error, SystemExit included
                raise PluginError(f"plugins.paths: {path} cannot be read: {cause_chain(error)}") from error
        classes = [] if hooked else find_classes(module)
        if not hooked and not classes:
            raise PluginError(f"plugins.paths: {path} has no plugin; {explain_absence(module)}")
        for target in classes:
            add_class(registry, target, path, version)


def load_registry(
    allow: Sequence[str] | None = None, deny: Sequence[str] = (), installed: bool = True, assumed: frozenset[str] = frozenset()
) -> Registry:
    """Return all plugins of packages that may be used. `allow` (None: all) and `deny` name
    distributions; frame's own is always read, and is the only one with `installed=False`. `deny`
    also names plugins, as KIND/NAME, whose records say that they are denied. Errors of plugins are
    not raised: see `Registry.broken`. `assumed`: see `Registry`."""
    registry = _make_registry(deny, assumed)
    is_allowed = _make_filter(allow if installed else (), deny)
    entries = _entry_points()
    used = [(owner, entry) for owner, entry in entries if _is_own(owner) or is_allowed(owner.distribution)]
    for owner, entry in used:
        if entry.group == PROJECT:
            _read(registry, registry.hooks, owner, entry)
    _add_commands(registry, used)
    owners = {_normalise(owner.distribution) for owner, _ in entries}
    registry.excluded = frozenset(owners - {_normalise(owner.distribution) for owner, _ in used})
    registry.absent = {name for name in (*(allow or ()), *deny) if "/" not in name and _normalise(name) not in owners}
    registry.hooks.check_pending()  # finds nothing: `_add_manifest` has refused plugins with unknown hooks, with a better error
    return registry


def _make_registry(deny: Sequence[str], assumed: frozenset[str] = frozenset()) -> Registry:
    registry = Registry(deny, assumed)
    registry.hooks = pluggy.PluginManager(PROJECT)
    registry.hooks.add_hookspecs(hookspecs)
    return registry


def _make_filter(allow: Sequence[str] | None, deny: Sequence[str]) -> Callable[[str], bool]:
    """Whether `plugins.allow` and `plugins.deny` permit a distribution."""
    allowed = None if allow is None else {_normalise(name) for name in allow}
    denied = {_normalise(name) for name in deny if "/" not in name}
    return lambda name: (allowed is None or _normalise(name) in allowed) and _normalise(name) not in denied


def _is_own(owner: Provenance) -> bool:
    return _normalise(owner.distribution) == FRAME_DISTRIBUTION


def _add_commands(registry: Registry, entries: Sequence[tuple[Provenance, EntryPoint]]) -> None:
    """Add the subcommands among these entry points. None is imported."""
    for owner, entry in entries:
        if entry.group == COMMANDS:
            kind_registry = registry.kind("cli_command", owner.distribution, owner.version)
            try:
                kind_registry.add(entry.name, entry.value, summary=f"The command frame {entry.name}.")
            except PluginError as error:
                registry.broken.append(BrokenPlugin(owner.distribution, owner.version, f"{entry.name} = {entry.value}", str(error)))
            registry.commit(kind_registry)


def _entry_points() -> list[tuple[Provenance, EntryPoint]]:
    """All entry points, frame's own first, then by distribution name. A distribution's metadata,
    which each access to its name or version parses, is parsed once."""
    names: set[str] = set()
    for installed in distributions():
        try:
            if any(entry.group in GROUPS for entry in installed.entry_points):
                names.add(_normalise(installed.name))
        except (OSError, ValueError, TypeError, KeyError) as error:  # a partly removed installation
            _log.debug("installed distribution %s is unreadable: %s", installed, error)
    ordered = sorted(names, key=lambda name: (name != FRAME_DISTRIBUTION, name))
    chosen = [distribution(name) for name in ordered]  # the first on the path, as for imports
    owners = [Provenance(each.name, each.version) for each in chosen]
    return [
        (owner, entry)
        for owner, each in zip(owners, chosen, strict=True)
        for entry in sorted(each.entry_points, key=attrgetter("name"))
        if entry.group in GROUPS
    ]


def _read(registry: Registry, hooks: pluggy.PluginManager, owner: Provenance, entry: EntryPoint) -> None:
    """Load one entry point and add its records, all or none."""
    who = f"{owner.distribution} {owner.version} (entry point {entry.name} = {entry.value})"
    try:
        with contextlib.nullcontext() if _is_own(owner) else guarded(who):
            _add_manifest(registry, hooks, entry.load(), owner, entry.name)
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - one broken distribution must not end the start
        broken = BrokenPlugin(owner.distribution, owner.version, f"{entry.name} = {entry.value}", cause_chain(error))
        registry.broken.append(broken)
        _log.debug("plugin not read: %s", broken)  # the main process warns once


def _add_manifest(registry: Registry, hooks: pluggy.PluginManager, plugin: Any, owner: Provenance, entry: str = "") -> None:
    """Register the hooks of a manifest and commit its records, all or none."""
    hooks.register(plugin, name=f"{owner.distribution}:{entry}" if entry else owner.distribution)
    try:
        _refuse_unknown_hooks(hooks, plugin)
        if entry and any(caller.name == KINDS["cli_command"].hook for caller in hooks.get_hookcallers(plugin) or ()):
            raise PluginError(f"a package names its commands in the entry-point group {COMMANDS}, because help reads no manifest")
        if not hooks.get_hookcallers(plugin):
            raise PluginError(f"{plugin.__name__} has no hook; write @hookimpl before its register_… function")
        kind_registries = _collect(registry, hooks, plugin, owner)
    except BaseException:
        hooks.unregister(plugin)
        raise
    for kind_registry in kind_registries:
        registry.commit(kind_registry)


def _refuse_unknown_hooks(hooks: pluggy.PluginManager, plugin: Any) -> None:
    for caller in hooks.get_hookcallers(plugin) or ():
        optional = all(impl.optionalhook for impl in caller.get_hookimpls() if impl.plugin is plugin)
        if not caller.has_spec() and not optional:
            known = [*_KIND_OF_HOOK, *EVENTS]
            replaced = describe_hook(caller.name)
            hint = f"; {replaced}" if replaced else did_you_mean(caller.name, known) or f"; hooks: {known}"
            raise AttributeError(f"unknown hook {caller.name!r}{hint}")


def _collect(registry: Registry, hooks: pluggy.PluginManager, plugin: Any, owner: Provenance) -> list[Any]:
    """Call the plugin's register hooks one by one, so that each record gets its distribution."""
    kind_registries = []
    for caller in hooks.get_hookcallers(plugin) or ():
        kind = _KIND_OF_HOOK.get(caller.name)
        for impl in caller.get_hookimpls():
            if kind is not None and impl.plugin is plugin:
                kind_registry = registry.kind(kind, owner.distribution, owner.version)
                impl.function(*(kind_registry for _ in impl.argnames))
                kind_registries.append(kind_registry)
    return kind_registries


def _normalise(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


@dataclass(slots=True)
class Observers:
    """The registered observers of each event as one callable. None: no observer, so that the event
    costs one comparison."""

    on_start: Callable[..., None] | None = None
    on_step: Callable[..., None] | None = None
    on_request_finished: Callable[..., None] | None = None
    on_stop: Callable[..., None] | None = None


def observers(registry: Registry) -> Observers:
    """Return the observers among the plugins of `registry`. Call them with keywords, as in
    `frame.plugins.hookspecs`. An observer of `on_start` that raises stops the start with
    PluginError. Any other that raises is logged with its traceback and switched off; the error is
    not raised."""
    registered = Observers()
    if registry.hooks is None:
        return registered
    for event in EVENTS:
        impls = getattr(registry.hooks.hook, event).get_hookimpls()
        if impls:
            listeners = [_Listener(*_owner(impl.plugin_name), impl.function, tuple(impl.argnames)) for impl in impls]
            setattr(registered, event, _Event(event, listeners))
    return registered


def observed_events(registry: Registry) -> dict[str, list[str]]:
    """The events that each distribution observes."""
    events: dict[str, list[str]] = {}
    for event in EVENTS if registry.hooks is not None else ():
        for impl in getattr(registry.hooks.hook, event).get_hookimpls():
            events.setdefault(impl.plugin_name.partition(":")[0], []).append(event)
    return events


def _owner(plugin: str) -> tuple[str, str]:
    """Who brings an observer, and what a user can do about its fault: the package and version of a
    manifest that is registered as DISTRIBUTION:ENTRY, or a file."""
    name = plugin.partition(":")[0]
    try:
        return f"{name} {version(name)}", "update or uninstall the package, or exclude it with plugins.deny"
    except PackageNotFoundError:
        return plugin, "correct the file, or take it out of plugins.paths"


@dataclass(frozen=True, slots=True)
class _Listener:
    owner: str  # package and version, or a file
    remedy: str
    function: Callable[..., object]
    arguments: tuple[str, ...]


class _Event:
    """Calls every observer of one event. An observer that raises is removed; one of `on_start`
    stops the start."""

    def __init__(self, name: str, listeners: list[_Listener]) -> None:
        self.name = name
        self.listeners = listeners

    def __call__(self, **arguments: Any) -> None:
        for listener in tuple(self.listeners):
            try:
                listener.function(*(arguments[name] for name in listener.arguments))
            except Exception as error:
                who = f"observer {self.name} of {listener.owner}"
                if self.name == "on_start":
                    raise PluginError(f"{who} failed at start: {cause_chain(error)}; {listener.remedy}.") from error
                self.listeners.remove(listener)  # an observer must never harm a step
                _log.exception("%s raised and is switched off until the next start; %s", who, listener.remedy)
