"""The page in headless Chromium, which must be installed (`make test-page` does it): the browser, a
server with the embedded model, and a page that may neither fail nor ask another host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.entrypoints.serving import RunningServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
TIMEOUT = 60_000  # ms; a busy machine is slow
VIEWS = ("chat", "live", "cache", "plugins", "config")
SCREENSHOTS = os.environ.get("FRAME_SCREENSHOTS")  # a folder; unset: no pictures are kept


@pytest.fixture(scope="module")  # its event loop runs as long: asynchronous tests cannot
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed; the page's tests need it: make test-page")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture(scope="session")
def page_server() -> Iterator[RunningServer]:
    with RunningServer(Path("frame-tiny"), "--max-total-tokens", "8192", "--page-size", "16", fake=False) as running:
        yield running


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[tuple[BrowserContext, Page]]:
    """A page in a profile of its own. Afterwards no script may have failed, and no other host may
    have been asked."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(TIMEOUT)
    expect.set_options(timeout=TIMEOUT)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: None if request.url.startswith((url, f"blob:{url}")) else problems.append(request.url))
    page.goto(url)
    yield context, page
    context.close()
    assert problems == []


@pytest.fixture
def page(browser: Browser, page_server: RunningServer) -> Iterator[Page]:
    with opened(browser, page_server.url) as (_, found):
        yield found


def show(page: Page, view: str) -> None:
    page.click(f"nav a[href='#{view}']")
    expect(page.locator(f"#{view}")).to_be_visible()


def keep_picture(page: Page, name: str, *, is_whole: bool = False) -> None:
    """Write a picture of the page to the folder that `FRAME_SCREENSHOTS` names."""
    if SCREENSHOTS is not None:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=is_whole)
