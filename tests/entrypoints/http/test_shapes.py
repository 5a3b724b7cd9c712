"""The shapes of answers: parsed messages, logprobs, chunks, request fields."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import ErrorCode, Finish, TokenLogprobs
from frame.entrypoints.http.chat.output_parser import OutputParser
from frame.entrypoints.http.dialects.anthropic import MessagesChat
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import failure
from frame.entrypoints.http.native.generate import GenerateRequest
from frame.entrypoints.http.openai.completion_objects import ChunkWriter, TextOffsets, completion_logprobs, finish_reason, usage_of
from frame.entrypoints.http.openai.completions_schema import ChatRequest, CompletionRequest
from frame.entrypoints.http.openai.responses_schema import ResponsesChat
from frame.entrypoints.http.protocol.bodies import Bodies
from frame.entrypoints.http.request_context import RequestContext
from frame.interfaces.parsing import ReasoningDelta, ReasoningParser, ToolCallDelta, ToolCallParser, ToolDelta
from frame.text.tokenizer import Tokenizer

NONE = SamplingParams()  # no defaults


class Thinks(ReasoningParser):
    """Everything before the first `|` is thought; holds one character back."""

    def __init__(self) -> None:
        self.held = ""
        self.is_over = False

    def feed(self, text: str) -> ReasoningDelta:
        if self.is_over:
            return ReasoningDelta(content=text)
        text = self.held + text
        if "|" in text:
            self.is_over, self.held = True, ""
            thought, _, content = text.partition("|")
            return ReasoningDelta(thought, content)
        self.held = text[-1:]
        return ReasoningDelta(text[:-1])

    def finish(self) -> ReasoningDelta:
        held, self.held = self.held, ""
        return ReasoningDelta(held)


class Calls(ToolCallParser):
    """`#` begins a call of f; what follows are its arguments, up to the next `#`."""

    def __init__(self) -> None:
        self.index = -1

    def feed(self, text: str) -> ToolDelta:
        content, calls = "", []
        for character in text:
            if character == "#":
                self.index += 1
                calls.append(ToolCallDelta(self.index, "f"))
            elif self.index < 0:
                content += character
            else:
                calls.append(ToolCallDelta(self.index, None, character))
        return ToolDelta(content, tuple(calls))

    def finish(self) -> ToolDelta:
        return ToolDelta()


def merged(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of deltas."""
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], ["", ""])
            known[0] += call["function"].get("name", "")
            known[1] += call["function"]["arguments"]
    joined = {key: "".join(delta.get(key, "") for delta in deltas) for key in ("content", "reasoning_content")}
    return {**joined, "calls": [calls[i] for i in sorted(calls)]}


@given(text=st.text(alphabet="ab|#", max_size=20), cuts=st.lists(st.integers(0, 20), max_size=6))
def test_deltas_add_up_to_the_message(text: str, cuts: list[int]) -> None:
    whole = OutputParser(Thinks(), Calls())
    whole.feed(text, Finish("stop"))
    message = whole.build_message()
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(bounds)] or [""]
    parser = OutputParser(Thinks(), Calls())
    deltas = [delta for i, piece in enumerate(pieces) for delta in parser.feed(piece, Finish("stop") if i == len(pieces) - 1 else None)]
    found = merged(deltas)
    assert found["content"] == (message["content"] or "")
    assert found["reasoning_content"] == message.get("reasoning_content", "")
    assert found["calls"] == [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    assert parser.ends_in_call(None) == bool(found["calls"])


def test_a_message_of_calls_only_has_no_content() -> None:
    parser = OutputParser(None, Calls())
    parser.feed('#{"x": 1}', Finish("stop"))
    message = parser.build_message()
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert message["tool_calls"][0]["id"].startswith("call_")
    assert finish_reason(Finish("stop"), parser.ends_in_call(Finish("stop"))) == "tool_calls"
    assert finish_reason(Finish("length"), True) == "length"
    assert parser.ends_in_call(Finish("stop", matched="x"))
    parser = OutputParser(None, Calls())
    parser.feed('#{"x": ', Finish("stop", matched="x"))
    assert parser.ends_in_call(None) and not parser.ends_in_call(Finish("stop", matched="x"))


@given(text=st.text(max_size=10))
def test_hand_made_chunks_are_json(text: str) -> None:
    for kind, read in (("chat.completion.chunk", lambda c: c["delta"]["content"]), ("text_completion", lambda c: c["text"])):
        writer = ChunkWriter({"id": "id-1", "object": kind, "created": 7, "model": 'a "model"'}, has_usage=True)
        quick, full = writer.text(3, text), writer.full(3, {"content": text} if kind.startswith("chat") else text)
        events = [json.loads(event.removeprefix(b"data: ")) for event in (quick, full)]
        assert events[0] == events[1]
        assert quick.endswith(b"}\n\n")
        choice = events[0]["choices"][0]
        assert (read(choice), choice["index"], choice["finish_reason"], choice["logprobs"]) == (text, 3, None, None)
        assert (events[0]["model"], events[0]["usage"]) == ('a "model"', None)
    usage = json.loads(writer.usage(usage_of(3, 4, 2)).removeprefix(b"data: "))
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 7


def test_errors_have_their_status() -> None:
    statuses: dict[ErrorCode | None, int] = {
        "queue_full": 503, "deadline_exceeded": 504, "invalid_grammar": 400, "invalid_request": 400, "non_finite_logits": 500, None: 500,
    }  # fmt: skip
    assert {*statuses} == {*get_args(ErrorCode), None}
    for code, status in statuses.items():
        assert failure(Finish("error", error="anything", code=code)).status == status
    assert failure(Finish("error", error="x", code="invalid_grammar", param="regex")).param == "regex"
    assert failure(Finish("error", error="x", code="invalid_request", param="prompt")).param == "prompt"


def test_errors_of_grammars_name_the_field_that_was_sent() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {}}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for request, kind, field in (
        (chat(response_format=form), "json_schema", "response_format"),
        (chat(response_format=form, tools=tools), "structural_tag", "response_format"),
        (chat(tools=tools), "structural_tag", "tools"),
        (chat(guided_json="{"), "json_schema", "guided_json"),
        (chat(json_schema="{"), "json_schema", "json_schema"),
        (chat(structured_outputs={"grammar": "x"}), "ebnf", "structured_outputs.grammar"),
        (ResponsesChat(messages=[], response_format=form), "json_schema", "text.format"),
        (MessagesChat(messages=[], response_format=form), "json_schema", "output_config.format"),
        (GenerateRequest(sampling_params={"json_schema": "{"}), "json_schema", "sampling_params.json_schema"),
    ):
        end = Finish("error", error=f"invalid grammar: {kind} is not JSON: {kind} is", code="invalid_grammar", param=kind)
        error = failure(end, request.sent_name)
        assert (error.param, error.message) == (field, f"invalid grammar: {field} is not JSON: {kind} is"), field


