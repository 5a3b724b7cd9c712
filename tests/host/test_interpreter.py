"""The import path of child processes and of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from frame.host import interpreter
from frame.host.interpreter import child_environment, python_command

LEAVE = f"import runpy; runpy.run_path({interpreter.__file__!r})['leave_working_folder']()\n"
SHOW = "import os, sys; print([sys.path[:2], os.environ['PYTHONPATH'], os.environ['PYTHONSAFEPATH']])"


def run(folder: Path, command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("path", "expected"),
    [("", []), (":", []), (":/x::/y:", ["/x", "/y"]), (".:/x", ["FOLDER", "/x"])],
    ids=["unset", "empty", "among others", "named"],
)
def test_children_import_only_from_named_folders(path: str, expected: list[str], tmp_path: Path) -> None:
    code = "import sys; print(*(each for each in sys.path if not each.startswith(sys.base_prefix) and 'site-packages' not in each))"
    environment = child_environment({"PYTHONPATH": path})
    imported = run(tmp_path, [*python_command("-S", "-c", code)], environment).split()
    assert [each.replace(str(tmp_path), "FOLDER") for each in imported] == expected


def test_children_of_children_have_a_safe_path(tmp_path: Path) -> None:
    code = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'import sys; print(sys.flags.safe_path)'])"
    assert run(tmp_path, python_command("-c", code), child_environment()) == "True"


@pytest.mark.parametrize("path", [":/x", ".:/x", "/x"])
def test_a_script_leaves_its_folder_and_that_of_an_empty_element(path: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "bin/frame", tmp_path / "here"
    script.parent.mkdir()
    folder.mkdir()
    script.write_text(LEAVE + SHOW)
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("PYTHONSAFEPATH", None)
    first = [str(folder), "/x"] if path.startswith(".") else ["/x"]
    said = run(folder, [sys.executable, str(script)], environment)
    assert said.startswith(str([first])[:-2])
    assert said.endswith(f"'{path.lstrip(':')}', '1']")
    assert str(script.parent) not in said
