"""Commands that install a missing package, for the sentences that name it.

Used by every part that reports one. Must not import the package, or know who needs it.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

# Our packages in the folder `packages` of the repository.
OWN_PACKAGES = ("frame-automata", "frame-bitsandbytes", "frame-gguf", "frame-quantize", "frame-ray", "frame-x86")
_PACKAGES = Path(__file__).resolve().parents[2] / "packages"  # of the clone that this module runs from, if any


def install_command(requirement: str, packages: Path = _PACKAGES) -> str:
    """The shell command that installs `requirement` (`xgrammar>=0.2`, `frame-gguf`) beside this
    interpreter. For a package of ours in a clone of frame: its folder below `packages`. Without a
    clone: both forms, the one from a package index first.
    """
    pip = "pip" if _is_own_pip(shutil.which("pip")) else f"{shlex.quote(sys.executable)} -m pip"
    command = f"{pip} install {shlex.quote(requirement)}"
    if (name := _read_name(requirement)) not in OWN_PACKAGES:
        return command
    if (packages / name / "pyproject.toml").is_file():
        here = packages.parent == Path.cwd()
        return f"{pip} install {f'./packages/{name}' if here else shlex.quote(str(packages / name))}"
    return f"{command}, or {pip} install ./packages/{name} in a clone of frame"


def _is_own_pip(path: str | None) -> bool:
    """Whether the `pip` at `path` installs for this interpreter. The folders are compared, because
    the interpreter of a virtual environment is a link."""
    return path is not None and Path(path).parent.samefile(Path(sys.executable).parent)


def _read_name(requirement: str) -> str:
    try:
        return Requirement(requirement).name
    except InvalidRequirement:
        return requirement
