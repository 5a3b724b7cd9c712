"""Runs a benchmark on a machine without a network and without an installation of frame:
`prepare()`, called before frame is imported, installs wheels of a folder and starts the program
again with them.

Used by two_cards.py and latency_target.py. Does nothing where frame is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS = (ROOT / ".whl", ROOT / ".gpu/wheels")
NAME = "frame-serve"
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}  # multicast may hang a host


def prepare(folders: Iterable[Path] = WHEELS) -> None:
    """Make frame importable with its entry points; returns in the process that has them."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        distribution(NAME)
    except PackageNotFoundError:
        site = Path(tempfile.mkdtemp(prefix="frame-site-"))
        if wheels := [str(wheel) for folder in folders for wheel in sorted(folder.glob("*.whl"))]:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
            subprocess.run([*command, "--target", str(site), *wheels], check=True)
        write_metadata(site)
        paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def write_metadata(site: Path) -> None:
    """The entry points of frame, as an installation of this checkout would write them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = site / f"frame_serve-{project['version']}.dist-info"
    folder.mkdir()
    needs = "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {project['version']}\n{needs}")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in names.items()) for group, names in project["entry-points"].items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    (folder / "RECORD").write_text("")
