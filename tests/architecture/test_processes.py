"""Every process is started with a safe path: Python's command comes from `python_command`, the
environment from `child_environment`, and nothing is added to the import path."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.architecture.source import Module, module, package, walk

SEAM = "frame/host/interpreter.py"
STARTS = {"subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
STARTS |= {"asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "os.posix_spawn", "os.posix_spawnp"}
GROWING = {"sys.path.append", "sys.path.insert", "sys.path.extend", "site.addsitedir"}

# path -> why it may name the interpreter.
EXCEPTIONS = {
    "frame/host/installation.py": "prints a command for the user's shell",
    "frame/plugins/launchers/rendezvous.py": "replaces this host's interpreter in a command by a placeholder",
    "frame/plugins/launchers/rendezvous_node.py": "replaces the placeholder by this host's interpreter",
}


def unsafe_starts(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """(path, sentence) of each use that bypasses the seam."""
    for found in modules:
        if found.path == SEAM:
            continue
        lines = [use.line for use in found.imports if use.target == "sys.executable"]
        lines += [node.lineno for node in walk(found.tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"]
        yield from ((found.path, f"{found.at(line)}: use python_command of {SEAM}") for line in lines)
        for use in found.imports:
            if use.target in STARTS:
                yield found.path, f"{found.at(use.line)}: import the module, so that its calls are seen"
        for node in walk(found.tree):
            if isinstance(node, ast.Call) and (problem := _describe_problem(node)):
                yield found.path, f"{found.at(node)}: {problem}"


def _describe_problem(node: ast.Call) -> str | None:
    name = ast.unparse(node.func)
    environment = next((ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "env"), "")
    if (name in STARTS or name.startswith(("os.exec", "os.spawn"))) and not environment.startswith("child_environment("):
        return f"{name} needs env=child_environment(…)"
    return f"{name} makes a folder importable" if name in GROWING else None


def test_processes_start_with_a_safe_path() -> None:
    assert [sentence for path, sentence in unsafe_starts(package()) if path not in EXCEPTIONS] == []


def test_exceptions_are_needed() -> None:
    assert {path for path, _ in unsafe_starts(package())} == {*EXCEPTIONS}


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nprint(sys.executable)",
        "from sys import executable",
        "subprocess.run(['ls'])",
        "subprocess.Popen(python_command('-m', 'x'), env=os.environ)",
        "os.execv('x', [])",
        "sys.path.insert(0, '')",
        "from subprocess import Popen",
    ],
)
def test_check_finds(text: str) -> None:
    assert list(unsafe_starts([module(text)]))


def test_check_allows() -> None:
    assert not list(unsafe_starts([module("subprocess.run(python_command('-m', 'x'), env=child_environment({'A': 'b'}))")]))
