"""`package_version`: the version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """The version; "unknown" where the package is not installed."""
    try:
        return version("frame-serve")
    except PackageNotFoundError:
        return "unknown"
