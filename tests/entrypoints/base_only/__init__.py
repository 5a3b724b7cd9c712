"""Servers as if nothing but the base installation were there, so that tests see what a plain `pip
install` serves. No network."""

from __future__ import annotations

import functools
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
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "FRAME_TEST_BASE_ONLY": _describe_base()}


@functools.cache
def _describe_base() -> str:
    """The names of all files of all distributions are read for it, once for all servers."""
    kept = base_distributions()
    return json.dumps({"distributions": sorted(kept), "modules": hidden_modules(kept)})


def base_distributions() -> set[str]:
    """The closure of the project's own dependencies, without extras; names are normalised. The
    project file counts, not what an installed copy of it says."""
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
    """Modules that only other distributions provide: top-level ones, and packages within a shared
    namespace."""
    top: dict[str, bool] = {}  # module -> whether a distribution of the base installation provides it
    nested: dict[str, bool] = {}
    for found in metadata.distributions():
        is_kept = _normalised(found.metadata["Name"]) in kept
        for file in found.files or ():
            if file.suffix in (".py", ".so") and ".." not in file.parts:
                first = file.parts[0].partition(".")[0]
                top[first] = top.get(first, False) or is_kept
                if len(file.parts) > 2:
                    name = ".".join(file.parts[:2])
                    nested[name] = nested.get(name, False) or is_kept
    shared = {name for name in nested if top[name.partition(".")[0]]}
    return sorted([name for name in top if not top[name]] + [name for name in shared if not nested[name]])


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
