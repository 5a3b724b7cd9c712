"""The OpenAI API of a running server, used with the `openai` package."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from frame.text.tokenizer import Tokenizer
from tests.entrypoints.serving import RunningServer

MESSAGES = [{"role": "user", "content": "Tell me about the quick brown fox."}]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def greedy(client: openai.OpenAI, name: str, prompt: object, count: int = 12, **more: object) -> openai.types.Completion:
    return client.completions.create(model=name, prompt=prompt, max_tokens=count, temperature=0, **more)  # type: ignore[call-overload]


def test_models(client: openai.OpenAI, name: str) -> None:
    assert name == "tiny-llama"
    assert client.models.retrieve(name).id == name


def test_streamed_and_whole_chat_completions_are_equal(client: openai.OpenAI, name: str) -> None:
    ask = {"model": name, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    # The prompt was in the prefix cache
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_continuous_usage_stats(client: openai.OpenAI, name: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=8, temperature=0, stream=True, stream_options=options)  # type: ignore[call-overload]
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_prompts_as_text_token_ids_and_lists_give_equal_completions(client: openai.OpenAI, name: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick")
    by_text, by_ids = greedy(client, name, "The quick"), greedy(client, name, ids)
    both = greedy(client, name, ["The quick", "A request"])
    assert by_text.choices[0].text == by_ids.choices[0].text == both.choices[0].text
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[1].text == greedy(client, name, "A request").choices[0].text
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == len(ids)


def test_echo_and_logprobs(client: openai.OpenAI, name: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick")
    choice = greedy(client, name, "The quick", 4, echo=True, logprobs=2).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.tokens is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert len(found.tokens) == len(ids) + 4
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert choice.text.startswith("The quick")
    # Two ids may have the same text
    assert all(1 <= len(top) <= 3 for top in found.top_logprobs[1:])
    for token, logprob, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[len(ids) :]:
        assert top[token] == max(top.values()) == logprob  # greedy
    response = greedy(client, name, "The quick", 0, echo=True, logprobs=1)
    alone = response.choices[0]
    assert response.usage is not None
    assert (response.usage.completion_tokens, response.usage.total_tokens) == (0, len(ids))
    assert alone.text == "The quick"
    assert alone.logprobs is not None
    assert alone.logprobs.token_logprobs == pytest.approx(found.token_logprobs[: len(ids)], abs=1e-4)


def test_prompt_logprobs_equal_those_of_echo(client: openai.OpenAI, name: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick")
    echoed = greedy(client, name, ids, 1, echo=True, logprobs=0).choices[0].logprobs
    asked = greedy(client, name, ids, 1, extra_body={"prompt_logprobs": 2}).choices[0]
    assert echoed is not None
    found = asked.prompt_logprobs  # type: ignore[attr-defined]
    assert found[0] is None
    assert [entry[str(i)]["logprob"] for i, entry in zip(ids[1:], found[1:], strict=True)] == pytest.approx(
        echoed.token_logprobs[1 : len(ids)],  # type: ignore[index]
        abs=1e-4,
    )
    assert all({1, 2} <= {alternative["rank"] for alternative in entry.values()} for entry in found[1:])
    # Unlikely tokens too
    assert all(entry[str(i)]["rank"] > 0 for i, entry in zip(ids[1:], found[1:], strict=True))
    with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
        greedy(client, name, ids, 1, stream=True, extra_body={"prompt_logprobs": 2})


def test_echo_omits_special_tokens(client: openai.OpenAI, name: str, tokenizer: Tokenizer) -> None:
    special = min(tokenizer.special_ids)
    ids = [special, *tokenizer.encode("größe"), special, *tokenizer.encode(" x")]
    choice = greedy(client, name, ids, 1, echo=True, logprobs=0).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset is not None
    assert choice.text.startswith("größe x")
    assert choice.logprobs.text_offset[:2] == [0, 0]  # an omitted token has no length
    assert choice.logprobs.text_offset[len(ids)] == len("größe x")
    shown = greedy(client, name, ids, 1, echo=True, extra_body={"skip_special_tokens": False}).choices[0].text
    assert shown.startswith(tokenizer.decode(ids, False))


def test_chat_logprobs(client: openai.OpenAI, name: str) -> None:
    ask = {"model": name, "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content  # type: ignore[call-overload]
    chunks = client.chat.completions.create(**ask, stream=True)  # type: ignore[call-overload]
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert len(whole) == 5
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob == entry.logprob for entry in whole)


def test_n_choices_differ_and_the_first_equals_a_single_one(client: openai.OpenAI, name: str) -> None:
    ask = {"model": name, "prompt": "The", "max_tokens": 12, "temperature": 1.0, "seed": 7}
    three = client.completions.create(**ask, n=3)  # type: ignore[call-overload]
    texts = [choice.text for choice in three.choices]
    assert len(set(texts)) == 3
    assert texts[0] == client.completions.create(**ask).choices[0].text  # type: ignore[call-overload]
    assert three.usage.completion_tokens == 36
    chunks = list(client.completions.create(**ask, n=3, stream=True))  # type: ignore[call-overload]
    streamed = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in range(3)]
    assert streamed == texts


def test_stop_strings(client: openai.OpenAI, name: str) -> None:
    text = greedy(client, name, "The quick", 40).choices[0].text
    stop = text[12:15]
    cut = text[: text.index(stop)]
    stop_chunks = list(greedy(client, name, "The quick", 40, stop=stop, stream=True, logprobs=0))  # type: ignore[call-overload]
    offsets = [offset for c in stop_chunks if c.choices[0].logprobs for offset in c.choices[0].logprobs.text_offset]
    assert offsets == greedy(client, name, "The quick", 40, stop=stop, logprobs=0).choices[0].logprobs.text_offset  # type: ignore[union-attr]
    stopped = greedy(client, name, "The quick", 40, stop=[stop, "\x00never"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (cut, "stop")
    kept = greedy(client, name, "The quick", 40, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == cut + stop
    chunks = list(greedy(client, name, "The quick", 40, stop=stop, stream=True))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_equal_seeds_give_equal_text(client: openai.OpenAI, name: str) -> None:
    ask = {"model": name, "prompt": "The", "max_tokens": 12, "temperature": 1.0}
    texts = [client.completions.create(**ask, seed=seed).choices[0].text for seed in (3, 3, 4)]  # type: ignore[call-overload]
    assert texts[0] == texts[1] != texts[2]


INVALID = {
    "n": ({"n": 0}, 400, "n"),
    "temperature": ({"temperature": -1}, 400, "temperature"),
    "top_p": ({"top_p": 2}, 400, "top_p"),
    "logprobs": ({"logprobs": 99}, 400, "logprobs"),
    "long": ({"prompt": [5] * 600}, 400, "prompt"),
    "max_tokens": ({"max_tokens": 5000}, 400, "max_tokens"),
    "vocabulary": ({"prompt": [100_000]}, 400, "prompt"),
    "empty": ({"prompt": []}, 400, "prompt"),
    "mixed": ({"prompt": ["a", 1]}, 400, "prompt"),
    "suffix": ({"suffix": "x"}, 400, "suffix"),
    "bias": ({"logit_bias": {"100000": 1}}, 400, "logit_bias"),
    "response_format": ({"response_format": {"type": "xml"}}, 400, "response_format"),
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}, 400, "response_format"),
    "reference": ({"guided_json": {"type": "array", "items": {"$ref": "http://x/y.json"}}}, 400, "guided_json"),
    "structured": ({"structured_outputs": {"regex": "("}}, 400, "structured_outputs.regex"),
    "grammars": ({"guided_regex": "a", "ebnf": "b"}, 400, "guided_regex"),
    "same": ({"regex": "a", "guided_regex": "b"}, 400, "regex"),
    "model": ({"model": "gpt-4"}, 404, "model"),
    "type": ({"max_tokens": "many"}, 400, "max_tokens"),
    "stop": ({"stop": ["x"] * 40}, 400, "stop"),
    "top_k": ({"top_k": 2**40}, 400, "top_k"),
    "min_tokens": ({"min_tokens": 2**70}, 400, "min_tokens"),
    "priority": ({"priority": 2**70}, 400, "priority"),
    "ends": ({"stop_token_ids": list(range(3)) * 30}, 400, "stop_token_ids"),
    "end": ({"stop_token_ids": [2**70]}, 400, "stop_token_ids"),
    "impossible": ({"ebnf": "root ::= root"}, 400, "ebnf"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", INVALID)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_parameter(server: RunningServer, name: str, case: str, stream: bool) -> None:
    change, status, param = INVALID[case]
    response = server.post("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 2, "stream": stream, **change})
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert greedy_still_works(server)
    assert server.get("/server_info")["outstanding"] == 0


@pytest.mark.slow
def test_grammars_constrain_the_output(client: openai.OpenAI, name: str) -> None:
    ask = {"model": name, "messages": MESSAGES, "max_tokens": 60}
    choice = client.chat.completions.create(**ask, extra_body={"regex": "(yes|no)!"}).choices[0]  # type: ignore[call-overload]
    assert choice.message.content in ("yes!", "no!")
    assert choice.finish_reason == "stop"
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    text = client.chat.completions.create(**ask, response_format=form).choices[0].message.content  # type: ignore[call-overload]
    assert text.startswith("{")
    with pytest.raises(openai.BadRequestError, match="invalid grammar"):
        client.chat.completions.create(**ask, extra_body={"regex": "(("})  # type: ignore[call-overload]


def test_reasoning_and_tool_calls_are_separated(client: openai.OpenAI, name: str) -> None:
    # A regex, because the model knows no tools
    wanted = '<think>why</think>ok<tool_call>\\n\\{"name": "f", "arguments": \\{"x": [0-9]\\}\\}\\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    ask = {"model": name, "messages": MESSAGES, "max_tokens": 200, "temperature": 0, "tools": tools, "extra_body": {"regex": wanted}}
    whole = client.chat.completions.create(**ask).choices[0]  # type: ignore[call-overload]
    call = whole.message.tool_calls[0].function
    assert (whole.finish_reason, whole.message.content, whole.message.reasoning_content) == ("tool_calls", "ok", "why")
    assert (call.name, set(json.loads(call.arguments))) == ("f", {"x"})
    chunks = list(client.chat.completions.create(**ask, stream=True))  # type: ignore[call-overload]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "why"
    assert "".join(delta.content or "" for delta in deltas) == "ok"
    calls = [each for delta in deltas for each in delta.tool_calls or ()]
    assert calls[0].function.name == "f"
    assert "".join(each.function.arguments for each in calls) == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    plain = client.chat.completions.create(**{**ask, "tool_choice": "none"}).choices[0]  # type: ignore[call-overload]
    assert "<tool_call>" in plain.message.content


def test_reasoning_tokens_are_counted(client: openai.OpenAI, name: str) -> None:
    ask = {"model": name, "messages": MESSAGES, "max_tokens": 200, "temperature": 0, "n": 2, "logprobs": True}
    wanted = {"extra_body": {"regex": "<think>why not then</think>[a-c]{3}"}}
    whole = client.chat.completions.create(**ask, **wanted)  # type: ignore[call-overload]
    thought, found = "<think>why not then</think>", 0
    for choice in whole.choices:
        text = ""
        for token in choice.logprobs.content:
            found += len(text) < len(thought)
            text += token.token
        assert text.startswith(thought)
    assert whole.usage.completion_tokens_details.reasoning_tokens == found > 2
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.chat.completions.create(**ask, **wanted, **stream)  # type: ignore[call-overload]
    assert last.usage == whole.usage
    plain = client.chat.completions.create(**ask, extra_body={"regex": "[a-c]{3}"})  # type: ignore[call-overload]
    assert plain.usage.completion_tokens_details.reasoning_tokens == 0
    reply = client.responses.create(model=name, input="hi", max_output_tokens=200, temperature=0, **wanted)  # type: ignore[call-overload]
    assert reply.usage.output_tokens_details.reasoning_tokens == found // 2


def greedy_still_works(server: RunningServer) -> bool:
    return server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_openai_client_raises_its_exceptions(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        greedy_with = {"model": name, "prompt": "x", "temperature": -1}
        client.completions.create(**greedy_with)  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="x")


def test_invalid_messages_are_refused(server: RunningServer) -> None:
    cases = (([], "messages"), ([{"content": "x"}], "messages[0].role"), ([{"role": "user", "content": 3}], "messages[0].content"))
    cases += (([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),)
    for messages, param in cases:
        response = server.post("/v1/chat/completions", {"messages": messages})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    parts = [{"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}]
    assert "this model takes text only" in server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}).text
    joined = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert server.post("/v1/chat/completions", {"messages": joined, "max_tokens": 1}).status_code == 200


def test_malformed_bodies(server: RunningServer) -> None:
    import httpx

    deep = b'{"prompt": "x", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": }', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', deep):
        response = httpx.post(server.url + "/v1/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
    refused = httpx.get(server.url + "/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert "use GET" in server.post("/v1/models/some", {}).json()["error"]["message"]
    assert httpx.get(server.url + "/v1/models/").json() == httpx.get(server.url + "/v1/models").json()
    assert server.post("/v1/completions", {}).json()["error"]["param"] == "prompt"
    assert "there is no /v3" in httpx.get(server.url + "/v3").json()["error"]["message"]
    assert "there is no /v2/generate" in httpx.post(server.url + "/v2/generate").json()["message"]  # Cohere's
    assert "there is no /api/pull" in httpx.post(server.url + "/api/pull").json()["error"]  # Ollama's
