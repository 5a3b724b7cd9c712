"""Tools of coding agents in the Responses API, by the `openai` package."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.entrypoints.serving import RunningServer

LARK = 'start: "add " INT ("," INT)*\n%import common.INT'
ADD = {"type": "custom", "name": "add", "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "stop", "parameters": {"type": "object", "properties": {"id": {"type": "string"}}}}, ADD],
}
SEARCH = {"type": "web_search"}


@pytest.fixture(scope="module")
def client(scripted_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=scripted_server.url + "/v1", api_key="none", max_retries=0)


def call(name: str, **arguments: Any) -> str:
    return f"[[say]]<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>[[end]]"


def ask(text: str, *tools: Any, **more: Any) -> dict[str, Any]:
    return {"model": "agent-model", "input": text, "tools": list(tools), **more}


def test_namespaces(client: openai.OpenAI) -> None:
    first = client.responses.create(**ask(call("agents__stop", id="7"), NAMESPACE))
    (item,) = first.output
    assert (item.type, item.namespace, item.name, item.arguments) == ("function_call", "agents", "stop", '{"id": "7"}')
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "[[say]]stopped[[end]]"}
    second = client.responses.create(**ask([result], NAMESPACE), previous_response_id=first.id)
    assert second.output_text == "stopped"
    named = {"type": "function", "namespace": "agents", "name": "stop"}
    forced = client.responses.create(**ask(call("agents__stop", id="7"), NAMESPACE, tool_choice=named))
    assert forced.output[0].namespace == "agents"
    replayed = list(client.responses.retrieve(first.id, stream=True))
    assert replayed[-1].response.output == first.output


def test_lark_grammars(client: openai.OpenAI) -> None:
    asked = ask(call("agents__add", input="add 1,22"), NAMESPACE)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[2:] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done", "completed",
    ]  # fmt: skip
    (item,) = events[-1].response.output
    assert (item.type, item.namespace, item.name, item.input) == ("custom_tool_call", "agents", "add", "add 1,22")
    other = client.responses.create(**ask(call("add", input="sub 1"), ADD))
    assert other.output[0].input == "add 1", "the grammar changes what the model says"


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ('start: start "a"', "the rule 'start' refers to itself"),
        ("other: /a/", "no rule start"),
        ("%declare X", "%declare, which is not supported"),
    ],
)
def test_grammars_that_are_not_taken(client: openai.OpenAI, definition: str, says: str) -> None:
    tool = {"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "lark", "definition": definition}}
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.responses.create(**ask("hi", tool))
    assert caught.value.param == "tools[0].format.definition"


def test_tools_of_openais_servers(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(**ask("[[say]]hm[[end]]", ADD, SEARCH, {"type": "image_generation"}))
    assert raw.headers["x-frame-ignored-fields"] == "tools[1], tools[2]"
    assert raw.parse().output_text == "hm"
    for choice in ({"type": "web_search_preview"}, "required"):
        with pytest.raises(openai.BadRequestError, match="only OpenAI's servers run"):
            client.responses.create(**ask("hi", SEARCH, tool_choice=choice))
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "image_generation"}]}
    assert client.responses.create(**ask("[[say]]hm[[end]]", SEARCH, tool_choice=allowed)).output_text == "hm"
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].type is 'unheard_of'"):
        client.responses.create(**ask("hi", {"type": "unheard_of"}))


OWN = {
    "local_shell": ({"command": ["ls", "-l"]}, "action", "ok", {"type": "exec", "command": ["ls", "-l"], "env": {}}),
    "shell": (
        {"commands": ["ls"]},
        "action",
        [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        {"commands": ["ls"]},
    ),
    "apply_patch": (
        {"type": "create_file", "path": "a", "diff": "+x"},
        "operation",
        None,
        {"type": "create_file", "path": "a", "diff": "+x"},
    ),
    "tool_search": ({"query": "mail"}, "arguments", None, {"query": "mail"}),
}


@pytest.mark.parametrize("kind", OWN)
def test_openais_tools_that_clients_run(client: openai.OpenAI, kind: str) -> None:
    arguments, field, output, expected = OWN[kind]
    tool = {"type": kind, **({"execution": "client"} if kind == "tool_search" else {})}
    first = client.responses.create(**ask(call(kind, **arguments), tool))
    (item,) = first.output
    value = getattr(item, field)
    assert item.type == f"{kind}_call"
    assert (value if isinstance(value, dict) else value.model_dump(exclude_none=True)) == expected
    result: dict[str, Any] = {"type": f"{kind}_call_output", "call_id": item.call_id, "id": item.call_id, "status": "completed"}
    if kind == "tool_search":
        result |= {"execution": "client", "tools": [{"type": "function", "name": "send_mail", "parameters": {"type": "object"}}]}
    elif output is not None:
        result["output"] = output
    say = {"role": "user", "content": call("send_mail") if kind == "tool_search" else "[[say]]fine[[end]]"}
    sent = [item.model_dump(exclude_none=True), result, say]
    again = client.responses.create(**ask(sent, tool))
    if kind == "tool_search":
        assert again.output[0].name == "send_mail", "a tool that the search brought"
    else:
        assert again.output_text == "fine"


def test_tools_in_items(client: openai.OpenAI) -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE]},
        {"role": "user", "content": call("agents__stop", id="1")},
    ]
    assert client.responses.create(**ask(items)).output[0].namespace == "agents"


def test_compaction(client: openai.OpenAI) -> None:
    talk = [{"role": "user", "content": "Keep in mind: 7."}, {"role": "assistant", "content": "[[say]]It is 7.[[end]]"}]
    compacted = client.responses.compact(model="agent-model", input=talk)
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.object == "response.compaction"
    assert compacted.usage.output_tokens > 0
    kept = [item.model_dump(exclude_none=True) for item in compacted.output]
    assert client.responses.create(**ask([*kept, {"role": "user", "content": "[[say]]7[[end]]"}])).output_text == "7"
    events = list(client.responses.create(**ask([*talk, {"type": "compaction_trigger"}], stream=True)))
    assert [event.type for event in events[2:]] == ["response.output_item.added", "response.output_item.done", "response.completed"]
    assert events[-1].response.output[0].encrypted_content == kept[1]["encrypted_content"]
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].encrypted_content is not a summary of this server"):
        client.responses.create(**ask([{"type": "compaction", "encrypted_content": "gAAAA"}]))
