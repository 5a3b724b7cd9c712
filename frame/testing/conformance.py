"""The conformance suites by plugin kind, and how a suite finds its plugin.

A suite yields named checks. A check is a function without arguments that raises AssertionError with
a sentence, or `SkipCheck`. Used by `frame.testing.pytest_plugin` and `frame plugins check`. Must
not know a plugin by name, or pytest.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import logging
import os
import signal
import sys
import threading
import types
import unittest
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from frame.core.blame import blaming
from frame.core.errors import PluginError, did_you_mean
from frame.core.interfaces.plugin import PluginRecord
from frame.interfaces.kinds import KINDS
from frame.plugins.registry import Registry


class SkipCheck(unittest.SkipTest):  # pytest and unittest report it as skipped
    """A check cannot run here: the reason. It counts as skipped, never as passed."""


class Check(NamedTuple):
    """One check of an interface's contract. Raises AssertionError, or `SkipCheck`."""

    name: str
    run: Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """Where and how thoroughly a plugin is checked; `options` are the plugin's own settings."""

    device: str = "cpu"
    thorough: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """The plugin under test: its record, its class, and how to set it up."""

    record: PluginRecord
    target: type
    options: Any  # the validated options, or None
    setting: Setting


class SuiteFunction(Protocol):
    def __call__(self, subject: Subject) -> Iterable[Check]: ...


SUITES: Mapping[str, str] = MappingProxyType({kind.name: kind.suite_path for kind in KINDS.values() if kind.suite_path})

THOROUGH: Mapping[str, str] = MappingProxyType(  # what `Setting.thorough` adds, by kind
    {
        "attention_backend": "every case in every dtype, and larger ones",
        "gemm_kernel": "real sizes of all schemes of a type",
        "moe_runner": "layers of 64 experts and steps of 2,048 tokens",
        "prefix_cache": "400 in place of 60 runs of random calls",
    }
)