def test_byte_tokens_have_a_name_each() -> None:
    tokenizer = Tokenizer.load(find_model(EMBEDDED))
    first, last = tokenizer.encode("é", False)
    part = TokenLogprobs(token_ids=[first], logprobs=[-3.0], top=[[(last, -1.0), (tokenizer.encode("a", False)[0], -2.0)]])
    found = completion_logprobs([part], tokenizer, None, TextOffsets(tokenizer))
    assert found["tokens"] == ["bytes:\\xc3"]
    assert found["top_logprobs"] == [{"bytes:\\xa9": -1.0, "a": -2.0, "bytes:\\xc3": -3.0}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


def test_fields_become_parameters() -> None:
    request = chat(stop="a", logit_bias={"5": 1}, max_tokens=9, max_completion_tokens=4, logprobs=True, top_logprobs=2, top_k=3, unknown=1)
    params = request.to_sampling_params(NONE)
    assert (params.stop, params.logit_bias, params.max_tokens, params.logprobs, params.top_k) == (("a",), {5: 1.0}, 4, 2, 3)
    assert chat().to_sampling_params(NONE).logprobs is None
    assert chat(response_format={"type": "json_object"}).to_sampling_params(NONE).json_object
    schema = (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}})
        .to_sampling_params(NONE)
        .json_schema
    )
    assert json.loads(schema or "") == {"type": "object"}
    echo = CompletionRequest.model_validate({"prompt": "x", "echo": True, "logprobs": 1, "max_tokens": 0}).to_sampling_params(
        SamplingParams()
    )
    assert (echo.max_tokens, echo.prompt_logprobs, echo.logprobs) == (1, 1, 1)


@pytest.mark.slow
async def test_half_a_body_is_waited_for_a_while() -> None:
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]
    sent: list[Any] = []

    async def receive() -> Any:
        return pieces.pop() if pieces else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    call = RequestContext({"headers": []}, receive, send, 100, bodies=Bodies(200, 0.01))
    with pytest.raises(ApiError) as caught:
        await call.body()
    await call.fail(caught.value)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


@pytest.mark.parametrize(
    "fields",
    [
        *({"logit_bias": {key: 1}} for key in ("x", " 5", "5_0", "05", "٥", "", "1e3", "9" * 5000)),
        {"top_logprobs": 1},
        {"response_format": {"type": "x"}},
        {"response_format": {"type": "json_schema"}},
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields).to_sampling_params(NONE)
    assert caught.value.status == 400
    assert caught.value.param


@pytest.mark.parametrize("field", ["rid", "request_id"])
def test_names_that_a_line_of_the_log_cannot_hold_are_refused(field: str) -> None:
    assert chat(**{field: "größe 1/2"}).request_name() == "größe 1/2"
    for name in ("a\nb", "a\x00", "\x1b[2J", "a\u2028b"):
        with pytest.raises(ApiError, match=f"{field} holds a character that is not printable") as caught:
            chat(**{field: name}).request_name()
        assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "system", "content": None}, {"role": "tool", "tool_call_id": "1"}])
def test_a_message_without_content_is_named(message: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"messages\[1\]\.content is missing") as caught:
        chat(messages=[{"role": "assistant"}, message]).conversation()
    assert (caught.value.status, caught.value.param) == (400, "messages[1].content")


def test_tool_calls_of_the_history_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    bad = {**call, "function": {"name": "f", "arguments": "{"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call, bad]}, {"role": "tool", "content": "1"}]
    first = chat(messages=messages).conversation()[0]
    assert first["content"] == ""
    assert [c["function"]["arguments"] for c in first["tool_calls"]] == [{"x": [1]}, "{"]
    with pytest.raises(ApiError, match="function"):
        chat(messages=[{"role": "assistant", "tool_calls": [3]}]).conversation()
