"""Fixtures of the page's tests, which modules of this folder share."""

from __future__ import annotations

from tests.entrypoints.http.operations.chromium import browser, page, page_server

__all__ = ["browser", "page", "page_server"]
