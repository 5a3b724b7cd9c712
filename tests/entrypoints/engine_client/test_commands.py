"""Commands find their answers, end when nobody answers, and a new engine is told what must stay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frame.core.messages import Control, ControlReply
from frame.entrypoints.engine_client.commands import Controls
from frame.entrypoints.engine_client.limits import EngineDeadError


async def asked(controls: Controls, sent: list[Any], action: str, **reply: Any) -> ControlReply:
    waiting = asyncio.ensure_future(controls.ask(action, {}))
    await asyncio.sleep(0)
    controls.take(ControlReply(id="somebody else's", ok=True))
    controls.take(ControlReply(id=sent[-1].id, **reply))
    return await waiting


async def test_answers_and_deaths() -> None:
    sent: list[Any] = []
    controls = Controls(sent.append)
    assert (await asked(controls, sent, "server_info", ok=True, data={"x": 1})).data == {"x": 1}
    waiting = asyncio.ensure_future(controls.ask("ping", {}))
    await asyncio.sleep(0)
    controls.refuse("it died")
    with pytest.raises(EngineDeadError, match="it died"):
        await waiting


async def test_a_pause_outlives_the_engine_that_was_told() -> None:
    sent: list[Any] = []
    controls = Controls(sent.append)
    for action, repeated in (("flush_cache", 0), ("pause", 1), ("resume", 0)):
        await asked(controls, sent, action, ok=True)
        before = len(sent)
        controls.repeat()
        assert len(sent) - before == repeated
    await asked(controls, sent, "pause", ok=False, error="no")
    controls.repeat()
    assert [message.action for message in sent if isinstance(message, Control)][-2:] == ["resume", "pause"]  # asked, not repeated
