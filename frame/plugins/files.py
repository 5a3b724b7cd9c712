"""Plugins without a package: Python files (`plugins.paths`) and classes (`Engine(plugins=[…])`).

A file is a manifest like that of a package. A file without hooks registers each plugin class that
it defines, as `add_class` does. Used by `frame.plugins.loader`. Must not select a plugin.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import zlib
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from frame.core.errors import PluginError
from frame.core.interfaces.plugin import Capabilities
from frame.interfaces.kinds import KINDS, Kind
from frame.plugins.registry import Registry, cause_chain
from frame.plugins.renames import describe_missing

CALLER = "Engine(plugins=…)"  # who registers a class that no package or file brings


class SourceLoader(SourceFileLoader):
    """Runs the file itself, and no bytecode file of the folder beside it: the user trusts the file,
    and the folder may be a checkpoint's."""

    def path_stats(self, path: Any) -> dict[str, Any]:
        raise OSError  # without the file's times and size, bytecode is neither read nor written


def load_file(path: str) -> tuple[ModuleType, str]:
    """Import a Python file, or a folder with an `__init__.py`, anew. Returns the module, and the
    hash of the file's content, which serves as its version. Raises PluginError that names the
    file."""
    file = Path(path).expanduser().resolve()
    source = file / "__init__.py" if file.is_dir() else file
    if not source.is_file():
        raise PluginError(f"plugins.paths: {path} is no Python file, and no folder with an __init__.py; correct the path")
    stem = re.sub(r"\W", "_", file.stem)
    name = f"frame_file_{stem}_{zlib.crc32(str(file).encode()):08x}"  # two files may have the same stem
    folders = [str(file)] if file.is_dir() else None
    loader = SourceLoader(name, str(source)) if source.suffix == ".py" else None
    spec = importlib.util.spec_from_file_location(name, source, loader=loader, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugins.paths: {path} cannot be imported; give a file whose name ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # the file may raise any error, SystemExit included
        del sys.modules[name]
        raise PluginError(f"plugins.paths: {path} raises when it is imported: {cause_chain(error)}") from error
    return module, hashlib.sha256(source.read_bytes()).hexdigest()[:12]


def find_classes(module: ModuleType) -> list[type]:
    """The plugin classes that a module defines itself, in the order of their names."""
    return [member for member in _list_classes(module) if not inspect.isabstract(member)]


def explain_absence(module: ModuleType) -> str:
    """Why a module has no plugin class, a clause: what its classes do not implement, if it has
    any."""
    for member in _list_classes(module):
        missing = sorted(getattr(member, "__abstractmethods__", ()))
        if (kind := find_kind(member)) is not None and missing:
            renames = describe_missing(kind.api, member)
            return f"{member.__name__} does not implement {', '.join(missing)} of {kind.api}{f'; {renames}' if renames else ''}"
    return "derive a class from an interface, or write a register_… hook"


def _list_classes(module: ModuleType) -> list[type]:
    members = [member for _, member in inspect.getmembers(module, inspect.isclass)]
    return [member for member in members if member.__module__ == module.__name__ and find_kind(member) is not None]


def find_kind(target: type) -> Kind | None:
    """The kind whose interface `target` derives from; None: it is no plugin class."""
    for kind in KINDS.values():
        module, _, name = kind.interface_path.partition(":")
        base = getattr(sys.modules.get(module), name, None)  # a class derives from a module that is imported
        if isinstance(base, type) and issubclass(target, base):
            return kind
    return None


def add_class(registry: Registry, target: type, owner: str, version: str) -> None:
    """Register a plugin class of `owner`.

    The name is the class attribute `name`, or the class's name in snake case. The class attribute
    `capabilities` and a nested pydantic class `Options` become those of the record. Raises
    PluginError if the class derives from no interface.
    """
    kind, name = name_class(target)
    capabilities, options = getattr(target, "capabilities", None), getattr(target, "Options", None)
    kind_registry = registry.kind(kind.name, owner, version)
    kind_registry.add(
        name,
        target,
        capabilities=capabilities if isinstance(capabilities, Capabilities) else None,
        options=options if isinstance(options, type) and issubclass(options, BaseModel) else None,
        summary=next(iter((inspect.getdoc(target) or "").split("\n\n")), "").replace("\n", " "),
    )
    registry.commit(kind_registry)


def add_classes(registry: Registry, classes: Iterable[type]) -> None:
    """Register the classes of `Engine(plugins=[…])`."""
    for target in classes:
        add_class(registry, target, CALLER, "")


def name_class(target: Any) -> tuple[Kind, str]:
    """The kind and the plugin name of a class. Raises PluginError if it is no plugin class."""
    kind = find_kind(target) if isinstance(target, type) else None
    if kind is None:
        classes = ", ".join(each.interface_path.replace(":", ".") for each in KINDS.values())
        raise PluginError(f"{getattr(target, '__qualname__', target)!r} is no plugin class; derive it from one of {classes}")
    name = getattr(target, "name", None)
    if not isinstance(name, str):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", target.__name__).lower()
    return kind, name
