"""Errors of realtime sessions name the field that the client sent, in the event that has it."""

from __future__ import annotations

import pytest

from tests.security.test_realtime import QUESTION, site


async def test_an_input_that_does_not_fit_is_named() -> None:
    async with site() as made:
        client = await made.open()
        long = {**QUESTION, "content": [{"type": "input_text", "text": "word " * 600}]}
        client.send({"type": "session.update", "session": {"type": "realtime", "truncation": "disabled"}})
        client.send({"type": "response.create", "response": {"input": [long]}})
        assert (await client.error())["param"] == "response.input"
        client.writer.close()


@pytest.mark.parametrize("kind", ["session", "response"])
async def test_tools_that_no_response_can_have_are_refused_at_once(kind: str) -> None:
    event = {"session": "session.update", "response": "response.create"}[kind]
    tool = {"type": "function", "name": "f", "parameters": {}}
    async with site() as made:
        client = await made.open()
        for tools, param in (
            ([{**tool, "parameters": 5}], f"{kind}.tools[0].parameters"),
            ([tool, {**tool, "name": "a b"}], f"{kind}.tools[1].name"),
            ([tool, tool], f"{kind}.tools"),
        ):
            client.send({"type": event, kind: {"tools": tools} | ({"type": "realtime"} if kind == "session" else {})})
            error = await client.error()
            assert (error["param"], param in error["message"]) == (param, True), error
        client.writer.close()
