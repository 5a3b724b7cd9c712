"""The package's source as the architecture tests see it: one `Module` a file, with its imports
sorted by when they happen.

Checkers are functions from modules to sentences; each test file shows on a small bad source that
its checkers can fail.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "frame"
EXTENSIONS = ROOT / "packages"  # distributions of their own, each with one import package and its tests
NOT_OURS = ("frame/entrypoints/tools/scaffold/templates/",)  # text that `frame plugins new` fills in

When = Literal["start", "call", "types"]  # at import, inside a function, for the type checker only


@dataclass(frozen=True)
class Import:
    """`import a.b` and `from a import b` both give `a.b`; the second may name a module or a thing
    in a module."""

    target: str
    when: When
    line: int


@dataclass(frozen=True)
class Module:
    """A source file: dotted `name`, `path` relative to the repository, text."""

    name: str
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self.tree.body, self.name, self.path.endswith("__init__.py"), "start"))

    @property
    def num_lines(self) -> int:
        return self.text.count("\n") + (not self.text.endswith("\n"))

    def at(self, node: ast.AST | int) -> str:
        """`path:line`, for messages."""
        return f"{self.path}:{node if isinstance(node, int) else getattr(node, 'lineno', 1)}"


def module(text: str, name: str = "frame.core.example", path: str | None = None) -> Module:
    """A module made of a string, for showing that a checker can fail."""
    return Module(name, path or name.replace(".", "/") + ".py", text)


@lru_cache(maxsize=1)
def package() -> tuple[Module, ...]:
    """Every module of frame and of the distributions in `packages/`."""
    extensions = [(path, folder) for folder in sorted(EXTENSIONS.glob("*/")) for path in sorted(folder.glob("frame_*/**/*.py"))]
    own = tuple(_read(path) for path in sorted(PACKAGE.rglob("*.py")) if not _is_foreign(path))
    return own + tuple(_read(path, folder) for path, folder in extensions)


def _is_foreign(path: Path) -> bool:
    return path.relative_to(ROOT).as_posix().startswith(NOT_OURS)


def _read(path: Path, folder: Path = ROOT) -> Module:
    """`folder` holds the import package."""
    parts = path.relative_to(folder).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path.relative_to(ROOT).as_posix(), path.read_text())


def _imports(body: list[ast.stmt], name: str, is_package: bool, when: When) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, when, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, name, is_package)
            yield from (Import(f"{base}.{alias.name}" if base else alias.name, when, node.lineno) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.body, name, is_package, "types")
            yield from _imports(node.orelse, name, is_package, when)
        else:
            inner: When = "call" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and when == "start" else when
            for block in _blocks(node):
                yield from _imports(block, name, is_package, inner)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def _absolute(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def walk(tree: ast.AST) -> Iterable[ast.AST]:
    """`ast.walk`, once for each module: most checkers go through all."""
    if not isinstance(tree, ast.Module):
        return ast.walk(tree)
    if "nodes" not in vars(tree):
        vars(tree)["nodes"] = tuple(ast.walk(tree))
    nodes: tuple[ast.AST, ...] = vars(tree)["nodes"]
    return nodes


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    yield from (node for node in walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    yield from (node for node in walk(tree) if isinstance(node, ast.ClassDef))


def has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return ast.get_docstring(node) is not None


def is_under(name: str, *prefixes: str) -> bool:
    """Whether the dotted name is one of the prefixes or lies below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
