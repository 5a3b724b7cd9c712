"""Routes that count or render check a request as the routes that run it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.entrypoints.inprocess import serving

HI = [{"role": "user", "content": "hi"}]
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions/render": ("/v1/completions", {"prompt": "hi"}),
    "/v1/chat/completions/render": ("/v1/chat/completions", {"messages": HI}),
    "/v1/responses/input_tokens": ("/v1/responses", {"input": "hi"}),
    "/v1/messages/count_tokens": ("/v1/messages", {"model": "frame-tiny", "messages": HI}),
}
WRONG: list[dict[str, Any]] = [
    {"min_p": -1}, {"top_k": -5}, {"timeout": -1}, {"priority": 1 << 40}, {"truncate_prompt_tokens": 0}, {"rid": "a" * 5000},
    {"max_tokens": 1 << 53}, {"n": 200},
]  # fmt: skip


@pytest.mark.parametrize("path", PAIRS)
async def test_what_a_run_refuses_is_refused(path: str) -> None:
    real, body = PAIRS[path]
    async with serving() as server:
        assert (await server.post(path, body)).status == 200
        for fields in WRONG:
            if "render" not in path and fields.keys() & {"max_tokens", "n", "truncate_prompt_tokens"}:
                continue  # no field there, or of no effect on a count
            more = {"max_tokens": 2} if real == "/v1/messages" else {}
            refused, found = await server.post(real, {**body, **more, **fields}), await server.post(path, {**body, **fields})
            assert (found.status, refused.status) == (400, 400), (fields, found.body)
            assert found.json()["error"] == refused.json()["error"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": "hi", "return_logprob": True, "logprob_start_len": 10**15}, "logprob_start_len"),
        ("/generate", {"text": "hi", "sampling_params": []}, "sampling_params"),
        ("/v1/responses", {"input": "hi", "prompt": 0}, "prompt"),
        ("/v1/responses", {"input": "hi", "prompt": True}, "prompt"),
        ("/v1/responses", {"input": "hi", "prompt": {"id": "a"}}, "prompt"),
    ],
)
async def test_values_without_a_meaning_are_refused(path: str, body: dict[str, Any], param: str) -> None:
    async with serving() as server:
        reply = await server.post(path, body)
        assert (reply.status, reply.json()["error"]["param"]) == (400, param)
        empties: list[Any] = [None, {}, "", [], False]
        for empty in empties:
            if path == "/v1/responses":
                assert (await server.post(path, {**body, "max_output_tokens": 2, "prompt": empty})).status == 200
