"""Fixtures of the page's tests, shared by the modules of this folder."""

from __future__ import annotations

from tests.entrypoints.http.operations.chromium import browser, page, page_server

__all__ = ["browser", "page", "page_server"]