def find_checks(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions `check_…` that a module defines, in their order, by name without the prefix."""
    for name, function in vars(sys.modules[module]).items():
        if name.startswith("check_") and getattr(function, "__module__", "") == module:
            yield name.removeprefix("check_"), function


def collect(module: str, *arguments: Any, suffix: str = "") -> Iterator[Check]:
    """The checks of a module, which get these arguments."""
    return (Check(name + suffix, partial(function, *arguments)) for name, function in find_checks(module))


def call_check(check: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> None:
    """Run a check; a coroutine function runs in an event loop of its own, for `seconds` at most."""
    if inspect.iscoroutinefunction(check):
        asyncio.run(asyncio.wait_for(check(*arguments), seconds))
    else:
        check(*arguments)


def find(registry: Registry, selector: str, setting: Setting) -> Subject:
    """The plugin that `KIND:NAME` names, loaded. Raises PluginError that says what to write
    instead."""
    kind, _, name = selector.partition(":")
    if kind not in SUITES or not name:
        hint = did_you_mean(kind, SUITES) or "."
        raise PluginError(f"{selector!r} names no conformance suite{hint} Write KIND:NAME with a kind of {', '.join(SUITES)}.")
    record = registry.get(kind, name)
    return Subject(record, registry.load(record), registry.options(record, setting.options), setting)


def checks(kind: str, subject: Subject) -> list[Check]:
    """All checks of a kind for one plugin. Raises PluginError when the plugin cannot be checked
    in this setting."""
    module, _, name = SUITES[kind].partition(":")
    function: SuiteFunction = getattr(importlib.import_module(module), name)
    with blaming("in the conformance suite"):
        checks_of_kind = list(function(subject))
    if not checks_of_kind:
        raise PluginError(f"No conformance check of {kind!r} fits {subject.record.name!r} on {subject.setting.device}.")
    return checks_of_kind


class Outcome(NamedTuple):
    """The result of one check."""

    check: str
    result: str  # "passed", "failed", "skipped"
    message: str = ""


def run_suite(subject: Subject, first_failure: bool = False, only: str = "") -> list[Outcome]:
    """All checks of the plugin's kind, those up to the first that fails, or the one of a name."""
    outcomes: list[Outcome] = []
    try:
        for check in checks(subject.record.kind, subject):
            if only in ("", check.name):
                outcomes.append(run_check(check))
            if first_failure and outcomes and outcomes[-1].result == "failed":
                break
    except Exception as error:  # noqa: BLE001 - the plugin may raise where the suite asks it for its cases
        outcomes.append(Outcome("suite", "failed", f"{type(error).__name__}: {error}"))
    return outcomes


def run_check(check: Check) -> Outcome:
    """The result of one check."""
    try:
        check.run()
    except SkipCheck as reason:
        return Outcome(check.name, "skipped", str(reason))
    except Exception as error:  # noqa: BLE001 - a plugin that raises is found
        prefix = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return Outcome(check.name, "failed", f"{prefix}{error}")
    return Outcome(check.name, "passed")


# PyTorch's compiler sets them in each process that compiles (torch/_inductor)
COMPILER_VARIABLES = frozenset({
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_WARM_POOL", "KMP_DUPLICATE_LIB_OK", "CUDA_HOME",
    "TRITON_PTXAS_PATH", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
})  # fmt: skip


@contextmanager
def unchanged_process(what: str) -> Iterator[None]:
    """Raises AssertionError at the end if the body, which the sentence calls `what`, changed
    anything of the process that a plugin must leave as it is."""
    before, folder = _read_process_state(), Path.cwd()
    yield
    after = _read_process_state()
    os.chdir(folder)
    after["threads that keep it alive"] |= before["threads that keep it alive"]  # those of others may end
    changed = [name for name in before if before[name] != after[name]]
    variables = sorted({name for name, _ in before["environment"].items() ^ after["environment"].items()})
    names = f" ({', '.join(variables)})" if variables else ""
    assert not changed, f"{what} the process's {' and '.join(changed)}{names}"


def _read_process_state() -> dict[str, Any]:
    """By name."""
    root = logging.getLogger()
    return {
        "logging": (root.level, list(root.handlers), logging.root.manager.disable),
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)],
        "threads that keep it alive": {thread.name for thread in threading.enumerate() if not thread.daemon},
        "garbage collection": gc.isenabled(),
        "working folder": Path.cwd(),
        "environment": {name: value for name, value in os.environ.items() if name not in COMPILER_VARIABLES},
    }


def count_elements(plugin: object, maximum: int = 100_000) -> int:
    """Elements of the containers that a plugin refers to, those of its class and of the modules in
    its package included; objects after the first `maximum` are not counted. Suites compare two
    counts to find what grows."""
    containers = (list, dict, set, deque, tuple, bytearray)
    shared = [value for kind in type(plugin).__mro__ for value in vars(kind).values() if isinstance(value, containers)]
    foreign = (type, types.ModuleType, types.FunctionType, types.MethodType, types.CodeType, logging.Logger)
    tables = [value for value in _list_globals(type(plugin)) if isinstance(value, containers)]
    waiting: list[Any] = [*tables, *shared, plugin]  # the plugin first: a large table may reach the maximum
    seen: set[int] = set()
    size = 0
    while waiting and len(seen) < maximum:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, foreign):
            seen.add(id(one))
            size += len(one) if isinstance(one, containers) else 0
            waiting += [each for each in gc.get_referents(one) if gc.is_tracked(each) or isinstance(each, containers)]
    return size


def _list_globals(target: type) -> Iterator[Any]:
    """The globals of a class's module and of the modules beside it."""
    package = target.__module__.rpartition(".")[0] or target.__module__
    for name, module in list(sys.modules.items()):
        if name == target.__module__ or name == package or name.startswith(f"{package}."):
            yield from (value for key, value in list(vars(module).items()) if not key.startswith("__"))
