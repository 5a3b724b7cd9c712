"""The page at `/`: its files and data over HTTP, and the page itself in headless Chromium, which
must be installed (`chromium` on PATH)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.entrypoints.serving import RunningServer, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
QUESTION = "Reverse this list:\nriver,stone,moon,tree"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(Path("frame-tiny"), "--max-total-tokens", "8192", "--page-size", "16", fake=False) as running:
        yield running


def test_files_need_nothing_from_elsewhere(server: RunningServer) -> None:
    page = httpx.get(server.url + "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in ("page.js", "chat.js", "live.js", "cache.js", "about.js", "elements.js", "page.css", "icon.svg"):
        found = httpx.get(f"{server.url}/page/{name}")
        assert found.status_code == 200, name
        assert "http://" not in found.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in found.text
        assert httpx.get(f"{server.url}/page/{name}", headers={"if-none-match": found.headers["etag"]}).status_code == 304
    for wrong in ("/page/none.js", "/page/..%2fpage.py", "/page/page.py"):
        assert httpx.get(server.url + wrong).status_code == (400 if "%2f" in wrong else 404)


def test_the_data_say_what_runs_and_why(server: RunningServer) -> None:
    about = server.get("/page/about.json")
    chosen = {(plugin["kind"], plugin["name"]) for plugin in about["plugins"] if plugin["is_chosen"]}
    assert ("attention_backend", "torch_native") in chosen
    triton = next(plugin for plugin in about["plugins"] if (plugin["kind"], plugin["name"]) == ("attention_backend", "triton"))
    assert "cuda" in triton["rejected"][0]
    settings = {setting["key"]: setting for setting in about["settings"]}
    assert settings["cache.page_size"]["source"] == "flag --page-size"
    assert settings["attention.backend"]["reason"]


@pytest.fixture(scope="module")
def keyed(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, "--api-key", "secret") as running:
        yield running


def test_holders_of_keys_see_neither_prompts_nor_settings(keyed: RunningServer) -> None:
    assert httpx.get(keyed.url + "/").status_code == 200
    assert httpx.get(keyed.url + "/page/page.js").status_code == 200
    for name in ("live", "cache", "about"):
        assert httpx.get(f"{keyed.url}/page/{name}.json").status_code == 401
    headers = {"authorization": "Bearer secret"}
    body = {"text": "a prompt of one tenant only " * 10, "sampling_params": {"max_new_tokens": 2}}
    assert httpx.post(keyed.url + "/generate", json=body, headers=headers).status_code == 200
    runs = httpx.get(keyed.url + "/page/cache.json", headers=headers).json()["runs"]
    assert runs
    assert {run["text"] for run in runs} == {""}
    assert httpx.get(keyed.url + "/page/about.json", headers=headers).json()["settings"] == []


# in a browser -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed; the page's tests need it (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    """The page, which may neither fail nor ask another host."""
    context = browser.new_context()
    found = context.new_page()
    found.set_default_timeout(30_000)
    expect.set_options(timeout=30_000)
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    found.on("request", lambda request: None if request.url.startswith(server.url) else problems.append(request.url))
    found.goto(server.url)
    yield found
    context.close()
    assert problems == []


def test_a_chat_and_what_it_leaves(page: Page) -> None:
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    expect(page.locator(".message.assistant .text")).to_have_text("tree,moon,stone,river")
    expect(page.locator(".facts")).to_contain_text("to the first token")
    page.click("nav a[href='#live']")
    expect(page.locator(".tile", has_text="requests finished").locator("b")).not_to_have_text("0")
    expect(page.locator(".plot")).to_have_count(4)
    page.click("nav a[href='#cache']")
    expect(page.locator("#tree rect").first).to_be_visible()
    page.locator("#tree rect").first.hover()
    expect(page.locator(".tip")).to_contain_text("tokens 0 to")
    assert page.evaluate("[...document.querySelectorAll('#tree rect')].every((r) => r.width.baseVal.value > 0)")


def test_a_narrow_window_has_room_for_what_matters(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.click("nav a[href='#config']")
    expect(page.locator("#settings tbody tr").first).to_be_visible()
    page.evaluate("scrollTo(0, 2000)")
    page.click("nav a[href='#plugins']")
    expect(page.locator(".plugin").first).to_be_visible()
    assert page.evaluate("scrollY") == 0  # a view begins at its top
    assert page.evaluate("document.querySelector('header').offsetHeight") < 100
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_stopping_an_answer_stops_the_work(page: Page, server: RunningServer) -> None:
    page.fill("#max-tokens", "4000")
    page.fill("#prompt", "def walk(tree):\n" * 40)
    page.evaluate("document.getElementById('temperature').value = 2")
    page.click("#send")
    expect(page.locator("#stop")).to_be_visible()
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    wait_until(lambda: server.get("/page/live.json")["outstanding"] == 0)


def test_plugins_and_settings_are_shown(page: Page) -> None:
    page.click("nav a[href='#plugins']")
    expect(page.locator(".plugin.chosen", has_text="torch_native").first).to_be_visible()
    expect(page.locator(".plugin", has_text="triton").locator(".why").first).to_contain_text("cuda")
    page.click("nav a[href='#config']")
    page.fill("#find", "page_size")
    expect(page.locator("#settings tbody tr:visible")).to_have_count(1)
    expect(page.locator("#settings tbody tr:visible")).to_contain_text("flag --page-size")


def test_markup_in_an_answer_is_text(page: Page) -> None:
    reply = _stream("<img src=x onerror=alert(1)>")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=reply))
    page.fill("#prompt", "hello")
    page.click("#send")
    expect(page.locator(".message.assistant .text")).to_have_text("<img src=x onerror=alert(1)>")
    assert page.locator(".message img").count() == 0


def _stream(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\ndata: [DONE]\n\n"


def test_a_key_is_asked_for(browser: Browser, keyed: RunningServer) -> None:
    page = browser.new_page()
    page.set_default_timeout(30_000)
    page.goto(keyed.url)
    expect(page.locator("#key-form")).to_be_visible()
    page.fill("#key", "secret")
    page.click("#key-form button")
    expect(page.locator("#status.well")).to_be_visible()
    expect(page.locator("#key-form")).to_be_hidden()
    page.click("nav a[href='#config']")
    expect(page.locator("#no-settings")).to_be_visible()
    page.close()
