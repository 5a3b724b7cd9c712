"""Drops the parsed source at the end of the folder: millions of objects, which collections of other
tests would traverse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.architecture.source import package


@pytest.fixture(scope="package", autouse=True)
def _source() -> Iterator[None]:
    yield
    package.cache_clear()
