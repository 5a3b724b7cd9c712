"""The registry: records, errors, lazy loading."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import BaseModel

from frame.config.resolved import PluginChoice
from frame.core.interfaces.cache import PrefixCacheCapabilities
from frame.core.interfaces.plugin import Reason
from frame.core.interfaces.scheduling import SchedulingPolicy
from frame.host.installation import install_command
from frame.interfaces.kinds import KINDS, Kind
from frame.plugins.loader import load_registry
from frame.plugins.registry import PluginError, Registry, cause_chain

KIND = "scheduling_policy"
MODULE = "frame_test_plugin_module"


class Fifo(SchedulingPolicy):
    def sort_waiting(self, waiting: object, view: object) -> object:
        return waiting


class Unfinished(SchedulingPolicy):
    pass


class Unrelated:
    pass


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType(MODULE)
    made.Fifo, made.Unfinished, made.Unrelated = Fifo, Unfinished, Unrelated
    sys.modules[MODULE] = made
    yield made
    del sys.modules[MODULE]


def registry_with(*names: str, distribution: str = "one", **arguments: object) -> Registry:
    registry = Registry()
    add(registry, *names, distribution=distribution, **arguments)
    return registry


def add(registry: Registry, *names: str, distribution: str = "one", target: str = f"{MODULE}:Fifo", **arguments: object) -> None:
    part = registry.kind(KIND, distribution, "1.0")
    for name in names:
        part.add(name, target, **arguments)
    registry.commit(part)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_the_kinds_table_names_classes_and_suites_that_exist(kind: Kind) -> None:
    for path in (kind.interface_path, kind.context_path, kind.suite_path):
        if path is not None:
            module, _, name = path.partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_a_record_knows_who_brought_it_and_is_not_imported() -> None:
    record = registry_with("x", target="no_such_module:Nothing", summary="s", rank=3).get(KIND, "x")
    assert (record.distribution, record.version, record.rank, record.api) == ("one", "1.0", 3, "scheduling_policy/4")


def test_records_are_ranked_then_named() -> None:
    registry = registry_with("b", "a", rank=1)
    add(registry, "best", rank=2)
    assert [record.name for record in registry.records(KIND)] == ["best", "a", "b"]


@pytest.mark.parametrize(
    ("kind", "name", "package"),
    [
        ("launcher", "ray", "frame-ray"),
        ("gemm_kernel", "amx", "frame-x86"),
        ("gemm_kernel", "avx512", "frame-x86"),
        ("attention_backend", "avx512", "frame-x86"),
        ("weight_source", "gguf", "frame-gguf"),
        ("weight_format", "bitsandbytes", "frame-bitsandbytes"),
        ("grammar_backend", "automata", "frame-automata"),
    ],
)
def test_plugins_of_our_packages_are_named_with_their_package(kind: str, name: str, package: str) -> None:
    registry = load_registry(installed=False)
    registry.excluded = frozenset()  # some of the packages may be installed
    with pytest.raises(PluginError) as caught:
        registry.get(kind, name)
    assert str(caught.value) == f"{kind} {name!r} is not installed; install its package: {install_command(package)}."


def test_a_plugin_of_a_package_that_is_not_installed_is_named_with_its_remedy() -> None:
    registry = registry_with("fcfs")
    part = registry.kind(KIND, "one", "1.0")
    part.suggest_distribution("elsewhere", "frame-elsewhere")
    registry.commit(part)
    sentence = f"{KIND} 'elsewhere' is not installed; install its package: {install_command('frame-elsewhere')}."
    for ask in (lambda: registry.get(KIND, "elsewhere"), lambda: registry.find("elsewhere"), lambda: registry.find(f"{KIND}/elsewhere")):
        with pytest.raises(PluginError) as caught:
            ask()
        assert str(caught.value) == sentence
    registry.excluded = frozenset(["frame-elsewhere"])
    with pytest.raises(PluginError, match="cannot be used: plugins.allow or plugins.deny excludes its package frame-elsewhere"):
        registry.get(KIND, "elsewhere")
    add(registry, "elsewhere", distribution="frame-elsewhere")
    assert registry.get(KIND, "elsewhere").distribution == "frame-elsewhere"


def test_a_denied_plugin_is_listed_and_refused() -> None:
    registry = Registry([f"{KIND}/lpm", f"{KIND}/lmp"])
    add(registry, "fcfs", "lpm")
    assert [record.name for record in registry.records(KIND) if not record.problems] == ["fcfs"]
    with pytest.raises(PluginError, match=f"cannot be used: plugins.deny excludes it .try plugins.deny: .{KIND}/lmp.."):
        registry.get(KIND, "lpm")
    assert registry.unmatched == [f"{KIND}/lmp"]


def test_an_unknown_name_lists_names_owners_and_the_nearest() -> None:
    registry = registry_with("fcfs")
    add(registry, "lpm", distribution="two")
    with pytest.raises(PluginError) as caught:
        registry.get(KIND, "fcsf")
    assert "Unknown scheduling_policy 'fcsf'; did you mean 'fcfs'? Installed: fcfs (one), lpm (two)." in str(caught.value)
    with pytest.raises(PluginError, match="did you mean 'scheduling_policy'"):
        registry.get("schedule_policy", "fcfs")
    with pytest.raises(PluginError, match="did you mean 'lpm'"):
        registry.find("lmp")


def test_find_takes_a_plain_or_a_full_name() -> None:
    registry = registry_with("fcfs")
    assert registry.find("fcfs") == registry.find(f"{KIND}/fcfs") == [registry.get(KIND, "fcfs")]


def test_a_clash_is_fatal_when_asked_for_and_names_both_owners_and_the_remedy() -> None:
    registry = registry_with("fcfs", "other")
    add(registry, "fcfs", distribution="two")
    with pytest.raises(PluginError, match=r"registered by one 1\.0 and by two 1\.0; uninstall or deny one \(try plugins\.deny: \[two\]\)"):
        registry.get(KIND, "fcfs")
    assert registry.get(KIND, "other").problems == ()
    assert all(record.problems for record in registry.records(KIND) if record.name == "fcfs")


def test_another_interface_version_is_listed_and_refused_only_when_asked_for() -> None:
    registry = registry_with("new", api="scheduling_policy/9")
    (record,) = registry.records(KIND)
    assert "written for interface scheduling_policy/9, this frame supports scheduling_policy/4" in record.problems[0].sentence
    with pytest.raises(PluginError, match="scheduling_policy/9"):
        registry.get(KIND, "new")
    with pytest.raises(PluginError, match="scheduling_policy/9"):
        registry.load(record)


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        ("frame-no-such-distribution>=1", "needs frame-no-such-distribution>=1, which is not installed"),
        ("pytest>=9999", "needs pytest>=9999, installed is"),
        ("not a requirement!", "is malformed"),
        ("pytest", None),
        ("pytest>=1,<9999", None),
        ("frame-no-such-distribution; python_version < '3'", None),
    ],
)
def test_requirements_are_checked_without_an_import(requirement: str, words: str | None) -> None:
    (record,) = registry_with("x", requires=(requirement,)).records(KIND)
    assert [reason.sentence for reason in record.problems] == [] if words is None else words in record.problems[0].sentence


def test_modules_that_no_index_has_are_looked_for_without_an_import() -> None:
    (record,) = registry_with("x", modules={"json": "of Python", "no_such_kernels.sm90": "build them from example.com"}).records(KIND)
    (reason,) = record.problems
    assert reason.sentence == "it needs the Python module no_such_kernels.sm90, which is not installed; build them from example.com"


def test_load_gives_the_class(module: types.ModuleType) -> None:
    registry = registry_with("x")
    assert registry.load(registry.get(KIND, "x")) is Fifo


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("frame_no_such_module:X", "ModuleNotFoundError: No module named 'frame_no_such_module'"),
        (f"{MODULE}:Missing", "has no attribute 'Missing'"),
        (f"{MODULE}:Unrelated", "is no subclass of frame.core.interfaces.scheduling.SchedulingPolicy"),
        (f"{MODULE}:Unfinished", "does not implement sort_waiting of scheduling_policy/4"),
    ],
)
def test_what_does_not_load_says_why(module: types.ModuleType, target: str, words: str) -> None:
    registry = registry_with("x", target=target)
    with pytest.raises(PluginError) as caught:
        registry.load(registry.get(KIND, "x"))
    assert words in str(caught.value)
    assert "scheduling_policy 'x' (one 1.0)" in str(caught.value)


def test_a_cause_chain_is_one_line_with_every_cause() -> None:
    def fail() -> None:
        try:
            try:
                raise OSError("libcuda.so.1: cannot open")
            except OSError as inner:
                raise ValueError("no\nkernel") from inner
        except ValueError as middle:
            raise ImportError("plugin broken") from middle

    with pytest.raises(ImportError) as caught:
        fail()
    text = cause_chain(caught.value)
    assert "\n" not in text
    parts = text.split(", caused by ")
    assert [part.split(" (")[0] for part in parts] == [
        "ImportError: plugin broken",
        "ValueError: no kernel",
        "OSError: libcuda.so.1: cannot open",
    ]
    assert all("test_registry.py" in part for part in parts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "a b"}, "must not be empty or hold spaces"),
        ({"name": "a/b"}, "must not be empty or hold spaces or '/'"),
        ({"target": "module.Class"}, "write it as 'package.module:Class'"),
        ({"capabilities": object()}, "unsupported"),
        ({"options": dict}, "pydantic model class"),
        ({"requires": "my-kernels>=2"}, "give a list of requirements"),
        ({"requires": [2]}, "give a list of requirements"),
        ({"modules": ["my_kernels"]}, "give each module's name with how to install it"),
        ({"modules": {"my_kernels": None}}, "give each module's name with how to install it"),
        ({"rank": "high"}, "rank is 'high'; give a whole number"),
        ({"summary": None}, "summary is None; give one sentence"),
    ],
)
def test_malformed_records_are_refused(arguments: dict[str, object], words: str) -> None:
    good = {"name": "x", "target": "m:C"}
    with pytest.raises(PluginError, match=words):
        Registry().kind(KIND).add(**(good | arguments))


def test_the_same_plugin_twice_from_one_owner_is_refused_at_once() -> None:
    with pytest.raises(PluginError, match="added twice"):
        registry_with("x", "x")


def test_options_are_validated() -> None:
    class Options(BaseModel):
        splits: int = 4

    registry = registry_with("x", options=Options)
    add(registry, "plain")
    record = registry.get(KIND, "x")
    assert registry.options(record, {"splits": 2}) == Options(splits=2)
    with pytest.raises(PluginError, match=r"scheduling_policy/x\.split is unknown; did you mean 'splits'\? Its options: splits"):
        registry.options(record, {"split": 2})
    with pytest.raises(PluginError, match=r"splits is 'many'"):
        registry.options(record, {"splits": "many"})
    with pytest.raises(PluginError, match="takes no options"):
        registry.options(registry.get(KIND, "plain"), {"a": 1})
    assert registry.options(registry.get(KIND, "plain"), {}) is None


def test_a_process_that_sees_another_plugin_than_was_resolved_refuses(module: types.ModuleType) -> None:
    registry = registry_with("x")
    choice = PluginChoice(kind=KIND, name="x", target=f"{MODULE}:Fifo", distribution="one", version="1.0")
    assert registry.choose(choice) == (Fifo, None)
    with pytest.raises(PluginError, match=r"was resolved as one 0\.9"):
        registry.choose(choice.model_copy(update={"version": "0.9"}))


def test_a_reason_reads_well() -> None:
    assert str(Reason("needs x", "a.b: 1")) == "needs x (try a.b: 1)"
    assert str(Reason("needs x")) == "needs x"


@pytest.mark.parametrize("groups", [False, True])
def test_an_argument_of_a_capability_is_asked_of_plugins_that_have_it(groups: bool) -> None:
    def insert(self: Any, tokens: Any, pages: Any, namespace: str = "", priority: int = 0) -> Any: ...

    registry = load_registry(installed=False)
    base = registry.load(registry.get("prefix_cache", "none"))
    capabilities = PrefixCacheCapabilities(groups=groups)
    part = registry.kind("prefix_cache", "theirs", "1")
    part.add("plain", type("Plain", (base,), {"insert": insert, "capabilities": capabilities}), capabilities=capabilities)
    registry.commit(part)
    words = r"insert does not take \(self, tokens, pages, namespace, priority, groups\)"
    with pytest.raises(PluginError, match=words) if groups else nullcontext():
        registry.load(registry.get("prefix_cache", "plain"))
