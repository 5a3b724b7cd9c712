"""Routes that clients of vLLM, SGLang and SageMaker call, in the shapes that those document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion

from tests.clients.conftest import CITIES, KEY, MODEL, WEATHER_SCHEMA

ASK: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 16}
SUMS = [[{"role": "user", "content": "What is 2 + 5?"}], [{"role": "user", "content": "What is 3 + 3?"}]]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER_SCHEMA}}


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False, timeout=60) as found:
        yield found


def post(client: httpx.Client, path: str, body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


# vLLM ---------------------------------------------------------------------------------------------


def test_a_batch_of_conversations(client: httpx.Client) -> None:
    each = [ChatCompletion.model_validate(post(client, "/v1/chat/completions", ASK | {"messages": one})) for one in SUMS]
    batch = ChatCompletion.model_validate(post(client, "/v1/chat/completions/batch", ASK | {"messages": SUMS}))
    assert [choice.index for choice in batch.choices] == [0, 1]
    assert [choice.message.content for choice in batch.choices] == [one.choices[0].message.content for one in each]
    assert batch.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in each)
    schema = {"type": "object", "properties": {"city": CITIES}, "required": ["city"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    batch = ChatCompletion.model_validate(
        post(client, "/v1/chat/completions/batch", ASK | {"messages": SUMS, "response_format": form, "max_tokens": 60})
    )
    assert all("city" in choice.message.content for choice in batch.choices)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": SUMS * 129}, "messages has more than 256 entries"),
        ({"stream": True}, "leave stream out"),
        ({"n": 2}, "n is 2"),
        ({"messages": SUMS[0]}, "messages[0] is an object; send a list"),
    ],
)
def test_batches_that_are_refused(client: httpx.Client, change: dict[str, Any], says: str) -> None:
    reply = client.post("/v1/chat/completions/batch", json=ASK | {"messages": SUMS} | change)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


def test_rendered_prompts_can_be_generated_from(client: httpx.Client) -> None:
    rendered = post(client, "/v1/chat/completions/render", ASK | {"messages": SUMS[0]})
    whole = post(client, "/v1/chat/completions", ASK | {"messages": SUMS[0]})
    assert len(rendered["token_ids"]) == whole["usage"]["prompt_tokens"]
    assert (rendered["model"], rendered["sampling_params"]["max_tokens"]) == (MODEL, 16)
    body = {"input_ids": rendered["token_ids"], "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
    assert post(client, "/generate", body)["text"] == whole["choices"][0]["message"]["content"]
    first, second = post(client, "/v1/completions/render", ASK | {"prompt": ["one", "two three"]})
    assert first["token_ids"] == post(client, "/tokenize", {"prompt": "one"})["tokens"]
    assert second["token_ids"] == post(client, "/tokenize", {"prompt": "two three"})["tokens"]


def test_version_load_and_tokenizer(client: httpx.Client) -> None:
    assert set(client.get("/version").json()) == {"version"}
    assert client.get("/load").json() == {"server_load": 0}
    found = client.get("/tokenizer_info").json()
    assert found["tokenizer_class"]
    assert "<|system|>" in found["chat_template"]
    assert "/" not in found.get("name_or_path", "")


# SGLang -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_model_info(client: httpx.Client, path: str) -> None:
    found = client.get(path).json()
    assert (found["model_path"], found["is_generation"], found["served_model_name"]) == (MODEL, True, MODEL)
    assert {"tokenizer_path", "preferred_sampling_params", "weight_version"} <= set(found)


def test_parsers_as_a_service(client: httpx.Client) -> None:
    thought = "hm " + "x" * 9000
    body = {"text": f"<think>{thought}</think>The answer.", "reasoning_parser": "think-tags"}
    assert post(client, "/separate_reasoning", body) == {"reasoning_text": thought, "text": "The answer."}
    text = 'So: <tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    found = post(client, "/parse_function_call", {"text": text, "tools": [TOOL], "tool_call_parser": "hermes"})
    assert found["normal_text"].strip() == "So:"
    assert [(call["tool_index"], call["name"], call["parameters"]) for call in found["calls"]] == [(0, "get_weather", '{"city": "Oslo"}')]
    assert post(client, "/parse_function_call", {"text": "No call.", "tools": [TOOL]}) == {"normal_text": "No call.", "calls": []}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/separate_reasoning", {"text": "x", "reasoning_parser": "qwen3"}, "this server's is 'think-tags'"),
        ("/separate_reasoning", {"text": "x" * (1 << 18) + "y"}, "it may have 262144"),
        ("/parse_function_call", {"text": "x", "tools": []}, "tools is empty"),
        ("/parse_function_call", {"text": "x", "tools": [TOOL], "tool_call_parser": "llama3"}, "this server's is 'hermes'"),
    ],
)
def test_what_parsers_refuse(client: httpx.Client, path: str, body: dict[str, Any], says: str) -> None:
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]


# SageMaker ----------------------------------------------------------------------------------------


def test_invocations_go_where_their_fields_belong(client: httpx.Client) -> None:
    assert httpx.get(str(client.base_url.join("/ping")), trust_env=False).status_code == 200
    chat = post(client, "/invocations", ASK | {"messages": SUMS[0]})
    assert chat["choices"][0]["message"]["content"] == "7"
    with client.stream("POST", "/invocations", json=ASK | {"messages": SUMS[0], "stream": True}) as reply:
        assert list(reply.iter_lines())[-2:] == ["data: [DONE]", ""]
    assert post(client, "/invocations", ASK | {"prompt": "x"})["object"] == "text_completion"
    assert "output_ids" in post(client, "/invocations", {"text": "x", "sampling_params": {"max_new_tokens": 2}})
    for body, says in (({"x": 1}, "the body fits no route"), ({"messages": []}, "messages is empty"), ({"prompt": 1}, "prompt is")):
        reply = client.post("/invocations", json=body)
        assert (reply.status_code, says in reply.json()["error"]["message"]) == (400, True)
    assert client.post("/invocations", json={"input": "x"}).json()["error"]["code"] == "wrong_task"


# access -------------------------------------------------------------------------------------------


def test_who_may_ask(client: httpx.Client) -> None:
    def status(method: str, path: str, **headers: str) -> int:
        return httpx.request(method, str(client.base_url.join(path)), headers=headers, trust_env=False).status_code

    assert [status("GET", path) for path in ("/livez", "/readyz", "/ping")] == [200] * 3
    closed = ("/version", "/load", "/tokenizer_info", "/get_model_info", "/api/tags", "/v1/conversations/conv_x")
    assert [status("GET", path) for path in closed] == [401] * len(closed)
    assert status("POST", "/reset_prefix_cache") == 401
    assert status("POST", "/reset_prefix_cache", authorization=f"Bearer {KEY}") == 403
    assert status("GET", "/reset_prefix_cache", authorization=f"Bearer {KEY}") in (403, 405)
