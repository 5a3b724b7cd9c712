"""Checks of every view of the page: accessibility by axe-core, pictures under load, and what ten
open pages cost the server.

`make test-page` fetches axe-core and names the folder of the pictures (`FRAME_SCREENSHOTS`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.entrypoints.http.operations.chromium import SCREENSHOTS, VIEWS, keep_picture, opened, show
from tests.entrypoints.serving import RunningServer, wait_until

ROOT = Path(__file__).parents[4]
AXE = Path(os.environ.get("FRAME_AXE", ROOT / "build/page/node_modules/axe-core/axe.min.js"))
STREAMS = 64
PAGES = 10
SECONDS = 30.0
MAX_SHARE = 0.02  # of a core
WORDS = ["river", "stone", "moon", "tree", "cloud", "sand", "leaf", "rock", "wind", "field"]


@contextmanager
def streaming(server: RunningServer, count: int) -> Iterator[None]:
    """So many clients, each of which sends one streamed request after another."""
    ends = threading.Event()

    def run(number: int) -> None:
        with httpx.Client(timeout=300) as client:
            while not ends.is_set():
                words = " ".join(WORDS[(number + place) % len(WORDS)] for place in range(10 + 7 * (number % 40)))
                shape = {"response_format": {"type": "json_object"}} if number % 16 == 0 else {"ignore_eos": True}
                body = {"messages": [{"role": "user", "content": f"Reverse this list:\n{words}"}], "max_tokens": 100 + 10 * (number % 30)}
                with client.stream("POST", server.url + "/v1/chat/completions", json={**body, **shape, "stream": True}) as response:
                    for _ in response.iter_lines():
                        if ends.is_set():
                            break

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join(60)


def compare(page: Page) -> Page:
    """Ask with two settings, and wait for the answers, whose tokens have colours."""
    page.evaluate("document.getElementById('chat-settings').open = true")
    page.check("#compare")
    page.fill("#temperature-b", "1.5")
    page.fill("#max-tokens", "40")
    page.fill("#max-tokens-b", "40")
    page.fill("#prompt", "def add(a, b):")
    page.press("#prompt", "Enter")
    for place in range(2):
        expect(page.locator(".facts").nth(place)).to_contain_text("tokens", timeout=240_000)
    return page


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 390)])
def test_axe_finds_nothing(page: Page, scheme: str, width: int) -> None:
    if not AXE.is_file():
        pytest.skip(f"{AXE} is missing; make test-page fetches axe-core")
    answered = compare(page)
    answered.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    answered.set_viewport_size({"width": width, "height": 900})
    answered.evaluate(AXE.read_text())  # by the debugger, which the content security policy does not bind
    problems = []
    for view in VIEWS:
        show(answered, view)
        if view == "plugins":
            answered.locator("summary:visible").first.click()
        if view == "live":
            expect(answered.locator("#replicas table").first).to_be_visible()
        found = answered.evaluate("axe.run({ resultTypes: ['violations'] })")
        problems += [f"{view}: {each['id']}: {node['html'][:150]}" for each in found["violations"] for node in each["nodes"]]
    assert problems == []


@pytest.mark.soak
def test_pictures_of_all_views_under_load(browser: Browser) -> None:
    if SCREENSHOTS is None:
        pytest.skip("FRAME_SCREENSHOTS names no folder; make test-page does")
    flags = ("--max-total-tokens", "32768", "--max-running-requests", "60")
    with RunningServer(Path("frame-tiny"), *flags, fake=False) as server, streaming(server, STREAMS):
        wait_until(lambda: len(server.get("/page/history.json")["rows"]) >= 6, timeout=120)
        for width, height in ((1440, 900), (390, 844)):
            with opened(browser, server.url, viewport={"width": width, "height": height}) as (_, page):
                expect(page.locator("#status.well, #status.ill")).to_be_visible()
                for view in VIEWS:
                    show(page, view)
                    if view == "chat":
                        compare(page).locator(".text").last.focus()
                        page.keyboard.press("ArrowRight")
                        page.evaluate(f"document.getElementById('chat-settings').open = {'true' if width > 800 else 'false'}")
                    if view == "live":
                        expect(page.locator("#requests tbody tr").first).to_be_visible()
                    if view == "cache":
                        expect(page.locator("#tree rect").first).to_be_attached()
                    keep_picture(page, f"{view}-{width}", is_whole=view in ("live", "cache"))
                    assert page.evaluate("document.documentElement.scrollWidth") <= width, view


def measure(server: RunningServer, seconds: float) -> float:
    """Processor time of the server's processes over `seconds`, as a share of a core."""
    processes = [psutil.Process(server.process.pid), *server.children().values()]
    before, began = sum(sum(process.cpu_times()[:2]) for process in processes), time.monotonic()
    time.sleep(seconds)
    return (sum(sum(process.cpu_times()[:2]) for process in processes) - before) / (time.monotonic() - began)


@pytest.mark.soak
@pytest.mark.parametrize("view", ["live", "cache"])
def test_ten_open_pages_cost_little(browser: Browser, page_server: RunningServer, view: str) -> None:
    """While nothing else is done: under load, the noise of the load is larger than the pages."""
    without = measure(page_server, SECONDS)
    with ExitStack() as stack:
        for _ in range(PAGES):
            _, page = stack.enter_context(opened(browser, page_server.url))
            show(page, view)
        time.sleep(3)
        share = measure(page_server, SECONDS)
    print(f"{view}: {share:.2%} of a core with {PAGES} pages, {without:.2%} without")
    assert share - without <= MAX_SHARE
