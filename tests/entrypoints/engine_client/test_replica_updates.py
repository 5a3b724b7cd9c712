"""`ReplicaUpdates` with engines that crash in every phase: replicas that serve at the same time
have the same weights."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frame.core.messages import Control, ControlReply, Message
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.engine_client.replicas import ReplicaClient
from frame.entrypoints.engine_client.stats import Outstanding
from tests.entrypoints.engine_client.test_client import LIMITS
from tests.entrypoints.engine_client.test_replicas import make_chooser
from tests.entrypoints.submitting import Link

ARGUMENTS = {"path": "/new", "version": "new", "abort": False}


class Replica:
    """An engine and its supervisor. `crashes_at`: phases in which the engine ends before it
    replies; `refuses`: a phase that it refuses. `history` of all replicas: what each serves, after
    every event."""

    def __init__(self, number: int, history: list[set[str]], everyone: list[Replica], outstanding: Outstanding) -> None:
        self.number, self.history, self.everyone = number, history, everyone
        self.link = Link()
        self.link.send = self.handle  # type: ignore[method-assign]
        self.client = EngineClient(self.link, LIMITS, outstanding=outstanding)  # type: ignore[arg-type]
        self.client.watch_weights(lambda folder, version: setattr(self, "next_version", version))
        self.version = self.next_version = "old"
        self.loaded = ""  # by the phase "load"
        self.is_held = False
        self.crashes_at: list[str] = []
        self.refuses = ""
        self.phases: list[str] = []
        self.restart_after: asyncio.Event = asyncio.Event()
        self.restart_after.set()
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def serves(self) -> str | None:
        return None if self.is_held or self.client.unavailable_reason or self.client.dead_reason else self.version

    def handle(self, message: Message) -> None:
        if isinstance(message, Control):
            asyncio.get_running_loop().call_soon(self.carry_out, message)

    def carry_out(self, control: Control) -> None:
        phase = control.arguments.get("phase", control.action)
        self.phases.append(phase)
        if phase in self.crashes_at:
            self.crashes_at.remove(phase)
            self.client.begin_recovery("it crashed", {})
            self.tasks.append(asyncio.ensure_future(self.restart()))
        elif phase == self.refuses:
            self.reply(control, ok=False, error="no", code="invalid")
        elif phase == "check":
            self.is_held = True
            self.reply(control, ok=True)
        elif phase in ("load", "update_weights"):
            self.version = str(control.arguments["version"])
            self.is_held = phase == "load"
            self.reply(control, ok=True, data={"weights_path": "/new", "weight_version": self.version, "num_preempted": 2})
        else:
            self.is_held = False if phase in ("commit", "cancel") else self.is_held
            self.reply(control, ok=True)
        self.note()

    def reply(self, control: Control, **fields: Any) -> None:
        self.client.handle_messages([ControlReply(id=control.id, **fields)])

    async def restart(self) -> None:
        """As the supervisor does: the new engine has the weights of the moment of its start."""
        self.version, self.is_held = self.next_version, False
        await self.restart_after.wait()
        self.client.resume_requests()
        self.note()

    def note(self) -> None:
        self.history.append({version for each in self.everyone if (version := each.serves) is not None})


def make(count: int = 2) -> tuple[ReplicaClient, list[Replica]]:
    everyone: list[Replica] = []
    history: list[set[str]] = []
    outstanding = Outstanding()
    everyone += [Replica(number, history, everyone, outstanding) for number in range(count)]
    return ReplicaClient([each.client for each in everyone], make_chooser()), everyone


async def end(everyone: list[Replica]) -> list[str | None]:
    """What the replicas serve when all are back."""
    for _ in range(50):
        await asyncio.sleep(0)
        for each in everyone:
            each.note()
    for each in everyone:
        await asyncio.gather(*each.tasks)
    assert all(len(served) <= 1 for served in everyone[0].history), "two versions were served at once"
    return [each.serves for each in everyone]


async def test_an_update_has_three_phases() -> None:
    client, everyone = make(3)
    reply = await client.send_command("update_weights", **ARGUMENTS)
    assert reply.ok and reply.data["num_preempted"] == 6
    assert [each.phases for each in everyone] == [["check", "load", "commit"]] * 3
    assert await end(everyone) == ["new"] * 3
    assert client.commands.weight_version == "new"


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "after the update"])
@pytest.mark.parametrize("phase", ["check", "load", "commit"])
async def test_a_replica_that_crashes(phase: str, is_late: bool) -> None:
    client, everyone = make(3)
    everyone[1].crashes_at = [phase]
    if is_late:
        everyone[1].restart_after.clear()
    update = asyncio.ensure_future(client.send_command("update_weights", **ARGUMENTS))
    if phase == "check":
        with pytest.raises(EngineDeadError, match="replica 1: it crashed; .* all replicas serve the old ones"):
            await update
        assert "cancel" in everyone[0].phases
    else:
        assert (await update).ok
    everyone[1].restart_after.set()
    assert await end(everyone) == ["old" if phase == "check" else "new"] * 3
    if phase == "check":
        assert (await client.send_command("update_weights", **ARGUMENTS)).ok
        assert await end(everyone) == ["new"] * 3


async def test_a_replica_that_crashes_again_while_it_is_restored() -> None:
    client, everyone = make()
    everyone[0].crashes_at = ["load", "update_weights"]
    assert (await client.send_command("update_weights", **ARGUMENTS)).ok
    assert await end(everyone) == ["new", "new"]


async def test_all_replicas_crash_while_they_load() -> None:
    """As when the files break after the check."""
    client, everyone = make()
    for each in everyone:
        each.crashes_at = ["load"]
    with pytest.raises(EngineDeadError, match="all replicas serve the old ones"):
        await client.send_command("update_weights", **ARGUMENTS)
    assert await end(everyone) == ["old", "old"]


async def test_a_refusal_names_the_replica_and_frees_the_others() -> None:
    client, everyone = make()
    everyone[1].refuses = "check"
    reply = await client.send_command("update_weights", **ARGUMENTS)
    assert (reply.ok, reply.error, reply.code) == (False, "replica 1: no", "invalid")
    assert everyone[0].phases == ["check", "cancel"]
    assert await end(everyone) == ["old", "old"]


async def test_a_replica_that_cannot_get_the_weights_of_the_others_ends() -> None:
    client, everyone = make()
    everyone[1].crashes_at, everyone[1].refuses = ["load"], "update_weights"
    assert (await client.send_command("update_weights", **ARGUMENTS)).ok
    assert await end(everyone) == ["new", None]
    assert "cannot load the weights that the others serve: no" in (everyone[1].client.dead_reason or "")


async def test_no_update_begins_while_a_replica_is_away() -> None:
    client, everyone = make()
    everyone[1].client.begin_recovery("it crashed", {})
    with pytest.raises(EngineDeadError, match="replica 1: it crashed"):
        await client.send_command("update_weights", **ARGUMENTS)
    assert everyone[0].phases == []
    everyone[1].client.resume_requests()
    assert (await client.send_command("update_weights", **ARGUMENTS)).ok


async def test_a_client_that_leaves_does_not_stop_an_update() -> None:
    client, everyone = make()
    update = asyncio.ensure_future(client.send_command("update_weights", **ARGUMENTS))
    while "check" not in everyone[0].phases:  # noqa: ASYNC110 - each turn is one event
        await asyncio.sleep(0)
    update.cancel()
    while "commit" not in everyone[1].phases:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert await end(everyone) == ["new", "new"]


async def test_a_pause_reaches_a_replica_that_crashed_meanwhile() -> None:
    client, everyone = make()
    everyone[1].crashes_at = ["pause"]
    assert (await client.send_command("pause", mode="keep")).ok
    assert [each.phases.count("pause") for each in everyone] == [1, 2]
    assert [each.client.commands.is_paused for each in everyone] == [True, True]
