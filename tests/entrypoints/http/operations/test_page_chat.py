"""The page's chat in headless Chromium: answers, what is done with them, and what is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.entrypoints.http.operations.chromium import opened
from tests.entrypoints.serving import RunningServer, wait_until

QUESTION = "Reverse this list:\nriver,stone,moon,tree"
ANSWER = "tree,moon,stone,river"


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def stream(*texts: str, **delta: Any) -> str:
    """A streamed response of these pieces; `delta`: further fields of the first."""
    events = []
    for place, text in enumerate(texts):
        top = [{"token": text, "logprob": -0.1}, {"token": "<b>", "logprob": -2.0}]
        choice = {
            "index": 0,
            "delta": {"content": text, **({} if place else delta)},
            "logprobs": {"content": [{**top[0], "top_logprobs": top}]},
        }
        events.append({"choices": [choice]})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def reply_with(page: Page, body: str) -> None:
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


@pytest.mark.slow
def test_an_answer_its_tokens_and_a_reload(page: Page) -> None:
    ask(page, QUESTION)
    text = page.locator(".message.assistant .text")
    expect(text).to_have_text(ANSWER)
    expect(page.locator(".facts")).to_contain_text("to the first token")
    page.locator(".token").first.hover()
    expect(page.locator(".tip")).to_contain_text("%")
    text.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".token").nth(1)).to_have_class("token p4 current")
    expect(page.locator(".tip .drawn")).to_contain_text("%")
    page.fill("#temperature", "0.7")
    page.reload()
    expect(text).to_have_text(ANSWER)
    expect(page.locator("#temperature")).to_have_value("0.7")
    assert page.locator(".token").count() > 2  # with their probabilities
    page.click("#clear")
    expect(page.locator(".empty")).to_be_visible()
    page.reload()
    expect(page.locator(".empty")).to_be_visible()


def test_edit_and_regenerate_begin_anew_from_their_turn(page: Page) -> None:
    ask(page, "What is 1 + 1?")
    expect(page.locator(".facts")).to_contain_text("tokens")
    ask(page, "What is 17 + 25?")
    expect(page.locator(".facts").nth(1)).to_contain_text("tokens")
    page.locator(".message.user").first.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Edited message")).to_be_focused()
    page.get_by_label("Edited message").fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(1)
    expect(page.locator(".message.assistant .text")).to_have_text(ANSWER)
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Regenerate").click()
    body = json.loads(sent.value.post_data or "")
    assert [message["role"] for message in body["messages"]] == ["user"]
    expect(page.locator(".message.assistant .text")).to_have_text(ANSWER)


def test_two_settings_side_by_side_continue_on_their_own(page: Page) -> None:
    bodies: list[Any] = []

    def reply(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        route.fulfill(content_type="text/event-stream", body=stream("hot" if bodies[-1]["temperature"] else "cold"))

    page.route("**/v1/chat/completions", reply)
    page.check("#compare")
    page.fill("#temperature-b", "1.5")
    page.fill("#seed-b", "7")
    ask(page, "hello")
    answers = page.locator(".message.assistant .text")
    expect(answers).to_have_text(["cold", "hot"])
    expect(page.locator(".label")).to_have_text(["A: temperature 0, top-p 1", "B: temperature 1.5, top-p 1, seed 7"])
    ask(page, "again")
    expect(answers).to_have_text(["cold", "hot", "cold", "hot"])
    second = {body["temperature"]: [message["content"] for message in body["messages"]] for body in bodies[2:]}
    assert second == {0: ["hello", "cold", "again"], 1.5: ["hello", "hot", "again"]}


def test_stopping_an_answer_stops_the_work(page: Page, page_server: RunningServer) -> None:
    page.fill("#max-tokens", "4000")
    page.fill("#temperature", "2")
    ask(page, "def walk(tree):\n" * 40)
    expect(page.locator("#stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".message .error")).to_have_text("stopped")
    wait_until(lambda: page_server.get("/page/live.json")["outstanding"] == 0)


def test_markup_is_text(page: Page) -> None:
    reply_with(page, stream("<img src=x onerror=alert(1)>", "```html\n<i>", "</i>\n``` end", reasoning_content="<u>why</u>"))
    ask(page, "<script>alert(2)</script>")
    expect(page.locator(".message.user .text")).to_have_text("<script>alert(2)</script>")
    expect(page.locator(".message.assistant .text")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.locator(".message pre")).to_have_text("<i></i>\n")
    page.locator("summary", has_text="Reasoning").click()
    expect(page.locator(".reasoning")).to_contain_text("<u>why</u>")
    page.locator(".token").first.hover()
    expect(page.locator(".tip")).to_contain_text('"<b>"')
    assert page.locator(".message :is(img, i, u, script), .tip b").count() == 0


def test_copies_go_to_the_clipboard(browser: Browser, page_server: RunningServer) -> None:
    with opened(browser, page_server.url) as (context, page):
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        ask(page, QUESTION)
        expect(page.locator(".message.assistant .text")).to_have_text(ANSWER)
        page.locator(".message.assistant").get_by_role("button", name="Copy").click()
        expect(page.locator(".message.assistant").get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == ANSWER


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["curl", "python"])
def test_a_request_runs_outside_of_the_page(page: Page, kind: str) -> None:
    if kind == "curl" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    page.fill("#system", 'It\'s a "test" of $HOME and `quotes`.')
    page.fill("#prompt", QUESTION)
    page.fill("#top-k", "3")
    page.click(f"#as-{kind}")
    expect(page.locator("#code")).to_be_visible()
    text = page.locator("#code-text").inner_text()
    page.keyboard.press("Escape")
    expect(page.locator("#code")).to_be_hidden()
    command = ["bash", "-c", text] if kind == "curl" else [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True, env=os.environ)
    said = json.loads(done.stdout)["choices"][0]["message"]["content"] if kind == "curl" else done.stdout.strip()
    assert said


def test_a_conversation_is_exported(page: Page) -> None:
    reply_with(page, stream("yes"))
    ask(page, "is it?")
    expect(page.locator(".message.assistant .text")).to_have_text("yes")
    with page.expect_download() as markdown:
        page.click("#export-md")
    assert markdown.value.suggested_filename == "conversation.md"
    assert markdown.value.path().read_text().endswith("**User**\n\nis it?\n\n**Assistant**\n\nyes\n")
    with page.expect_download() as whole:
        page.click("#export-json")
    data = json.loads(whole.value.path().read_text())
    assert data["turns"][0]["answers"][0]["content"] == "yes" and data["turns"][0]["answers"][0]["tokens"][0]["t"] == "yes"
