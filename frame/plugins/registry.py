"""The plugin registry: open (any name), lazy (a target is imported when it is selected) and typed
(one interface class per kind).

Filled by `frame.plugins.loader`, used by `frame.config.resolve` and by the processes that
build plugins. Must not know entry points or hooks, and does not select.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from frame.config.resolution.plugins import plugin_options
from frame.config.resolved import PluginChoice
from frame.core.blame import note_origin
from frame.core.errors import PluginError, did_you_mean
from frame.core.interfaces.plugin import Anything, PluginRecord, Reason
from frame.host.installation import install_command
from frame.interfaces.kinds import KINDS, Kind
from frame.plugins.renames import INTERFACES, describe_import, describe_missing, describe_renames
from frame.registration import KindRegistry, Provenance, list_unmet

__all__ = ["BrokenPlugin", "KindRegistry", "PluginError", "PluginRecord", "Registry", "cause_chain"]


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """An entry point that could not be read: its distribution and the cause. An error only if one
    of its plugins is selected."""

    distribution: str
    version: str
    entry_point: str
    cause: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} (entry point {self.entry_point}): {self.cause}"


class Registry:
    """All plugins that were found, by kind and name. `denied`: `plugins.deny`, whose names with a
    slash are plugins, as KIND/NAME. `assumed`: distributions that count as installed, because the
    plan is for another machine."""

    def __init__(self, denied: Sequence[str] = (), assumed: frozenset[str] = frozenset()) -> None:
        self._denied = tuple(denied)
        self._assumed = assumed
        self._records: dict[str, dict[str, list[PluginRecord]]] = {kind: {} for kind in KINDS}
        self._suggested: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        self._classes: dict[str, type] = {}  # of targets that were given as classes
        self.broken: list[BrokenPlugin] = []
        self.excluded: frozenset[str] = frozenset()  # installed distributions whose plugins were not read
        self.absent: set[str] = set()  # allowed or denied distributions that bring no plugin
        self.hooks: Any = None  # the loader's plugin manager, for observers; None: no observers

    def kind(self, kind: str, distribution: str = "", version: str = "") -> KindRegistry:
        """Return the argument for a register hook of `distribution`; `commit` adds its records."""
        return KindRegistry(_kind(kind), Provenance(distribution, version), assumed=self._assumed)

    @property
    def unmatched(self) -> list[str]:
        """Allowed or denied names without a plugin, misspelt or not installed. Without the plugins
        that a known package would bring."""
        known = {f"{kind}/{name}" for kind in KINDS for name in (*self._records[kind], *self._suggested[kind])}
        return sorted(self.absent | {name for name in self._denied if "/" in name and name not in known})

    def commit(self, kind_registry: KindRegistry) -> None:
        """Add the records of a hook that succeeded."""
        for record in kind_registry.added:
            if (full_name := f"{record.kind}/{record.name}") in self._denied:
                others = ", ".join(name for name in self._denied if name != full_name)
                reason = Reason("plugins.deny excludes it", f"plugins.deny: [{others}]")
                record = replace(record, problems=(*record.problems, reason))
            record = replace(record, problems=(*_api_problems(record.api, kind_registry.kind), *record.problems))
            self._records[record.kind].setdefault(record.name, []).append(record)
        self._suggested[kind_registry.kind.name].update(kind_registry.suggested)
        self._classes.update(kind_registry.classes)

    def records(self, kind: str) -> list[PluginRecord]:
        """Return all records of a kind, by descending rank. `problems` says why a record cannot be
        used."""
        records = [_with_clash(record, same) for same in self._records[_kind(kind).name].values() for record in same]
        return sorted(records, key=lambda record: (-record.rank, record.name, record.distribution))

    def all_records(self) -> dict[str, list[PluginRecord]]:
        """Return the records of every kind, the input of `frame.config.resolve`."""
        return {kind: self.records(kind) for kind in KINDS}

    def get(self, kind: str, name: str) -> PluginRecord:
        """Return the record of a name. Raises PluginError if it is unknown, ambiguous or cannot be
        used here."""
        same = self._records[_kind(kind).name].get(name, [])
        if not same:
            raise PluginError(self._unknown(kind, name))
        record = _with_clash(same[0], same)
        if record.problems:
            whose = f" ({record.distribution} {record.version})" if len(same) == 1 else ""
            reasons = "; ".join(map(str, record.problems))
            raise PluginError(f"{kind} {name!r}{whose} cannot be used: {reasons}.")
        return record

    def is_installed(self, kind: str, name: str) -> bool:
        """Whether this environment has what the plugin requires; assumptions do not count."""
        return not any(list_unmet(record.requires) for record in self._records[_kind(kind).name].get(name, []))

    def find(self, name: str) -> list[PluginRecord]:
        """Return the records of a name in any kind; `name` may be "kind/name". Raises PluginError
        if there is none."""
        kind, _, plain = name.rpartition("/")
        if kind:
            records = [record for record in self.records(kind) if record.name == plain]
            if not records:
                raise PluginError(self._unknown(kind, plain))
            return records
        records = [record for each in KINDS for record in self.records(each) if record.name == plain]
        if not records:
            for each in KINDS:
                if name in self._suggested[each]:
                    raise PluginError(self._unknown(each, name))
            known = {record.name for each in KINDS for record in self.records(each)}
            raise PluginError(f"No plugin is called {plain!r}{did_you_mean(plain, known) or '.'}{self._broken_note()}")
        return records

    def load(self, record: PluginRecord) -> type:
        """Import the record's class. Raises PluginError with the chain of causes."""
        who = f"{record.kind} {record.name!r} ({record.distribution or 'no distribution'} {record.version})".replace(" )", ")")
        if record.problems:
            raise PluginError(f"{who} cannot be used: {'; '.join(map(str, record.problems))}.")
        try:
            loaded = self._classes.get(record.target) or _import(record.target)
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # a plugin's import may raise any error, SystemExit included
            raise PluginError(f"{who} was selected but does not load from {record.target}: {cause_chain(error)}") from error
        base = _import(_kind(record.kind).interface_path)
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            raise PluginError(f"{who}: {record.target} is no subclass of {_kind(record.kind).interface_path.replace(':', '.')}; derive it.")
        if inspect.isabstract(loaded):
            missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
            renames = describe_missing(record.api, loaded)
            raise PluginError(f"{who}: {record.target} does not implement {missing} of {record.api}{f'; {renames}' if renames else ''}.")
        _check_optional(who, record, loaded, base)
        _check_signatures(who, record, loaded)
        _check_capabilities(who, record, loaded)
        note_origin(loaded, record, _kind(record.kind).change)
        return loaded

    def options(self, record: PluginRecord, values: Mapping[str, Any]) -> BaseModel | None:
        """Validate the plugin's options. Raises PluginError that names the key."""
        return plugin_options(record, values)

    def choose(self, choice: PluginChoice) -> tuple[type, BaseModel | None]:
        """Return class and options of a resolved choice, after checking that this process finds the
        same plugin."""
        try:
            record = self.get(choice.kind, choice.name)
        except PluginError as error:
            owner = f"{choice.distribution} {choice.version}"
            raise PluginError(
                f"{choice.kind} {choice.name!r} ({owner}) is missing in this process: {error} Start every process in the same environment."
            ) from None
        here = (record.target, record.distribution, record.version)
        if here != (choice.target, choice.distribution, choice.version):
            raise PluginError(
                f"{choice.kind} {choice.name!r} was resolved as {choice.distribution} {choice.version} ({choice.target}), "
                f"but this process finds {record.distribution} {record.version} ({record.target}); restart after the "
                "installation changed."
            )
        return self.load(record), self.options(record, choice.options)

    def create(self, choice: PluginChoice, context: Any) -> Any:
        """Construct a resolved choice. `context`: of the kind, see `Kind.context`."""
        target, options = self.choose(choice)
        return target(context, options)

    def describe_missing(self, kind: str, name: str) -> str | None:
        """How to get a plugin that is not installed; None if no package is known that brings it."""
        if (distribution := self._suggested[kind].get(name)) is None:
            return None
        if distribution in self.excluded:
            return f"{kind} {name!r} cannot be used: plugins.allow or plugins.deny excludes its package {distribution}."
        return f"{kind} {name!r} is not installed; install its package: {install_command(distribution)}.{self._broken_note()}"

    def _unknown(self, kind: str, name: str) -> str:
        if missing := self.describe_missing(kind, name):
            return missing
        known = self._records[kind]
        names = ", ".join(f"{n} ({' and '.join(r.distribution or '?' for r in same)})" for n, same in sorted(known.items()))
        listed = f" Installed: {names}." if names else f" No {kind} is installed."
        return f"Unknown {kind} {name!r}{did_you_mean(name, known) or '.'}{listed}{self._denied_note()}{self._broken_note()}"

    def _denied_note(self) -> str:
        if not self.excluded:
            return ""
        return f" plugins.allow or plugins.deny excludes these packages, which may contain it: {', '.join(sorted(self.excluded))}."

    def _broken_note(self) -> str:
        if not self.broken:
            return ""
        return " These plugins could not be read and may contain it: " + "; ".join(map(str, self.broken)) + "."


