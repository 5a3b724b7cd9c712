"""Files and batches, by the `openai` package: bad lines stay among themselves, cancelling keeps
what was done, bounds hold."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.entrypoints.serving import RunningServer, wait_until

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def line(name: str, body: Any = BODY, url: str = "/v1/chat/completions") -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


@pytest.fixture(scope="module")
def client(quick_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=quick_server.url + "/v1", api_key="none", max_retries=0)


def begin(client: openai.OpenAI, text: str, endpoint: str = "/v1/chat/completions") -> Any:
    uploaded = client.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h", metadata={"of": "a test"})  # type: ignore[arg-type]


def finished(client: openai.OpenAI, batch: Any) -> Any:
    over = ("completed", "failed", "expired", "cancelled")
    wait_until(lambda: client.batches.retrieve(batch.id).status in over, 60)
    return client.batches.retrieve(batch.id)


def records(client: openai.OpenAI, name: str | None) -> list[dict[str, Any]]:
    return [json.loads(text) for text in client.files.content(name).text.splitlines()] if name else []


@pytest.mark.slow
def test_good_and_bad_lines(client: openai.OpenAI) -> None:
    good = [line(f"good-{i}") for i in range(12)]
    bad = [line("hot", BODY | {"temperature": -1}), "\n", line("none", BODY | {"messages": []})]
    batch = finished(client, begin(client, "".join([*bad, *good])))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (14, 12, 2)
    replies = records(client, batch.output_file_id)
    assert {reply["custom_id"] for reply in replies} == {f"good-{i}" for i in range(12)}
    assert all(reply["response"]["body"]["usage"]["completion_tokens"] == 4 for reply in replies)
    errors = records(client, batch.error_file_id)
    assert {(each["custom_id"], each["response"]["status_code"]) for each in errors} == {("hot", 400), ("none", 400)}
    assert client.batches.list(limit=1).data[0].id == batch.id
    newest, oldest = ([file.id for file in client.files.list(order=order)] for order in ("desc", "asc"))
    assert newest == oldest[::-1] == [file.id for file in client.files.list(limit=1)]
    for wrong in ({"after": "file-0"}, {"extra_query": {"limit": "²"}}):
        with pytest.raises(openai.BadRequestError, match=r"after is 'file-0'|limit is '²'"):
            client.files.list(**wrong)
    assert batch.metadata == {"of": "a test"}


def test_lines_that_are_no_requests_fail_the_batch(client: openai.OpenAI) -> None:
    lines = ["{not json\n", "[1]\n", line("other", url="/v1/completions"), line("stream", BODY | {"stream": True}), line("text", "Hello"),
             '{"body": {}}\n', line("stream"), line("twice"), line("twice")]  # fmt: skip
    batch = finished(client, begin(client, "".join(lines)))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert [(each.line, each.code) for each in batch.errors.data] == [
        (1, "invalid_json_line"), (2, "invalid_request"), (3, "mismatched_url"), (4, "invalid_request"), (5, "invalid_request"),
        (6, "missing_custom_id"), (9, "duplicate_custom_id"),
    ]  # fmt: skip
    assert "stream is not supported in a batch" in batch.errors.data[3].message


def test_completions_and_responses(client: openai.OpenAI) -> None:
    asked = {"/v1/completions": {"prompt": "a", "max_tokens": 2}, "/v1/responses": {"input": "a", "max_output_tokens": 2}}
    for endpoint, body in asked.items():
        batch = finished(client, begin(client, line("one", body, endpoint), endpoint))
        assert batch.request_counts.completed == 1, records(client, batch.error_file_id)
    batch = finished(client, begin(client, line("one", {"input": "a", "background": True}, endpoint), endpoint))
    assert "background is not supported in a batch" in batch.errors.data[0].message


def test_cancelling_keeps_what_was_done(client: openai.OpenAI, quick_server: RunningServer) -> None:
    short, long = BODY | {"max_tokens": 1}, BODY | {"max_tokens": 90, "ignore_eos": True}
    batch = begin(client, line("short", short) + "".join(line(f"long-{i}", long) for i in range(40)))
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 1)
    client.batches.cancel(batch.id)
    batch = finished(client, batch)
    assert batch.status == "cancelled"
    assert "short" in [reply["custom_id"] for reply in records(client, batch.output_file_id)]
    wait_until(lambda: quick_server.get("/server_info")["outstanding"] == 0)  # what ran has been stopped


def test_files(client: openai.OpenAI) -> None:
    content = line("one").encode()
    made = client.files.create(file=("a.jsonl", content), purpose="batch")
    assert (made.filename, made.bytes, client.files.retrieve(made.id).id) == ("a.jsonl", len(content), made.id)
    assert client.files.content(made.id).content == content
    assert made.id in [found.id for found in client.files.list(purpose="batch")]
    assert client.files.delete(made.id).deleted
    for name in (made.id, "..%2f..%2fetc%2fpasswd", "file-0"):
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(name)


def test_bad_requests(client: openai.OpenAI) -> None:
    made = client.files.create(file=("a.jsonl", b"\n\n"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.jsonl", b"x"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        begin(client, line("one"), "/v1/audio")
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")
    with pytest.raises(openai.APIStatusError, match="delete some") as caught:
        client.files.create(file=("a.jsonl", b"x" * 100_000), purpose="batch")
    assert caught.value.status_code == 413
    batch = finished(client, client.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"))
    assert (batch.status, "no requests" in batch.errors.data[0].message) == ("failed", True)
    with pytest.raises(openai.NotFoundError, match="no batch"):
        client.batches.retrieve("batch-1")
