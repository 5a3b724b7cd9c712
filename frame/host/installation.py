"""Commands that install a missing package, for the sentences that name it; and which modules of
frame this installation has, for the tables that name them.

Used by every part that reports one. Must not import the package, or know who needs it.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Our packages in the folder `packages` of the repository.
IN_TREE_PACKAGES = ("frame-automata", "frame-bitsandbytes", "frame-gguf", "frame-quantize", "frame-ray", "frame-x86")
_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds the package `frame`
_PACKAGES = _ROOT / "packages"  # of the clone that this module runs from, if any
_CPU = Path("/proc/cpuinfo")  # of Linux


def install_command(*requirements: str, packages: Path = _PACKAGES) -> str:
    """The shell command that installs `requirements` (`xgrammar>=0.2`, `frame-gguf`) beside this
    interpreter. For a package of ours in a clone of frame: its folder below `packages`. Without a
    clone: both forms, the one from a package index first.
    """
    pip = "pip" if _is_pip_of_interpreter(shutil.which("pip")) else f"{shlex.quote(sys.executable)} -m pip"
    command = f"{pip} install {shlex.join(requirements)}"
    name = requirements[0]
    if name not in IN_TREE_PACKAGES:
        return command
    if (packages / name / "pyproject.toml").is_file():
        here = packages.parent == Path.cwd()
        return f"{pip} install {f'./packages/{name}' if here else shlex.quote(str(packages / name))}"
    return f"{command}, or {pip} install ./packages/{name} in a clone of frame"


def has_module(name: str) -> bool:
    """Whether this installation has a module of frame, such as "frame.entrypoints.router". Imports
    nothing. Tables of commands and APIs leave out those whose module is deleted."""
    path = _ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def describe_gguf() -> str:
    """The command that installs the package that reads GGUF files, as the end of a sentence; empty
    if it is installed."""
    return "" if is_installed("frame-gguf") else f", and install the package frame-gguf: {install_command('frame-gguf')}"


def suggest_cpu_kernels() -> str | None:
    """What a server in bfloat16 on this CPU would gain by frame-x86, with the command that installs
    it; None if it is installed or cannot run here."""
    if is_installed("frame-x86") or not _CPU.is_file() or "avx2" not in _CPU.read_text().split():
        return None
    command = install_command("frame-x86")
    return f"products in bfloat16, int8 and int4 take 1.6 to 10 times as long as with frame-x86, which is not installed: {command}"


def _is_pip_of_interpreter(path: str | None) -> bool:
    """Whether the `pip` at `path` installs for this interpreter. The folders are compared, because
    the interpreter of a virtual environment is a link."""
    return path is not None and Path(path).parent.samefile(Path(sys.executable).parent)
