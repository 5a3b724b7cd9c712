"""The reference of the building blocks of models, `frame.models.layers`, from their source and
docstrings. Imports none of them, so that it needs no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "frame/models/layers"
_OF_THE_LOADER = ("process_weights_after_loading", "release")  # methods that no model calls


def blocks() -> Iterator[tuple[str, str]]:
    """(name, Markdown) of each block, in the order of `__all__`."""
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            source = (ROOT / f"{node.module.replace('.', '/')}.py").read_text()
            members = {each.name: each for each in ast.parse(source).body if isinstance(each, ast.ClassDef | ast.FunctionDef)}
            found |= {alias.name: _describe(members[alias.name], source) for alias in node.names}
    yield from sorted(found.items())


def introduction() -> str:
    """What the package says of itself: the promise of stability."""
    return ast.get_docstring(ast.parse((ROOT / PACKAGE / "__init__.py").read_text())) or ""


def _describe(node: ast.ClassDef | ast.FunctionDef, source: str) -> str:
    parts = [f"```text\n{_signature(node, source)}\n```", ast.get_docstring(node) or ""]
    methods = []
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_") or method.name in _OF_THE_LOADER:
            continue
        if text := ast.get_docstring(method):
            methods.append(f"- `{method.name}({_arguments(method)})`: {' '.join(text.split())}")
    parts.append("\n".join(methods))
    return "\n\n".join(part for part in parts if part)


def _signature(node: ast.ClassDef | ast.FunctionDef, source: str) -> str:
    """A call; of a dataclass its fields, with their comments."""
    if isinstance(node, ast.FunctionDef):
        return f"{node.name}({_arguments(node)}) -> {ast.unparse(node.returns) if node.returns else 'None'}"
    made = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if made is not None:
        return f"{node.name}({_arguments(made)})"
    lines = source.splitlines()
    fields = [lines[each.lineno - 1 : each.end_lineno] for each in node.body if isinstance(each, ast.AnnAssign)]
    if fields:
        return "\n".join([f"@dataclass\nclass {node.name}:", *(line for each in fields for line in each)])
    bases = ", ".join(map(ast.unparse, node.bases))
    return f"class {node.name}({bases})"


def _arguments(function: ast.FunctionDef) -> str:
    given = function.args
    given.args = [each for each in given.args if each.arg != "self"]
    return ast.unparse(given)
