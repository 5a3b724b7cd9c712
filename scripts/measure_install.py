"""Measures the base installation: the size of the distributions that frame requires without extras,
as they are installed beside this interpreter.

    python scripts/measure_install.py [--max-mb N]

Fails above N, and if one is not installed. Reads the requirements of frame from pyproject.toml, and
those of other distributions from their metadata.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def measure(requirements: Sequence[str]) -> dict[str, int]:
    """The bytes of each distribution that `requirements` bring, by name, compiled modules included.
    Raises PackageNotFoundError if one is not installed."""
    sizes: dict[str, int] = {}
    waiting = [Requirement(each) for each in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not is_needed or (name, extras) in seen:
            continue
        seen.add((name, extras))
        found = distribution(name)
        if name not in sizes:
            files = [Path(str(found.locate_file(each))) for each in found.files or ()]
            sizes[name] = sum(file.stat().st_size for file in files if file.is_file())
        for text in found.requires or ():
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                inner.marker = None
                waiting.append(inner)
    return sizes


def read_requirements(root: Path = ROOT) -> list[str]:
    """The requirements of frame without extras."""
    return list(tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"])


def format_sizes(sizes: Mapping[str, int]) -> str:
    """The distributions of more than 5 MB, and the sum of all."""
    rows = [(name, size) for name, size in sorted(sizes.items(), key=lambda row: -row[1]) if size > 5e6]
    rows.append((f"{len(sizes)} distributions", sum(sizes.values())))
    return "\n".join(f"{size / 1e6:8.0f} MB  {name}" for name, size in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-mb", type=int, help="fail above this size")
    limit = parser.parse_args(arguments).max_mb
    try:
        sizes = measure(read_requirements())
    except PackageNotFoundError as error:
        print(f"{error.name} is not installed; run pip install .")
        return 1
    print(format_sizes(sizes))
    if limit is not None and sum(sizes.values()) > limit * 1e6:
        print(f"The base installation exceeds {limit} MB: make the largest of these an extra.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
