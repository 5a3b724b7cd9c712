"""What a newcomer gets wrong, and the sentence that he reads: it names the thing, and says what to
do."""

from __future__ import annotations

from typing import Any

import pytest

from frame.entrypoints.http.dialects import anthropic, cohere_chat_v1
from frame.entrypoints.http.errors import ApiError
from tests.entrypoints.inprocess import serving

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOO_MANY = (
    "the request asks for 2176 sequences (prompts x n), and it may have 2048 (server.max_sequences_per_request); send several requests"
)
# path, body, status, sentence, param
CASES: list[tuple[str, Any, int, str, str | None]] = [
    (CHAT, b"", 400, "the body is empty; send a JSON object", None),
    (CHAT, b"  \n", 400, "the body is empty; send a JSON object", None),
    (CHAT, b"{", 400, "the body is not valid JSON: it ends too early", None),
    (CHAT, b'{"stop": "\\ud83d"}', 400,
     "the body is not valid JSON: stop has half of a surrogate pair (such as \\ud83d alone); send whole characters", "stop"),
    (CHAT, {**HI, "chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs cannot set tools; use the field tools",
     "chat_template_kwargs"),
    (CHAT, b"[]", 400, "the body is a list; send an object", None),
    (CHAT, {"messages": "hi"}, 400, "messages is a string; send a list", "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages[0].role is missing; send system, user, assistant or tool", "messages[0].role"),
    (CHAT, {"messages": [{"role": 3}]}, 400, "messages[0].role is 3; send system, user, assistant or tool", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text is null; send a string",
     "messages[0].content[0].text"),
    (RESPONSES, {"input": []}, 400, "input is empty; send at least one message", "input"),
    (RESPONSES, {"input": "x", "regex": "a", "text": {"format": {"type": "json_object"}}}, 400,
     "text.format and regex exclude each other; keep one", "text.format"),
    (CHAT, {**HI, "bad_words": [""]}, 400, "bad_words holds an empty string; leave it out", "bad_words"),
    (CHAT, {**HI, "n": 1000}, 400, "n is 1000; it must be from 1 to 128", "n"),
    (f"{CHAT}/render", {**HI, "guided_choice": [""]}, 400, "guided_choice holds an empty string; leave it out", "guided_choice"),
    (CHAT, {**HI, "temperature": "hot"}, 400, "temperature is a string; send a number", "temperature"),
    (CHAT, {**HI, "model": "gpt-4"}, 404, "the model 'gpt-4' does not exist; this server has 'frame-tiny'", "model"),
    (CHAT, {**HI, "top_logprobs": 3}, 400, "top_logprobs needs logprobs: true", "top_logprobs"),
    ("/v1/completions", {"prompt": ["a"] * 17, "n": 128}, 400, TOO_MANY, "n"),
    ("/v1/completions", {}, 400, "prompt is missing; send it", "prompt"),
    (
        "/generate", {"text": "x", "sampling_params": {"max_new_tokens": "many"}}, 400,
        "sampling_params.max_new_tokens is a string; send a whole number", "sampling_params.max_new_tokens",
    ),
    ("/v1/audio", {}, 404, "there is no /v1/audio here; /openapi.json says what there is, such as /v1/chat/completions", None),
    (
        RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, 404,
        "there is no response 'resp_1', or it is no longer stored; send the conversation as input", "previous_response_id",
    ),
    (f"{RESPONSES}/resp_1/cancel", {}, 404, "there is no response 'resp_1', or it is no longer stored; create it again", "response_id"),
]  # fmt: skip


async def test_each_mistake_has_its_sentence() -> None:
    async with serving() as server:
        for path, body, status, sentence, param in CASES:
            reply = await (server.request("POST", path, body) if isinstance(body, bytes) else server.post(path, body))
            error = reply.json()["error"]
            assert (reply.status, error["message"], error.get("param")) == (status, sentence, param), (path, body)


async def test_a_prompt_that_does_not_fit_is_told_in_the_words_that_clients_look_for() -> None:
    long = {"role": "user", "content": "word " * 600}
    async with serving() as server:
        for path, body in (
            (CHAT, {"messages": [long]}),
            (CHAT, {**HI, "max_tokens": 600}),
            ("/v1/completions", {"prompt": "word " * 600}),
            (RESPONSES, {"input": "word " * 600}),
            ("/generate", {"text": "word " * 600}),
        ):
            error = (await server.post(path, body)).json()["error"]
            assert error["code"] == "context_length_exceeded", (path, error)
            assert error["message"].startswith("This model's maximum context length is 512 tokens; the prompt has "), (path, error)
        for more, words in (
            ({"messages": [long], "max_tokens": 8}, "prompt is too long"),
            ({**HI, "max_tokens": 600}, "input length and `max_tokens` exceed context limit"),
        ):
            reply = await server.post("/v1/messages", {"model": "frame-tiny", **more})
            assert reply.status == 400
            assert reply.json()["error"]["message"].startswith(f"{words}: This model's maximum context length is 512 tokens")


async def test_too_many_messages_are_told_by_the_field_that_has_them() -> None:
    many, old = [HI["messages"][0]] * 4097, [{"role": "USER", "message": "hi"}]
    cases: list[tuple[str, dict[str, Any], str]] = [
        (RESPONSES, {"input": many, "truncation": "auto"}, "input has 4097 entries; it may have 4096"),
        (f"{RESPONSES}/input_tokens", {"input": many}, "input has 4097 entries; it may have 4096"),
        ("/v1/messages", {"model": "frame-tiny", "max_tokens": 1, "messages": many}, "messages has 4097 entries; it may have 4096"),
        ("/v1/messages/count_tokens", {"model": "frame-tiny", "system": "s", "messages": many[1:]},
         "messages has 4096 entries; it may have 4095"),
        ("/v1/chat", {"message": "hi", "chat_history": old * 4096}, "chat_history has 4096 entries; it may have 4095"),
        ("/v1/chat", {"message": "hi", "preamble": "p", "chat_history": old * 4095}, "chat_history has 4095 entries; it may have 4094"),
        ("/v1/chat", {"message": "hi", "chat_history": old * 10_000, "prompt_truncation": "AUTO"}, "chat_history has 10000 entries;"),
    ]  # fmt: skip
    async with serving() as server:
        for path, body, sentence in cases:
            reply = await server.post(path, body)
            assert reply.status == 400, path
            message = reply.json()["message"] if path == "/v1/chat" else reply.json()["error"]["message"]
            assert message.startswith(sentence), (path, message)


async def test_messages_that_are_too_many_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("a message was converted")

    monkeypatch.setattr(anthropic, "to_content_parts", never)
    monkeypatch.setattr(cohere_chat_v1, "check_string", never)
    with pytest.raises(ApiError, match="messages has 10000 entries"):
        anthropic.CountTokensRequest(model="m", messages=[{"role": "user", "content": "a"}] * 10_000).to_chat_request()
    with pytest.raises(ApiError, match="chat_history has 10000 entries"):
        cohere_chat_v1.CohereV1Request(message="a", chat_history=[{"role": "USER", "message": "a"}] * 10_000).to_chat_request()


async def test_a_time_limit_is_told_as_it_was_sent() -> None:
    async with serving() as server:
        reply = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "timeout": 0.0001})
        assert reply.status == 504
        assert "took longer than its 0.0001 s" in reply.json()["error"]["message"]
