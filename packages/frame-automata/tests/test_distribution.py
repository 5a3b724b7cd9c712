"""The wheels: frame's does not contain the automata, and this package's has its entry point."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


def build(folder: Path, target: Path) -> zipfile.ZipFile:
    done = subprocess.run([sys.executable, "-c", BUILD, target], cwd=folder, capture_output=True, text=True, timeout=500, check=True)
    return zipfile.ZipFile(target / done.stdout.split()[-1])


def test_frame_does_not_contain_the_package(tmp_path: Path) -> None:
    names = build(ROOT, tmp_path).namelist()
    assert "frame/plugins/grammar_backends/combined.py" in names
    assert all(name.startswith("frame/") or ".dist-info/" in name for name in names)
    assert [name for name in names if "automat" in name] == []


def test_the_package_brings_its_entry_point(tmp_path: Path) -> None:
    wheel = build(ROOT / "packages" / "frame-automata", tmp_path)
    entry_points = next(name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    assert "frame_automata/backend.py" in wheel.namelist()
    assert wheel.read(entry_points).decode().split() == ["[frame]", "automata", "=", "frame_automata"]
