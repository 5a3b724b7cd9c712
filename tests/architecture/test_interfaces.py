"""Interfaces are small: what every implementation must have is in one, and each optional capability
is one of its own."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import frame.interfaces
from frame.core import interfaces
from frame.interfaces.kinds import KINDS

MAX_METHODS = 8
PACKAGES = (interfaces, frame.interfaces)


def list_interfaces() -> Iterator[type]:
    """The ABCs and protocols of the interface pages, and the classes that derive from them
    there."""
    for page in (page for each in PACKAGES for page in pkgutil.iter_modules(each.__path__, f"{each.__name__}.")):
        module = importlib.import_module(page.name)
        for _, value in inspect.getmembers(module, inspect.isclass):
            if value.__module__ == page.name and (getattr(value, "_is_protocol", False) or type(value) is not type):
                yield value


def list_methods(interface: type) -> set[str]:
    """The public methods and properties of an interface and of those that it derives from."""
    bases = [each for each in interface.__mro__ if each.__module__.startswith(tuple(f"{package.__name__}." for package in PACKAGES))]
    members = {name: value for each in bases for name, value in vars(each).items() if not name.startswith("_")}
    return {name for name, value in members.items() if callable(value) or isinstance(value, (property, classmethod, staticmethod))}


def test_no_interface_has_more_than_eight_methods() -> None:
    methods = {f"{each.__module__}.{each.__name__}": list_methods(each) for each in list_interfaces()}
    assert len(methods) > 40
    large = [f"{name} has {len(found)}: {', '.join(sorted(found))}" for name, found in methods.items() if len(found) > MAX_METHODS]
    assert not large, "\n".join(large)


def test_no_optional_interface_is_part_of_its_kinds_own() -> None:
    """The registry refuses a class that has the methods of an optional interface on its page and
    does not derive from it, which must not be every class of the kind."""
    for kind in KINDS.values():
        module, _, name = kind.interface_path.partition(":")
        page = importlib.import_module(module)
        for optional, value in inspect.getmembers(page, inspect.isabstract):
            if optional.startswith("Supports"):
                missing = value.__abstractmethods__ - list_methods(getattr(page, name))
                assert missing, f"every {kind.name} has the methods of {optional}"
