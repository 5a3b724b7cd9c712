"""Interfaces are small: what every implementation must have is in one, and each optional capability
is one of its own."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import frame.interfaces
from frame.core import interfaces

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
