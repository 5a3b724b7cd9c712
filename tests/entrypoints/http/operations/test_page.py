"""The page at `/`: its files and data over HTTP, and its views in headless Chromium."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.entrypoints.http.operations.chromium import VIEWS, opened, show
from tests.entrypoints.serving import RunningServer, wait_until

FILES = Path(__file__).parents[4] / "frame/entrypoints/http/operations/page_assets"


def test_files_need_nothing_from_elsewhere(page_server: RunningServer) -> None:
    found = httpx.get(page_server.url + "/")
    assert found.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in found.headers["content-security-policy"]
    for name in (path.name for path in FILES.iterdir()):
        found = httpx.get(f"{page_server.url}/page/{name}")
        assert found.status_code == 200, name
        assert "http://" not in found.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in found.text
        assert httpx.get(f"{page_server.url}/page/{name}", headers={"if-none-match": found.headers["etag"]}).status_code == 304
    for wrong in ("/page/none.js", "/page/..%2fpage.py", "/page/page.py"):
        assert httpx.get(page_server.url + wrong).status_code == (400 if "%2f" in wrong else 404)


def test_no_script_writes_markup() -> None:
    """What comes from requests and plugins is set as text."""
    for path in FILES.glob("*.js"):
        words = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", path.read_text())
        assert words == [], path.name


def test_the_data_say_what_runs_and_why(page_server: RunningServer) -> None:
    about = page_server.get("/page/about.json")
    chosen = {(plugin["kind"], plugin["name"]) for plugin in about["plugins"] if plugin["is_chosen"]}
    assert ("attention_backend", "torch_native") in chosen
    triton = next(plugin for plugin in about["plugins"] if (plugin["kind"], plugin["name"]) == ("attention_backend", "triton"))
    assert "cuda" in triton["rejected"][0]
    settings = {setting["key"]: setting for setting in about["settings"]}
    assert settings["cache.page_size"]["source"] == "flag --page-size"
    assert settings["attention.backend"]["reason"]


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    with RunningServer(Path("frame-tiny"), "--api-key", "secret") as running:
        yield running


def test_holders_of_keys_see_neither_prompts_nor_settings(keyed: RunningServer) -> None:
    assert httpx.get(keyed.url + "/").status_code == 200
    assert httpx.get(keyed.url + "/page/page.js").status_code == 200
    for name in ("live", "history", "cache", "about"):
        assert httpx.get(f"{keyed.url}/page/{name}.json").status_code == 401
    headers = {"authorization": "Bearer secret"}
    body = {"text": "a prompt of one tenant only " * 10, "sampling_params": {"max_new_tokens": 2}}
    assert httpx.post(keyed.url + "/generate", json=body, headers=headers).status_code == 200
    runs = httpx.get(keyed.url + "/page/cache.json", headers=headers).json()["runs"]
    assert runs
    assert {run["text"] for run in runs} == {run["tenant"] for run in runs} == {""}
    assert httpx.get(keyed.url + "/page/about.json", headers=headers).json()["settings"] == []


# in a browser -------------------------------------------------------------------------------------


def generate(server: RunningServer, text: str, tokens: int = 2, **more: Any) -> httpx.Response:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    return server.post("/generate", {"text": text, "sampling_params": sampling})


@pytest.mark.slow
def test_live_shows_each_request_with_its_phase(page: Page, page_server: RunningServer) -> None:
    show(page, "live")
    assert page_server.post("/pause_generation", {}).status_code == 200
    sender = threading.Thread(target=generate, args=(page_server, "def walk(tree):\n", 3))
    sender.start()
    try:
        row = page.locator("#requests tbody tr")
        expect(row).to_have_count(1)
        expect(row).to_contain_text("queued")
        expect(page.locator("#phases li", has_text="queued").locator("b")).to_have_text("1")
        expect(page.locator("#tenants tbody tr")).to_contain_text("requests without a tenant")
        expect(page.locator(".tile", has_text="waiting").locator("b")).to_have_text("1")
    finally:
        assert page_server.post("/continue_generation", {}).status_code == 200
        sender.join()
    expect(page.locator("#requests")).to_contain_text("No request is in the engine")
    expect(page.locator(".tile", has_text="requests finished").locator("b")).not_to_have_text("0")
    expect(page.locator(".tile", has_text="time to first token").locator("b")).to_contain_text(re.compile("m?s"))
    expect(page.locator("#replicas")).to_contain_text("engine")
    expect(page.locator("#speculation")).to_contain_text("No drafter runs")
    expect(page.locator("#experts")).to_contain_text("parallel.eplb")


@pytest.mark.slow
def test_a_reload_loses_no_history(page: Page, page_server: RunningServer) -> None:
    wait_until(lambda: len(page_server.get("/page/history.json")["rows"]) > 1, timeout=60)
    for _ in range(2):
        show(page, "live")
        plot = page.locator(".plot", has_text="KV cache, pages")
        expect(plot.locator("path").first).to_have_attribute("d", re.compile("L"))  # at once: a line needs two samples
        expect(plot.locator("svg")).to_have_attribute("aria-label", re.compile("KV cache, pages: now in use"))
        page.reload()
    show(page, "live")
    plot.locator("svg").hover()
    expect(page.locator(".tip")).to_contain_text("in use:")
    page.select_option("#range", "300")
    expect(page.locator(".plot:visible")).to_have_count(6)  # those of drafts and experts have nothing to show


@pytest.mark.slow
def test_alerts_drafts_experts_and_replicas_of_a_larger_server(page: Page) -> None:
    """What the embedded model on one CPU has not, as the server would tell it."""

    def tell(route: Any) -> None:
        state = route.fetch().json()
        drafts = {"num_drafts": 100, "drafted_tokens": 300, "accepted_tokens": 150, "accepted_at": [90, 50, 10]}
        state["load"] = {**state["load"], **drafts}
        state["alerts"] = [{"rule": "queue", "level": "critical", "text": "The queue <b>grows</b>."}]
        state["tenants"] = [{"tenant": "<i>alice</i>", "running": 2, "waiting": 1, "pages": 128}]
        state["replicas"] = [{"state": None, "load": state["load"]}, {"state": "the engine is being restarted", "load": None}]
        state["processes"] = [{"process": "engine", "memory": 3 << 30, "device_memory": 40 << 30, "restarts": 2}]
        route.fulfill(json={**state, "drafter": "ngram", "expert_imbalance": [1.25, 1.75]})

    page.route("**/page/live.json", tell)
    show(page, "live")
    expect(page.locator("#alerts li.critical")).to_have_text("Critical: The queue <b>grows</b>.")
    expect(page.locator("#status-text")).to_contain_text("The queue <b>grows</b>.")
    expect(page.locator("#tenants tbody tr")).to_contain_text("<i>alice</i>")
    expect(page.locator("#speculation")).to_contain_text("50 % of 300 drafted tokens were accepted, 2.50 tokens a step")
    expect(page.locator("#speculation tbody tr")).to_have_text(["token 190 %", "token 250 %", "token 310 %"])
    expect(page.locator("#experts")).to_contain_text("1.50 times the mean of tokens, in the worst layer 1.75 times")
    expect(page.locator("#replicas")).to_contain_text("the engine is being restarted")
    expect(page.locator("#replicas")).to_contain_text("40.0 GiB")


def test_the_cache_is_searched_sorted_and_cut(page: Page, page_server: RunningServer) -> None:
    shared = "the quick brown fox jumps over the lazy dog " * 4
    for text in (shared + "and sleeps " * 12, shared + "and runs away " * 12, "river stone moon " * 20):
        assert generate(page_server, text).status_code == 200
    show(page, "cache")
    bars = page.locator("#tree rect")
    expect(bars.nth(3)).to_be_attached()
    everything = bars.count()
    page.fill("#cache-find", "RIVER STONE")
    expect(page.locator("#cache-summary")).to_contain_text("1 run shown")
    page.locator("#tree").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".tip")).to_contain_text("river stone moon")
    page.keyboard.press("Escape")
    expect(page.locator(".tip")).to_be_hidden()
    page.fill("#cache-find", "in no prompt")
    expect(page.locator("#cache-summary")).to_have_text("No cached run matches.")
    page.fill("#cache-find", "")
    page.select_option("#cache-depth", "1")
    expect(bars.nth(everything - 1)).not_to_be_attached()
    page.select_option("#cache-depth", "0")
    expect(bars).to_have_count(everything)
    page.select_option("#cache-sort", "tokens")
    bars = "[...document.querySelectorAll('#tree rect')].map((bar) => [bar.y, bar.x, bar.width].map((each) => each.baseVal.value))"
    boxes = page.evaluate(bars)
    longest, first = (max(left + width for top, left, width in boxes if top < below) for below in (1e9, 30))
    assert first >= longest - 1  # the first row leads to the end of the longest prompt
    page.locator("#tree rect").first.hover()
    expect(page.locator(".tip")).to_contain_text("tokens 0 to")
    expect(page.locator("#cache-tenants tbody tr")).to_contain_text("without a tenant")


def test_plugins_that_run_come_first_and_reasons_are_folded(page: Page) -> None:
    show(page, "plugins")
    kind = page.locator(".kind", has=page.locator("h2", has_text=re.compile("^attention backend$")))
    expect(kind.locator(".plugin").first).to_have_class(re.compile("chosen"))
    reason = kind.locator(".plugin", has=page.locator("strong", has_text=re.compile("^triton$"))).locator(".why").first
    expect(reason).to_be_hidden()
    kind.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(reason).to_contain_text("cuda")
    page.fill("#plugin-find", "radix")
    expect(page.locator(".kind:visible")).to_have_count(1)
    page.fill("#plugin-find", "")
    page.check("#only-chosen")
    expect(page.locator(".plugin:visible:not(.chosen)")).to_have_count(0)
    expect(page.locator("#plugin-summary")).to_contain_text("run.")
    show(page, "config")
    page.fill("#find", "page_size")
    expect(page.locator("#settings tbody tr:visible")).to_have_count(1)
    expect(page.locator("#settings tbody tr:visible")).to_contain_text("flag --page-size")


def test_a_phone_has_room_for_what_matters(browser: Browser, page_server: RunningServer) -> None:
    with opened(browser, page_server.url, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True) as (_, page):
        for view in VIEWS:
            show(page, view)
            assert page.evaluate("scrollY") == 0  # a view begins at its top
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
            page.evaluate("scrollTo(0, 2000)")
        assert page.evaluate("document.querySelector('header').offsetHeight") < 100
        show(page, "chat")
        box = page.locator("#prompt").bounding_box()
        assert box is not None and box["y"] + box["height"] <= 844  # the message field is on the first screen


def test_the_keyboard_alone_reaches_all_views(page: Page) -> None:
    expect(page.locator("#status.well, #status.ill")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator("#skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    for view in VIEWS:
        page.locator(f"nav a[href='#{view}']").focus()
        page.keyboard.press("Enter")
        expect(page.locator(f"#{view}")).to_be_visible()
        expect(page.locator("nav a[aria-current]")).to_have_attribute("href", f"#{view}")
    page.keyboard.press("Tab")  # on from the navigation, into the view
    expect(page.locator("#find")).to_be_focused()


def test_a_key_is_asked_for(browser: Browser, keyed: RunningServer) -> None:
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.goto(keyed.url)
    expect(page.locator("#key-form")).to_be_visible()
    page.fill("#key", "secret")
    page.click("#key-form button")
    expect(page.locator("#status.well")).to_be_visible()
    expect(page.locator("#key-form")).to_be_hidden()
    page.click("nav a[href='#config']")
    expect(page.locator("#no-settings")).to_be_visible()
    page.close()
