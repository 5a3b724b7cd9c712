"""Commands match their replies and fail when the engine crashes; a restarted engine stays
paused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frame.core.messages import Control, ControlReply
from frame.entrypoints.engine_client import commands as commands_module
from frame.entrypoints.engine_client.commands import EngineCommands
from frame.entrypoints.engine_client.limits import EngineDeadError


async def send(commands: EngineCommands, sent: list[Any], action: str, **reply: Any) -> ControlReply:
    waiting = asyncio.ensure_future(commands.send_command(action, {}))
    await asyncio.sleep(0)
    commands.receive_reply(ControlReply(id="another", ok=True))
    commands.receive_reply(ControlReply(id=sent[-1].id, **reply))
    return await waiting


async def test_replies_and_crashes() -> None:
    sent: list[Any] = []
    commands = EngineCommands(sent.append)
    assert (await send(commands, sent, "server_info", ok=True, data={"x": 1})).data == {"x": 1}
    waiting = asyncio.ensure_future(commands.send_command("ping", {}))
    await asyncio.sleep(0)
    commands.fail_pending("it crashed")
    with pytest.raises(EngineDeadError, match="it crashed"):
        await waiting


async def test_a_command_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands_module, "CONTROL_TIMEOUT", 0.01)
    with pytest.raises(TimeoutError, match="the engine did not answer flush_cache within 0.01 s; it may still do it"):
        await EngineCommands([].append).send_command("flush_cache", {})


async def test_a_pause_survives_a_restart() -> None:
    sent: list[Any] = []
    commands = EngineCommands(sent.append)
    for action, repeated in (("flush_cache", 0), ("pause", 1), ("resume", 0)):
        await send(commands, sent, action, ok=True)
        before = len(sent)
        commands.restore_state()
        assert len(sent) - before == repeated
    await send(commands, sent, "pause", ok=False, error="no")
    commands.restore_state()
    assert [message.action for message in sent if isinstance(message, Control)][-2:] == ["resume", "pause"]  # sent above, not repeated


async def test_a_level_is_that_of_the_tags_that_it_came_with() -> None:
    """Weights that level 1 has kept are not dropped by a release of the KV cache."""
    sent: list[Any] = []
    commands = EngineCommands(sent.append)
    for tag, level, released in (("weights", 1, ["weights"]), ("kv_cache", 2, ["weights", "kv_cache"])):
        waiting = asyncio.ensure_future(commands.send_command("sleep", {"tags": [tag], "level": level}))
        await asyncio.sleep(0)
        commands.receive_reply(ControlReply(id=sent[-1].id, ok=True, data={"released": released}))
        await waiting
    assert not commands.lacks_weights
    commands.restore_state()
    assert sent[-1].arguments == {"tags": ["weights", "kv_cache"], "level": 1}


async def test_a_reply_counts_although_its_client_has_left() -> None:
    sent: list[Any] = []
    commands = EngineCommands(sent.append)
    for action, data in (("pause", {}), ("sleep", {"released": ["kv_cache"]})):
        waiting = asyncio.ensure_future(commands.send_command(action, {}))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        commands.receive_reply(ControlReply(id=sent[-1].id, ok=True, data=data))
    assert commands.is_paused and commands.sleep_problem is not None
