"""Behaviours that the API tests of vLLM (`tests/entrypoints/openai`) and SGLang
(`test/srt/openai_server`) check, by the `openai` package. docs/compatibility.md lists those that do
not hold."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.clients.conftest import KEY, MODEL

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "What is 2 + 5?"}], "max_completion_tokens": 8}
COMPLETE: dict[str, Any] = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
OPEN: dict[str, Any] = {"ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"result": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["result"]}


# log-probabilities --------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "top"), [(False, None), (True, None), (True, 0), (True, 5)])
def test_logprobs_of_chats(client: openai.OpenAI, wanted: bool, top: int | None) -> None:
    choice = client.chat.completions.create(**ASK, logprobs=wanted, **({} if top is None else {"top_logprobs": top})).choices[0]
    assert (choice.logprobs is not None) == wanted
    if choice.logprobs is not None and choice.logprobs.content is not None:
        assert {len(each.top_logprobs) for each in choice.logprobs.content} == {top or 0}


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_logprobs_leave_the_server_fine(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs is 21; it must be from 0 to 20"):
        client.chat.completions.create(**ASK, logprobs=True, top_logprobs=21, stream=stream)
    with pytest.raises(openai.BadRequestError, match="logprobs is 21"):
        client.completions.create(**COMPLETE, logprobs=21, stream=stream)
    assert client.chat.completions.create(**ASK).choices[0].message.content


@pytest.mark.parametrize("count", [-1, None, 0, 1, 2])
def test_logprobs_of_prompts(client: openai.OpenAI, count: int | None) -> None:
    extra = {} if count is None else {"extra_body": {"prompt_logprobs": count}}
    if count == -1:
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs is -1"):
            client.chat.completions.create(**ASK, **extra)
        return
    chat: Any = client.chat.completions.create(**ASK, **extra)
    text: Any = client.completions.create(**{**COMPLETE, "prompt": ["My name is", "A robot"]}, **extra)
    for found in (getattr(chat, "prompt_logprobs", None), *(getattr(each, "prompt_logprobs", None) for each in text.choices)):
        assert (found is None) == (count is None)
        if found is not None:
            assert found[0] is None
            assert all(max(count or 0, 1) <= len(each) <= (count or 0) + 1 for each in found[1:])


def test_logprobs_of_listed_tokens(client: openai.OpenAI) -> None:
    """The ids of the likeliest tokens have the same values; a token stands once."""
    listed = [10, 100, 300]
    asked: dict[str, Any] = {**ASK, "logprobs": True, "top_logprobs": 2, "temperature": 0}
    plain = client.chat.completions.create(**asked, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs
    assert plain is not None
    assert plain.content is not None
    first = {top.token: top.logprob for top in plain.content[0].top_logprobs}
    likeliest = [int(name.removeprefix("token_id:")) for name in first]
    extra = {"return_tokens_as_token_ids": True, "logprob_token_ids": [*listed, *likeliest]}
    found = client.chat.completions.create(**asked, extra_body=extra).choices[0].logprobs
    assert found is not None
    assert found.content is not None
    for each in found.content:
        names = [top.token for top in each.top_logprobs]
        assert len(names) == len(set(names))
        assert {f"token_id:{token}" for token in listed} <= set(names)
    values = {top.token: top.logprob for top in found.content[0].top_logprobs}
    assert all(values[name] == pytest.approx(value, abs=1e-4) for name, value in first.items())
    assert all(values[f"token_id:{token}"] < 0 for token in listed)
    streamed = client.chat.completions.create(**asked, extra_body=extra, stream=True)
    entries = [entry for chunk in streamed if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or ()]
    assert [entry.top_logprobs for entry in entries] == [entry.top_logprobs for entry in found.content]
    for fields, says in (
        ({"logprob_token_ids": [1]}, "logprob_token_ids needs logprobs"),
        ({"logprob_token_ids": [-1], "logprobs": True}, "logprob_token_ids holds the token id -1, outside the vocabulary"),
        ({"logprob_token_ids": [1] * 129, "logprobs": True}, "logprob_token_ids has 129 ids; it may have 128"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            client.chat.completions.create(**ASK, extra_body=fields)
    url, headers = str(client.base_url).removesuffix("v1/") + "generate", {"authorization": f"Bearer {KEY}"}
    body = {"text": "2 + 5", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True, "top_logprobs_num": 2}
    meta = httpx.post(url, json={**body, "token_ids_logprob": listed}, headers=headers, timeout=60).json()["meta_info"]
    assert [[token for _, token, _ in entries] for entries in meta["output_token_ids_logprobs"]] == [listed] * 3
    assert {len(entries) for entries in meta["output_top_logprobs"]} == {2}
    wrong = httpx.post(url, json={**body, "token_ids_logprob": [10**6]}, headers=headers, timeout=60)
    assert (wrong.status_code, "token_ids_logprob holds the token id 1000000" in wrong.text) == (400, True)


# streams ------------------------------------------------------------------------------------------


def test_a_stream_joins_to_the_whole_response(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, temperature=0).choices[0]
    chunks = list(client.chat.completions.create(**ASK, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [whole.finish_reason]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = client.completions.create(**COMPLETE).choices[0]
    pieces = list(client.completions.create(**COMPLETE, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == text.text
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == text.finish_reason == "length"


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}])
def test_no_usage_in_a_stream(client: openai.OpenAI, options: Any) -> None:
    assert all(chunk.usage is None for chunk in client.chat.completions.create(**ASK, stream=True, stream_options=options))


def test_usage_in_a_stream(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.total_tokens) == ([], last.usage.prompt_tokens + last.usage.completion_tokens)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in client.chat.completions.create(**ASK, stream=True, stream_options=options, extra_body={**OPEN, "min_tokens": 8})
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 8


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": None}, {"continuous_usage_stats": True}])
def test_stream_options_need_a_stream(client: openai.OpenAI, options: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        client.chat.completions.create(**ASK, stream=False, stream_options=options)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(client: openai.OpenAI, stream: bool) -> None:
    more: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 42, "stream": stream}
    texts = ["", "", ""]
    if stream:
        ends = 0
        for chunk in client.completions.create(**{**COMPLETE, **more}):
            texts[chunk.choices[0].index] += chunk.choices[0].text
            ends += chunk.choices[0].finish_reason is not None
        assert ends == 3
    else:
        for index, choice in enumerate(client.completions.create(**{**COMPLETE, **more}).choices):
            assert choice.index == index
            texts[index] = choice.text
    assert len(set(texts)) > 1


# structured outputs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["Python", "Rust"]}}, "Python|Rust"),
        ({"structured_outputs": {"regex": r"((25[0-5]|1?[0-9]{1,2})\.){3}[0-9]"}}, r"[0-9.]+"),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"result": ?\d+\}'),
        ({"guided_choice": ["Python", "Rust"]}, "Python|Rust"),
        ({"regex": "[ab]{4}"}, "[ab]{4}"),
        ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, r'\{"result": ?\d+\}'),
    ],
)
def test_structured_outputs(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    asked = {**ASK, "max_completion_tokens": 64}
    choice = client.chat.completions.create(**asked, logprobs=True, top_logprobs=5, extra_body=fields).choices[0]
    assert re.fullmatch(pattern, choice.message.content or "")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert all(top.logprob >= -9999 for each in choice.logprobs.content for top in each.top_logprobs)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"structured_outputs": {"regex": {"1": "Python"}}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"regex": "("}, "regex"),
    ],
)
def test_structured_outputs_that_are_wrong(client: openai.OpenAI, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.chat.completions.create(**ASK, extra_body=fields)


# messages and prompts -----------------------------------------------------------------------------


def test_fields_and_contents_of_messages(client: openai.OpenAI) -> None:
    def said(**message: Any) -> str | None:
        asked: Any = {**ASK, "messages": [message]}
        return client.chat.completions.create(**asked, temperature=0, seed=0).choices[0].message.content

    plain = said(role="user", content="What is 2 + 5?")
    assert plain == said(role="user", content="What is 2 + 5?", extra_field="0")
    assert plain == said(role="user", content=[{"type": "text", "text": "What is 2 + 5?"}])
    custom = said(role="my-custom-role", content="What is 2 + 5?")
    assert custom == said(role="my-custom-role", content=[{"type": "text", "text": "What is 2 + 5?"}])


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63, 2**64])
def test_seeds_out_of_range(client: openai.OpenAI, seed: int) -> None:
    with pytest.raises(openai.BadRequestError, match="seed"):
        client.chat.completions.create(**ASK, seed=seed)


def test_prompts_that_are_refused(client: openai.OpenAI) -> None:
    wrong: list[tuple[Any, str]] = [([], "prompt is empty"), ([999_999], "outside the vocabulary"), (["a", [1]], "mixes"), (None, "prompt")]
    for prompt, says in wrong:
        with pytest.raises(openai.BadRequestError, match=says):
            client.completions.create(**{**COMPLETE, "prompt": prompt})
    with pytest.raises(openai.BadRequestError, match="prompt_embeds is not supported; send text or token ids"):
        client.completions.create(**COMPLETE, extra_body={"prompt_embeds": "AAAA"})


def test_lengths_out_of_range(client: openai.OpenAI) -> None:
    long: Any = {**ASK, "messages": [{"role": "user", "content": "hello " * 20_000}]}
    with pytest.raises(openai.BadRequestError, match="tokens") as caught:
        client.chat.completions.create(**long)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens|max_tokens"):
        client.chat.completions.create(**{**ASK, "max_completion_tokens": 10_000_000})
    kept: Any = client.completions.create(
        **{**COMPLETE, "prompt": list(range(6, 14))},
        extra_body={"truncate_prompt_tokens": 4, "truncation_side": "right", "return_token_ids": True},
    )
    assert kept.choices[0].prompt_token_ids == [6, 7, 8, 9]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 5])
def test_completions_of_texts_and_ids(client: openai.OpenAI, echo: bool, logprobs: int | None) -> None:
    tokens = httpx.post(
        str(client.base_url.join("/tokenize")), json={"prompt": COMPLETE["prompt"]}, headers={"authorization": f"Bearer {KEY}"}
    ).json()["tokens"]
    for prompts in ([COMPLETE["prompt"]] * 2, [tokens, tokens]):
        reply = client.completions.create(**{**COMPLETE, "prompt": prompts}, echo=echo, logprobs=logprobs, n=2)
        assert len(reply.choices) == 4
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == 2 * len(tokens)
        assert all(choice.text.startswith("def add") == echo for choice in reply.choices)
        assert all((choice.logprobs is None) == (logprobs is None) for choice in reply.choices)


# ends, prefills, models ---------------------------------------------------------------------------


def test_what_ended_a_response(client: openai.OpenAI) -> None:
    stopped: Any = client.chat.completions.create(**{**ASK, "max_completion_tokens": 40}, stop=["7"]).choices[0]
    assert (stopped.finish_reason, stopped.matched_stop) == ("stop", "7")
    ended: Any = client.chat.completions.create(**{**ASK, "max_completion_tokens": 40}, temperature=0).choices[0]
    assert (ended.finish_reason, isinstance(ended.matched_stop, int)) == ("stop", True)
    cut: Any = client.chat.completions.create(**ASK, extra_body=OPEN)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 8)


def test_a_response_continues_a_message(client: openai.OpenAI) -> None:
    messages: Any = [*ASK["messages"], {"role": "assistant", "content": "The sum is"}]
    said = client.chat.completions.create(
        **{**ASK, "messages": messages}, extra_body={"continue_final_message": True, "add_generation_prompt": False}
    )
    assert said.choices[0].message.content is not None


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list()
    found: Any = client.models.retrieve(MODEL)
    assert (found.id, found.root, found.parent, isinstance(found.max_model_len, int)) == (MODEL, MODEL, None, True)
    assert card.id == MODEL
    assert found.permission[0]["allow_sampling"] is True
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**ASK, "model": "no-such-model"})


def test_bodies_that_are_no_requests(client: openai.OpenAI) -> None:
    url, headers = str(client.base_url.join("chat/completions")), {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    for body in (b"", b"{", b"[]", b'"text"', json.dumps({"model": MODEL}).encode()):
        reply = httpx.post(url, content=body, headers=headers)
        assert (reply.status_code, bool(reply.json()["error"]["message"])) == (400, True), body
