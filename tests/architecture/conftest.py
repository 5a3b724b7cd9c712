"""Drops the parsed source after the last test of the folder: millions of objects."""

from __future__ import annotations

import pytest

from tests.architecture.source import package


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and item.path.parent != nextitem.path.parent:
        package.cache_clear()
