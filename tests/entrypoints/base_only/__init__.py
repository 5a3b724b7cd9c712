"""Servers as if nothing but the base installation were there, so that tests see what a plain `pip install` serves. No network."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

OURS = "frame-serve"
ROOT = Path(__file__).parents[3]


def environment() -> dict[str, str]:
    """What to add to a Python process's environment."""
    folders = [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    kept = base_distributions()
    given = {"distributions": sorted(kept), "modules": hidden_modules(kept)}
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "FRAME_TEST_BASE_ONLY": json.dumps(given)}


def base_distributions() -> set[str]:
    """The closure of the project's own dependencies, without extras; names are normalised. The project file counts, not what an
    installed copy of it says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, todo = {OURS}, [Requirement(line) for line in project["dependencies"]]
    seen: set[str] = set()
    while todo:
        wanted = todo.pop()
        if str(wanted) in seen or not _applies(wanted, [""]):
            continue
        seen.add(str(wanted))
        try:
            lines = metadata.requires(wanted.name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(_normalised(wanted.name))
        extras = ["", *wanted.extras]
        todo += [requirement for requirement in map(Requirement, lines) if _applies(requirement, extras)]
    return found


def hidden_modules(kept: set[str]) -> list[str]:
    """Top-level modules that only other distributions give."""
    owners = metadata.packages_distributions()
    return sorted(module for module, names in owners.items() if not any(_normalised(name) in kept for name in names))


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
