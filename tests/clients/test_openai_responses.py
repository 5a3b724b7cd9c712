"""The `openai` package, unmodified, against `/v1/responses`."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response

from tests.clients.conftest import KEY, MODEL, WEATHER_SCHEMA
from tests.entrypoints.serving import RunningServer

ASK: dict[str, Any] = {"model": MODEL, "input": "What is 2 + 5?", "temperature": 0, "max_output_tokens": 24}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": WEATHER_SCHEMA,
    "strict": True,
}
THOUGHT_AND_CALL = r'<think>hm</think>ok<tool_call>\{"name": "get_weather", "arguments": \{"city": "(Oslo|Rome)"\}\}</tool_call>'
CALLING: dict[str, Any] = ASK | {"max_output_tokens": 120, "tools": [WEATHER], "extra_body": {"regex": THOUGHT_AND_CALL}}


class Sum(pydantic.BaseModel):
    is_even: bool


def test_response_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASK)
    assert (whole.status, whole.output_text) == ("completed", "7")
    assert whole.usage.output_tokens > 0
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**ASK) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


async def test_async(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client:
        whole = await client.responses.create(**ASK)
        kinds = [event.type async for event in await client.responses.create(**ASK, stream=True)]
    assert whole.output_text == "7"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


def test_reasoning_and_calls_and_their_results(client: openai.OpenAI) -> None:
    whole = client.responses.create(**CALLING)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    thinking, message, call = whole.output
    assert (thinking.content[0].text, message.content[0].text, call.name) == ("hm", "ok", "get_weather")
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(**CALLING) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output[2].arguments == call.arguments
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call.arguments
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    kept = client.responses.create(**(ASK | {"input": [result], "tools": [WEATHER]}), previous_response_id=whole.id)
    items = [{"role": "user", "content": ASK["input"]}, *whole.output, result]
    sent = client.responses.create(**(ASK | {"input": items, "tools": [WEATHER]}))
    assert kept.usage.input_tokens == sent.usage.input_tokens > whole.usage.input_tokens
    assert kept.output_text == sent.output_text


def test_required_and_named_calls(client: openai.OpenAI) -> None:
    ask = CALLING | {"max_output_tokens": 100, "extra_body": {}}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        found = client.responses.create(**ask, tool_choice=choice, parallel_tool_calls=False)
        (call,) = found.output
        assert (call.type, call.name, list(json.loads(call.arguments))) == ("function_call", "get_weather", ["city"])


def test_structured_output(client: openai.OpenAI) -> None:
    found = client.responses.parse(**ASK, text_format=Sum)
    assert isinstance(found.output_parsed, Sum)


def test_kept_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(**ASK, previous_response_id=first.id, instructions="Be brief.")
    count = client.responses.input_tokens.count(model=MODEL, input=ASK["input"], previous_response_id=first.id, instructions="Be brief.")
    assert count.input_tokens == second.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="is completed"):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    for use in (client.responses.retrieve, client.responses.delete, lambda name: client.responses.create(**ASK, previous_response_id=name)):
        with pytest.raises(openai.NotFoundError, match="no response"):
            use(first.id)
    unkept = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_limits_and_cancelling(client: openai.OpenAI) -> None:
    endless = {"ignore_eos": True}
    short = client.responses.create(**(ASK | {"max_output_tokens": 3}), extra_body=endless)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    stream = client.responses.create(**(ASK | {"max_output_tokens": 3000}), extra_body=endless, stream=True)
    name = next(stream).response.id
    assert client.responses.retrieve(name).status == "in_progress"
    assert client.responses.cancel(name).status == "cancelled"
    last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert client.responses.retrieve(name).status == "cancelled"
    with client.responses.create(**(ASK | {"max_output_tokens": 3000}), extra_body=endless, stream=True) as stream:
        name = next(stream).response.id
    assert client.responses.create(**ASK).status == "completed"


def until_over(client: openai.OpenAI, name: str) -> Any:
    for _ in range(600):
        found = client.responses.retrieve(name)
        if found.status not in ("queued", "in_progress"):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{name} is not over")


def test_in_the_background(client: openai.OpenAI) -> None:
    begun = client.responses.create(**ASK, background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    found = until_over(client, begun.id)
    assert (found.status, found.output_text, found.background) == ("completed", "7", True)
    assert found.usage.output_tokens > 0
    assert client.responses.create(**ASK, previous_response_id=begun.id).status == "completed"
    client.responses.delete(begun.id)
    endless = client.responses.create(**(ASK | {"max_output_tokens": 3000}), extra_body={"ignore_eos": True}, background=True)
    with pytest.raises(openai.BadRequestError, match="cancel it before"):
        client.responses.delete(endless.id)
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert until_over(client, endless.id).status == "cancelled"
    assert client.responses.cancel(endless.id).status == "cancelled", "as at OpenAI, a second cancellation changes nothing"
    whole = client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="only a response in progress can be cancelled"):
        client.responses.cancel(whole.id)


FAR = {"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": {"a": {"$ref": "http://x/y"}}}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"input": []}, "input is empty"),
        ({"background": True, "store": False}, "must be stored; leave store out"),
        ({"background": True, "temperature": -1}, "temperature is -1"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "only OpenAI's servers run"),
        ({"input": [{"type": "item_reference"}]}, r"input\[0\].id: expected a string"),
        ({"include": ["x"]}, r"include\[0\] is 'x'"),
        ({"top_logprobs": 21}, "top_logprobs is 21"),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "peg", "definition": ""}}]},
            "must be lark or regex",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]}, "text only"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "arguments: expected a string"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: expected an object"),
        ({"truncation": "middle"}, "truncation"),
    ],
)
def test_bad_requests(client: openai.OpenAI, change: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.responses.create(**(ASK | change))


def test_an_error_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"the \$ref 'http://x/y'") as found:
        client.responses.create(**ASK, text={"format": FAR})
    assert found.value.param == "text.format"


def test_keys_see_their_own(url: str) -> None:
    found = httpx.post(url + "/v1/responses", json=ASK, trust_env=False)
    assert found.status_code == 401


def raw_response(url: str, **change: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEY}"}
    found = httpx.post(url + "/v1/responses", json=ASK | change, headers=headers, trust_env=False)
    return dict(found.raise_for_status().json())


def test_the_object_has_every_key_that_the_package_requires(url: str) -> None:
    """Keys that may be absent come with new releases of the package."""
    body = raw_response(url, tools=[WEATHER, RUN], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [RUN]})
    assert {name for name, field in Response.model_fields.items() if field.is_required()} - set(body) == set()
    Response.model_validate(body)
    assert (body["truncation"], body["top_logprobs"], body["max_tool_calls"]) == ("disabled", 0, None)
    asked = {"max_tool_calls": 3, "safety_identifier": "a", "prompt_cache_key": "b", "include": ["reasoning.encrypted_content"]}
    body = raw_response(url, **asked)
    assert {name: body[name] for name in asked if name != "include"} | {"include": asked["include"]} == asked


def test_logprobs_of_the_text(client: openai.OpenAI) -> None:
    asked = ASK | {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    plain = client.responses.create(**ASK)
    assert not plain.output[0].content[0].logprobs
    whole = client.responses.create(**asked)
    assert whole.top_logprobs == 3
    (part,) = whole.output[0].content
    assert "".join(entry.token for entry in part.logprobs) == part.text == plain.output_text
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 and bytes(entry.bytes) for entry in part.logprobs)
    events = list(client.responses.create(**asked, stream=True))
    deltas = [entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert deltas == [entry.token for entry in part.logprobs] == [entry.token for entry in done.logprobs]


def test_logprobs_are_those_of_the_answer_alone(client: openai.OpenAI) -> None:
    asked = CALLING | {"include": ["message.output_text.logprobs"]}
    whole = client.responses.create(**asked)
    tokens = [entry.token for entry in whole.output[1].content[0].logprobs]
    assert "ok" in "".join(tokens)
    assert len(tokens) < whole.usage.output_tokens / 2, "thinking and calls have none"


def test_input_items(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    second = client.responses.create(**(ASK | {"input": [{"role": "user", "content": "And 3 + 3?"}]}), previous_response_id=first.id)
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in items] == ["message"] * 3
    assert [item.content[0].text for item in items] == [ASK["input"], first.output_text, "And 3 + 3?"]
    assert len({item.id for item in items}) == 3
    page = client.responses.input_items.list(second.id, limit=1)
    assert (page.data[0].content[0].text, page.has_more) == ("And 3 + 3?", True)
    assert [item.id for item in client.responses.input_items.list(second.id, limit=2)] == [item.id for item in reversed(items)]
    with pytest.raises(openai.BadRequestError, match="no such item"):
        client.responses.input_items.list(second.id, after="msg_x")


def test_truncation_drops_the_oldest_turns(quick_server: RunningServer) -> None:
    client = openai.OpenAI(base_url=quick_server.url + "/v1", api_key="none", max_retries=0)
    (model,) = client.models.list().data
    context = model.model_dump()["max_model_len"]  # small, so that little text fills it
    ask = ASK | {"model": model.id, "input": "2 + 5?", "max_output_tokens": 16}
    turn = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    one = client.responses.input_tokens.count(model=model.id, input=turn).input_tokens
    long = turn * (2 * context // one) + [{"role": "user", "content": ask["input"]}]
    asked = ask | {"input": long, "instructions": "Be brief."}
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(**asked)
    found = client.responses.create(**asked, truncation="auto")
    room = context - ask["max_output_tokens"]
    assert room - 2 * one < found.usage.input_tokens <= room, "no more is dropped than needed"
    assert found.usage.input_tokens > 2 * one, "turns are kept"
    assert found.truncation == "auto"
    short = client.responses.create(**ask, truncation="auto")
    assert short.usage.input_tokens == client.responses.create(**ask).usage.input_tokens


def test_a_background_response_is_streamed_and_taken_up_again(client: openai.OpenAI) -> None:
    asked = ASK | {"max_output_tokens": 60, "background": True, "stream": True, "extra_body": {"ignore_eos": True}}
    with client.responses.create(**asked) as stream:
        first = [next(stream) for _ in range(4)]
    name = first[0].response.id
    rest = list(client.responses.retrieve(name, stream=True, starting_after=first[-1].sequence_number))
    numbers = [event.sequence_number for event in (*first, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.incomplete"
    again = list(client.responses.retrieve(name, stream=True))
    assert [event.type for event in again] == [event.type for event in (*first, *rest)]
    assert client.responses.retrieve(name).output_text == rest[-1].response.output_text


def test_the_events_of_a_response_that_was_not_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(**CALLING)
    events = list(client.responses.retrieve(whole.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response == whole
    kinds = list(dict.fromkeys(event.type for event in client.responses.create(**CALLING, stream=True)))
    assert list(dict.fromkeys(event.type for event in events)) == kinds
    later = list(client.responses.retrieve(whole.id, stream=True, starting_after=3))
    assert later == events[4:]


RUN: dict[str, Any] = {"type": "custom", "name": "run", "description": "Runs a shell command."}
RUN_CALL = r'<tool_call>\{"name": "run", "arguments": \{"input": "(ls|pwd)"\}\}</tool_call>'


def test_custom_tools(client: openai.OpenAI) -> None:
    asked = ASK | {"max_output_tokens": 120, "tools": [RUN], "extra_body": {"regex": RUN_CALL}}
    whole = client.responses.create(**asked)
    (call,) = whole.output
    assert (call.type, call.name, call.input in ("ls", "pwd")) == ("custom_tool_call", "run", True)
    events = list(client.responses.create(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
    done = next(event for event in events if event.type == "response.custom_tool_call_input.done")
    assert done.input == text == events[-1].response.output[0].input
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "a.txt"}
    kept = client.responses.create(**(ASK | {"input": [result], "tools": [RUN]}), previous_response_id=whole.id)
    items = [{"role": "user", "content": ASK["input"]}, call, result]
    sent = client.responses.create(**(ASK | {"input": items, "tools": [RUN]}))
    assert kept.usage.input_tokens == sent.usage.input_tokens > whole.usage.input_tokens
    assert client.responses.create(**(asked | {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [RUN]}})).output


def test_item_references(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    question = next(iter(client.responses.input_items.list(first.id)))
    new = {"role": "user", "content": "And 3 + 3?"}
    references = [{"type": "item_reference", "id": question.id}, {"id": first.output[0].id}, new]
    by_name = client.responses.create(**(ASK | {"input": references}))
    whole = client.responses.create(**(ASK | {"input": [new]}), previous_response_id=first.id)
    assert by_name.usage.input_tokens == whole.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match=r"input\[0\].id: there is no item 'x'"):
        client.responses.create(**(ASK | {"input": [{"type": "item_reference", "id": "x"}]}))


def test_conversations(client: openai.OpenAI) -> None:
    talk = client.conversations.create(metadata={"a": "b"}, items=[{"role": "system", "content": "Be brief."}])
    assert client.conversations.retrieve(talk.id) == talk
    assert client.conversations.update(talk.id, metadata={"c": "d"}).metadata == {"c": "d"}
    first = client.responses.create(**ASK, conversation=talk.id)
    assert first.conversation.id == talk.id
    second = client.responses.create(**(ASK | {"input": "And 3 + 3?"}), conversation={"id": talk.id})
    items = list(client.conversations.items.list(talk.id, order="asc", limit=2))
    assert [item.content[0].text for item in items] == ["Be brief.", ASK["input"], first.output_text, "And 3 + 3?", second.output_text]
    sent = [{"role": item.role, "content": item.content[0].text} for item in items[:-1]]
    assert client.responses.create(**(ASK | {"input": sent})).usage.input_tokens == second.usage.input_tokens
    added = client.conversations.items.create(talk.id, items=[{"role": "user", "content": "Thanks."}])
    assert client.conversations.items.retrieve(added.data[0].id, conversation_id=talk.id) == added.data[0]
    client.conversations.items.delete(added.data[0].id, conversation_id=talk.id)
    assert len(list(client.conversations.items.list(talk.id))) == 5
    client.conversations.delete(talk.id)
    for use in (client.conversations.retrieve, lambda name: client.responses.create(**ASK, conversation=name)):
        with pytest.raises(openai.NotFoundError, match="no conversation"):
            use(talk.id)
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.responses.create(**ASK, conversation=talk.id, previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="metadata"):
        client.conversations.create(metadata={str(i): "" for i in range(17)})
    with pytest.raises(openai.BadRequestError, match=r"items\[0\].role"):
        client.conversations.create(items=[{"role": "unknown", "content": ""}])
