"""`keep_metadata`: the metadata of an installed distribution is parsed once.
`hide_distribution`: one seems not to be installed.

Every reading of all plugins parses that of thirty, a third of its time, and the tests read plugins
hundreds of times. Used by the tests' conftest and by the fork server.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from importlib.metadata import PackageMetadata, PathDistribution
from typing import Any


def keep_metadata() -> None:
    parse: Any = PathDistribution.metadata.fget  # type: ignore[attr-defined]

    @cache
    def read(path: Any, changed: int) -> PackageMetadata:
        found: PackageMetadata = parse(PathDistribution(path))
        return found

    def metadata(distribution: PathDistribution) -> PackageMetadata:
        path: Any = distribution._path
        try:
            return read(path, path.stat().st_mtime_ns)
        except (AttributeError, OSError):  # in an archive, or partly removed
            found: PackageMetadata = parse(distribution)
            return found

    PathDistribution.metadata = property(metadata)  # type: ignore[assignment, misc]


def hide_distribution(monkeypatch: Any, hidden: str) -> None:
    """Let no version of the distribution be installed."""
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == hidden:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
