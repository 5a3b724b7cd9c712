"""The names that benchmarks, scripts, examples and GPU tests import from frame exist. Type checks
and CI do not run these files."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.architecture.source import ROOT, Module, module, package, walk

FOLDERS = ("benchmarks", "scripts", "examples", "tests/gpu")


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Names bound in a module: definitions, imports and assignments, not those inside functions."""
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def missing_imports(files: Iterable[Module], names: Mapping[str, set[str]]) -> list[str]:
    """`names`: those of each module."""
    return [
        f"{file.at(each.line)}: {each.target}"
        for file in files
        for each in file.imports
        if each.target.startswith("frame.") and each.target not in names and not is_defined(each.target, names)
    ]


def is_defined(target: str, names: Mapping[str, set[str]]) -> bool:
    home, _, name = target.rpartition(".")
    return bool(names.get(home, set()) & {name, "__getattr__"})


def read(path: Path) -> Module:
    return module(path.read_text(), path.stem, path.relative_to(ROOT).as_posix())


def test_scripts_import_what_exists() -> None:
    names = {each.name: set(defined_names(each.tree)) for each in package()}
    files = [read(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert missing_imports(files, names) == []


def test_missing_imports_finds() -> None:
    names = {"frame.core": set[str](), "frame.core.engine": {"Engine"}}
    assert missing_imports([module("from frame.core.engine import Engine\nfrom frame.core import engine")], names) == []
    assert missing_imports([module("from frame.core.engine import Motor")], names)
    assert missing_imports([module("def f():\n    import frame.core.motor")], names)