def cause_chain(error: BaseException) -> str:
    """Return one line: the error, its place, its chain of causes, and the new names that an import
    misses."""
    causes: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        text = " ".join(str(current).split())
        causes.append(f"{type(current).__name__}: {text}{_place(current)}" if text else f"{type(current).__name__}{_place(current)}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    chain, renames = ", caused by ".join(causes), describe_import(error)
    return f"{chain}. {renames}" if renames else chain


def _place(error: BaseException) -> str:
    """Where the plugin's code raised, without the frames of imports and of the modules that read
    plugins."""
    frames = traceback.extract_tb(error.__traceback__)
    here = Path(__file__).parent
    outside = [
        f for f in frames if not f.filename.startswith("<frozen") and "importlib" not in f.filename and Path(f.filename).parent != here
    ]
    return f" ({outside[-1].filename}:{outside[-1].lineno})" if outside else ""


def _kind(kind: str) -> Kind:
    try:
        return KINDS[kind]
    except KeyError:
        raise PluginError(f"Unknown plugin kind {kind!r}{did_you_mean(kind, KINDS) or '.'} Kinds: {', '.join(KINDS)}.") from None


def _import(target: str) -> Any:
    module, _, path = target.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def _check_optional(who: str, record: PluginRecord, loaded: type, base: type) -> None:
    """Raise PluginError for a class that has the methods of an optional class of its interface, and
    does not derive from it: users would not find them."""
    for name, optional in inspect.getmembers(sys.modules[base.__module__], inspect.isabstract):
        methods = sorted(optional.__abstractmethods__)
        if not name.startswith("Supports") or all(hasattr(base, each) for each in methods):  # the latter: another interface's
            continue
        if not issubclass(loaded, optional) and all(hasattr(loaded, each) for each in methods):
            where = f"{optional.__module__}.{name}"
            raise PluginError(f"{who}: {record.target} has {', '.join(methods)} and does not derive from {where}; derive from it, too.")


def _check_signatures(who: str, record: PluginRecord, loaded: type) -> None:
    """Raise PluginError for a constructor or a method that does not take the arguments of its
    interface. An argument with the name of a capability is given only to plugins that have it."""
    try:
        inspect.signature(loaded).bind(None, None)
    except TypeError as error:
        raise PluginError(f"{who}: {record.target} does not take (context, options) of {record.api}: {error}.") from None
    interfaces = [each for each in loaded.__mro__ if each.__module__.rpartition(".")[0] in INTERFACES and each is not loaded]
    for name, declared in (pair for each in interfaces for pair in vars(each).items()):
        implemented = inspect.getattr_static(loaded, name, declared)
        if name.startswith("_") or implemented is declared or not (inspect.isfunction(declared) and inspect.isfunction(implemented)):
            continue
        every = inspect.signature(declared).parameters.values()
        parameters = [each for each in every if getattr(record.capabilities, each.name, True) is not False]
        positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        try:
            inspect.signature(implemented).bind(*positional, **{each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY})
        except TypeError as error:
            names = ", ".join(each.name for each in positional)
            raise PluginError(f"{who}: {record.target}.{name} does not take ({names}) of {record.api}: {error}.") from None


def _check_capabilities(who: str, record: PluginRecord, loaded: type) -> None:
    """Raise PluginError where the class says other capabilities than its record."""
    listed: object = record.capabilities
    stated: Any = getattr(loaded, "capabilities", None)
    if isinstance(listed, Anything) or not is_dataclass(stated) or isinstance(stated, type) or listed == stated:
        return
    names = [each.name for each in fields(stated) if getattr(stated, each.name) != getattr(listed, each.name, None)]
    pairs = [(name, getattr(stated, name), getattr(listed, name, None)) for name in names]
    differ = "; ".join(f"{name} is {in_class!r} in the class and {in_record!r} in the record" for name, in_class, in_record in pairs)
    raise PluginError(f"{who}: {record.target} and its record disagree: {differ}. Register the class's own capabilities.")


def _with_clash(record: PluginRecord, same: Sequence[PluginRecord]) -> PluginRecord:
    if len(same) < 2:
        return record
    owners = sorted({f"{r.distribution} {r.version}".strip() for r in same})
    others = sorted({r.distribution for r in same} - {same[0].distribution})
    clash = Reason(
        f"the name is registered by {' and by '.join(owners)}; uninstall or deny one",
        f"plugins.deny: [{(others or [same[0].distribution])[0]}]",
    )
    return replace(record, problems=(*record.problems, clash))


def _api_problems(api: str, kind: Kind) -> tuple[Reason, ...]:
    if api == kind.api:
        return ()
    sentence = f"it was written for interface {api}, this frame supports {kind.api}; install a version of the plugin for it"
    renames = describe_renames(api, kind.api)
    return (Reason(f"{sentence}, or in its code {renames}" if renames else sentence),)
