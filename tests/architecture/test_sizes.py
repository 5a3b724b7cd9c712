"""How large files, functions, classes and constructors may be. An exception needs a reason, and
goes when it is no longer needed."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from tests.architecture.source import Module, classes, functions, is_under, module, package

FILE, FUNCTION, ATTRIBUTES, PARAMETERS, METHODS = 500, 80, 15, 6, 6
FOLDER = 15  # modules beside `__init__`
# One plugin, one interface or one suite a file, without a bound.
FAMILIES = (
    "frame/core/interfaces", "frame/interfaces", "frame/attention_backends", "frame/models", "frame/quantization",
    "frame/plugins/collectives",
    "frame/plugins/eviction_policies", "frame/plugins/grammar_backends", "frame/plugins/http_extensions",
    "frame/plugins/logits_processors", "frame/plugins/moe_dispatchers", "frame/plugins/moe_runners", "frame/plugins/platforms",
    "frame/plugins/prefix_caches", "frame/plugins/reasoning_parsers", "frame/plugins/scheduling_policies",
    "frame/plugins/tool_call_parsers", "frame/plugins/launchers",
    "frame/plugins/drafters", "frame/plugins/stat_loggers", "frame/plugins/weight_sources",
)  # fmt: skip
KERNEL = 160  # lines of a device kernel, which cannot call out freely: intermediate values live in registers

# "what path[:name]" -> why it may be larger.
EXCEPTIONS: dict[str, str] = {}

Breach = tuple[str, str]  # key into EXCEPTIONS, sentence


def long_files(modules: Iterable[Module]) -> Iterator[Breach]:
    for found in modules:
        if found.num_lines > FILE:
            yield f"file {found.path}", f"{found.path} has {found.num_lines} lines, {FILE} is the cap"


def long_functions(modules: Iterable[Module]) -> Iterator[Breach]:
    """Docstrings and decorators are not counted; device kernels have a cap of their own."""
    for found in modules:
        for node in functions(found.tree):
            first = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.body[0].lineno
            lines = (node.end_lineno or 0) - first + 1
            cap = KERNEL if any(name.startswith(("triton.jit", "gluon.jit")) for name in _decorators(node)) else FUNCTION
            if lines > cap:
                yield f"function {found.path}:{node.name}", f"{found.at(node)}: {node.name} has {lines} lines, {cap} is the cap"


def crowded_classes(modules: Iterable[Module]) -> Iterator[Breach]:
    """Attributes that methods set on `self`; plain data (dataclasses, structs, pydantic models) set
    none."""
    for found in modules:
        for node in classes(found.tree):
            names = {name for function in functions(node) for name in _set_on_self(function)}
            if len(names) > ATTRIBUTES:
                yield (
                    f"attributes {found.path}:{node.name}",
                    f"{found.at(node)}: {node.name} has {len(names)} attributes, {ATTRIBUTES} is the cap",
                )


def wide_constructors(modules: Iterable[Module]) -> Iterator[Breach]:
    for found in modules:
        for node in classes(found.tree):
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    arguments = function.args
                    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
                    if count > PARAMETERS:
                        yield (
                            f"parameters {found.path}:{node.name}",
                            f"{found.at(function)}: {node.name}() takes {count} parameters, {PARAMETERS} is the cap",
                        )


def large_interfaces(modules: Iterable[Module]) -> Iterator[Breach]:
    """Abstract methods of the interface pages; read-only properties and the self-check are not
    counted."""
    for found in modules:
        if not is_under(found.name, "frame.core.interfaces", "frame.interfaces"):
            continue
        for node in classes(found.tree):
            methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef) and _decorators(part) == {"abstractmethod"}]
            methods = [name for name in methods if name not in ("check_integrity", "audit")]
            if len(methods) > METHODS:
                yield (
                    f"methods {found.path}:{node.name}",
                    f"{found.at(node)}: {node.name} asks for {len(methods)} methods, {METHODS} is the cap",
                )


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(decorator) for decorator in node.decorator_list}


def _set_on_self(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


CHECKS = (long_files, long_functions, crowded_classes, wide_constructors, large_interfaces)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_size(check) -> None:
    assert [sentence for key, sentence in check(package()) if key not in EXCEPTIONS] == []


def test_exceptions_are_needed_and_explained() -> None:
    found = {key for check in CHECKS for key, _ in check(package())}
    assert sorted(set(EXCEPTIONS) - found) == [], "these exceptions can go"
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


def test_checks_find() -> None:
    lines = "\n".join(f"    x = {i}" for i in range(FUNCTION + 1))
    many = "\n".join(f"        self.a{i} = {i}" for i in range(ATTRIBUTES + 1))
    wide = ", ".join(f"p{i}" for i in range(PARAMETERS + 1))
    asks = "\n".join(f"    @abstractmethod\n    def m{i}(self): ..." for i in range(METHODS + 1))
    assert list(long_files([module("\n" * (FILE + 1))]))
    assert list(long_functions([module(f"def f():\n{lines}")]))
    assert not list(long_functions([module(f"@triton.jit\ndef f():\n{lines}")]))
    assert list(long_functions([module(f"@triton.jit\ndef f():\n{lines}\n{lines}")]))
    assert not list(long_functions([module(f"def f():\n    '''{lines}'''\n    return 1")]))
    assert list(crowded_classes([module(f"class A:\n    def f(self):\n{many}")]))
    assert list(wide_constructors([module(f"class A:\n    def __init__(self, {wide}): pass")]))
    assert list(large_interfaces([module(f"class A:\n{asks}", "frame.core.interfaces.example")]))


CORE = 15_000  # lines: what the core does not call is beside it


def count_lines(modules: Iterable[Module], room: str) -> int:
    return sum(found.num_lines for found in modules if is_under(found.name, room))


def test_the_core_is_small() -> None:
    lines = count_lines(package(), "frame.core")
    assert lines <= CORE, f"frame/core has {lines} lines, {CORE} is the cap: move what the core does not call to a room beside it"
    assert count_lines([module("a\nb\n", "frame.core.one"), module("c\n", "frame.corel")], "frame.core") == 2


def full_folders(paths: Iterable[str]) -> list[str]:
    """Folders with too many modules."""
    counts = Counter(path.rpartition("/")[0] for path in paths if not path.endswith("/__init__.py"))
    return [f"{folder} has {count} modules, {FOLDER} is the cap" for folder, count in counts.items() if count > FOLDER]


def test_folders_are_small() -> None:
    paths = [found.path for found in package()]
    assert full_folders(path for path in paths if path.rpartition("/")[0] not in FAMILIES) == []
    assert full_folders(f"frame/a/{number}.py" for number in range(16)) == ["frame/a has 16 modules, 15 is the cap"]
