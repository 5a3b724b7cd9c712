"""LangChain's `ChatOpenAI`, unmodified: invoke, stream, batch, tools, structured output, over chat
and over responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from tests.clients.conftest import CALL, KEY, MODEL, WEATHER_SCHEMA

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

ASK = "What is 2 + 5?"


class Verdict(pydantic.BaseModel):
    """Whether a number is even."""

    is_even: bool


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, url: str) -> ChatOpenAI:
    return make(url, use_responses_api=request.param)


def make(url: str, **more: Any) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    ask = {"model": MODEL, "api_key": KEY, "base_url": url + "/v1", "temperature": 0, "max_tokens": 24, "max_retries": 0}
    return ChatOpenAI(**(ask | more))


def test_invoke_and_stream(model: ChatOpenAI) -> None:
    from langchain_core.messages import HumanMessage

    found = model.invoke([HumanMessage(ASK)])
    assert found.text == "7"
    assert found.usage_metadata is not None
    assert "".join(chunk.text for chunk in model.stream(ASK)) == "7"
    assert [reply.text for reply in model.batch([ASK, ASK])] == ["7", "7"]


@pytest.mark.asyncio(loop_scope="module")  # LangChain keeps one asynchronous client of a server, with its connections
async def test_async(model: ChatOpenAI) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage

    assert (await model.ainvoke(ASK)).text == "7"
    assert "".join([chunk.text async for chunk in model.astream([SystemMessage("You add."), HumanMessage(ASK)])]) != ""


@pytest.mark.parametrize("is_responses", [False, True], ids=["chat", "responses"])
def test_tools(url: str, is_responses: bool) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    tool = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER_SCHEMA}}
    model = make(url, max_tokens=100, use_responses_api=is_responses, extra_body={"regex": CALL}).bind_tools([tool])
    found = model.invoke(ASK)
    (call,) = found.tool_calls
    assert (call["name"], list(call["args"])) == ("get_weather", ["city"])
    streamed: Any = None
    for chunk in model.stream(ASK):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == call["args"]
    turns = [HumanMessage(ASK), AIMessage(content="", tool_calls=[call]), ToolMessage("sunny", tool_call_id=call["id"])]
    assert make(url, use_responses_api=is_responses).bind_tools([tool]).invoke(turns).text


def test_structured_output_by_a_required_call(url: str) -> None:
    model = make(url, max_tokens=200).with_structured_output(Verdict, method="function_calling")
    assert isinstance(model.invoke(ASK), Verdict)


def test_structured_output(model: ChatOpenAI) -> None:
    assert isinstance(model.with_structured_output(Verdict, method="json_schema").invoke(ASK), Verdict)


def test_completion(url: str) -> None:
    from langchain_openai import OpenAI

    model = OpenAI(model=MODEL, api_key=KEY, base_url=url + "/v1", max_tokens=8, max_retries=0)
    assert model.invoke("def add(a, b):")
