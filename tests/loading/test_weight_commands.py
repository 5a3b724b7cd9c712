"""Updates of the weights on rank 0: the order of the steps, and what a failure leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frame.core.interfaces.runner import DeviceLost, TransferOrder, WeightOrder
from frame.core.messages import Control, ControlReply
from frame.interfaces.weight_transfer import WeightTransferCapabilities
from frame.loading import weight_commands
from frame.loading.weight_commands import JOINING, CommandSettings, WeightCommands
from frame.testing.fake_runner import FakeRunner

CONTROL = Control(id="1", action="update_weights", arguments={"path": "/new", "version": "v1"})
TRANSFERS = {"group": WeightTransferCapabilities(joins=True), "ipc": WeightTransferCapabilities(shares=True)}
SPEC = {"name": "a", "dtype": "float32", "shape": [2]}


class Recording(FakeRunner):
    """Records orders. `errors`: what each action of an order yields."""

    def __init__(self, **errors: str) -> None:
        self.errors = errors
        self.calls: list[Any] = []

    def update_weights(self, order: WeightOrder | TransferOrder, beat: Callable[[], object]) -> str:
        action = order.action if isinstance(order, TransferOrder) else "check_folder" if order.is_check else "load_folder"
        self.calls.append(action)
        beat()
        return self.errors.get(action, "")


class Rig:
    """Rank 0's commands over a runner that records them."""

    def __init__(self, settings: CommandSettings | None = None, **errors: str) -> None:
        self.runner = Recording(**errors)
        self.info: dict[str, Any] = {"weight_version": "default"}
        self.commands = WeightCommands(self.runner, self.info, settings or CommandSettings(transfers=TRANSFERS))

    @property
    def calls(self) -> list[str]:
        """The orders since the last look."""
        found, self.runner.calls = self.runner.calls, []
        return found

    def clear(self) -> int:
        self.runner.calls.append("clear")
        return 3

    def update(self) -> ControlReply:
        reply = self.commands.update(CONTROL, self.clear, int)
        assert reply is not None
        return reply

    def step(self, step: str, **arguments: Any) -> ControlReply:
        """The reply, at once or after a rendezvous that ends at once."""
        reply = self.begin(step, **arguments)
        if reply is None:
            (reply,) = self.commands.take_replies(int)
        return reply

    def begin(self, step: str, number: str = "2", **arguments: Any) -> ControlReply | None:
        return self.commands.update(Control(number, "transfer_weights", {"step": step, **arguments}), self.clear, int)

    def part(self, *names: str, kind: str = "ipc", **arguments: Any) -> ControlReply:
        tensors = [{**SPEC, "name": name} for name in names or ("a",)]
        return self.step("part", kind=kind, part={"tensors": tensors}, **arguments)

    def refuse(self, reply: ControlReply, code: str, sentence: str) -> None:
        assert (reply.ok, reply.code) == (False, code) and sentence in (reply.error or ""), reply


def test_requests_are_cleared_between_check_and_load() -> None:
    rig = Rig()
    reply = rig.update()
    assert rig.calls == ["check_folder", "clear", "load_folder"]
    assert reply.ok and reply.data == {"weights_path": "/new", "weight_version": "v1", "num_preempted": 3}
    assert rig.info["weight_version"] == "v1"


def test_what_a_check_finds_clears_nothing() -> None:
    rig = Rig(check_folder="lacks a tensor")
    rig.refuse(rig.update(), "invalid", "lacks a tensor")
    assert (rig.calls, rig.info["weight_version"]) == (["check_folder"], "default")


def test_a_mixture_ends_the_engine() -> None:
    with pytest.raises(DeviceLost, match="the update of the weights to 'v1' failed, and they are a mixture: torn"):
        Rig(load_folder="torn").update()


def test_an_obstacle_is_named() -> None:
    rig = Rig(CommandSettings("it is set so"))
    rig.refuse(rig.update(), "conflict", "it is set so")
    rig.refuse(rig.step("begin"), "conflict", "it is set so")
    assert rig.calls == []


def test_steps_are_held_from_the_first_write_to_the_commit() -> None:
    rig = Rig()
    update = rig.step("begin").data["update"]
    assert not rig.commands.holds_steps
    assert rig.part(update=update).ok and rig.commands.holds_steps
    assert rig.part("b").ok
    assert rig.calls == ["begin", "open", "check", "receive", "clear", "load", "check", "receive", "load"]
    reply = rig.step("commit", update=update, version="v2")
    assert rig.calls == ["check_names", "commit"] and not rig.commands.holds_steps
    assert reply.data == {"weights_path": None, "weight_version": "v2", "num_preempted": 3}
    rig.refuse(rig.step("commit"), "conflict", "no update of the weights is in progress")


def test_the_copy_is_what_a_restart_loads() -> None:
    rig = Rig(CommandSettings(transfers=TRANSFERS, find_copy=lambda: Path("/copy")))
    assert rig.part(commit=True).data["weights_path"] == "/copy"
    rig.refuse(rig.part(partial=True), "conflict", "a partial update cannot be kept")


def test_an_update_without_begin_ends_with_its_last_tensor() -> None:
    rig = Rig(check_names="the tensors b are missing")
    assert "update" in rig.part(commit=False).data
    rig.runner.errors = {}
    assert rig.part("b", commit=False).data["weight_version"].startswith("update-")
    assert rig.calls[-2:] == ["check_names", "commit"]


@pytest.mark.parametrize("action", ["check", "receive"])
def test_a_part_that_is_refused_writes_nothing(action: str) -> None:
    rig = Rig(**{action: "it does not fit"})
    rig.refuse(rig.part(commit=True), "invalid", "it does not fit")
    assert "load" not in rig.calls and not rig.commands.holds_steps
    rig.runner.errors = {}
    assert rig.part(commit=True).ok


def test_what_a_group_sends_is_received_even_if_it_is_refused() -> None:
    """So that the trainer does not wait, and the group stays of use."""
    rig = Rig(check="it does not fit")
    rig.refuse(rig.part(kind="group", name="g"), "invalid", "there is no group 'g'; call init_weights_update_group")
    assert rig.step("open", kind="group", name="g").ok
    rig.calls  # noqa: B018
    rig.refuse(rig.part(kind="group", name="g"), "invalid", "it does not fit")
    assert rig.calls == ["begin", "check", "receive", "drop", "cancel"]
    rig.runner.errors = {"receive": "the trainer has gone"}
    rig.refuse(rig.part(kind="group", name="g"), "invalid", "the trainer has gone")
    assert rig.calls == ["begin", "check", "receive", "close", "drop", "cancel"]
    rig.refuse(rig.part(kind="group", name="g"), "invalid", "there is no group")


@pytest.mark.parametrize(("action", "calls"), [("join", ["join", "close"]), ("await_join", ["join", "await_join", "close"])])
def test_a_group_that_was_not_formed_is_left_by_all_ranks(action: str, calls: list[str]) -> None:
    rig = Rig(**{action: "the port is closed"})
    rig.refuse(rig.step("open", kind="group", name="g"), "invalid", "the port is closed")
    assert rig.calls == calls
    rig.refuse(rig.step("close", kind="group", name="g"), "invalid", "there is no group 'g'")


def test_a_rendezvous_goes_on_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other updates go on meanwhile. A second request, and a close, end the first."""
    monkeypatch.setattr(weight_commands, "LOOK", 0.0)
    rig = Rig(await_join=f"rank 1: {JOINING}")
    group = {"kind": "group", "name": "g"}
    assert not rig.commands.awaits_trainers and rig.begin("open", "first", **group) is None
    assert rig.commands.awaits_trainers and rig.commands.take_replies(int) == []
    assert rig.part(commit=True).ok and not rig.commands.holds_steps
    rig.refuse(rig.part(**group), "invalid", "there is no group 'g'")
    assert rig.begin("open", "second", **group) is None
    (reply,) = rig.commands.take_replies(int)
    assert reply.id == "first"
    rig.refuse(reply, "invalid", "another request forms this group anew")
    assert rig.step("close", **group).ok
    (reply,) = rig.commands.take_replies(int)
    assert reply.id == "second"
    rig.refuse(reply, "invalid", "closed before it was formed")
    assert rig.begin("open", "third", **group) is None
    rig.runner.errors = {}
    (reply,) = rig.commands.take_replies(int)
    assert (reply.id, reply.ok, rig.commands.awaits_trainers) == ("third", True, False)
    assert rig.part(commit=True, **group).ok


def test_a_rendezvous_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_commands, "LOOK", 0.0)
    monkeypatch.setattr(weight_commands, "GRACE", 0.0)
    rig = Rig(CommandSettings(transfers=TRANSFERS, timeout=0.0), await_join=f"rank 1: {JOINING}")
    assert rig.begin("open", kind="group", name="g") is None
    time.sleep(0.001)
    (reply,) = rig.commands.take_replies(int)
    rig.refuse(reply, "invalid", "the trainer did not form the group within 0 s (execution.update_timeout); see whether it runs")
    assert rig.calls == ["join", "await_join", "close"] and not rig.commands.awaits_trainers


def test_groups_of_killed_trainers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used is closed when another one is opened, and none during an update."""
    monkeypatch.setattr(weight_commands, "LOOK", 0.0)
    monkeypatch.setattr(weight_commands, "MAX_CHANNELS", 3)
    rig = Rig()
    for name in ("used", "a", "b"):
        assert rig.step("open", kind="group", name=name).ok
    assert rig.part(kind="group", name="used", commit=True).ok
    assert "close" not in rig.calls
    assert rig.step("open", kind="group", name="b").ok, "the same one takes no further place"
    assert rig.calls == ["join", "await_join"]
    assert rig.step("open", kind="group", name="c").ok
    assert rig.calls == ["close", "join", "await_join"] and list(rig.commands._channels) == ["group/used", "group/b", "group/c"]
    assert rig.part(kind="group", name="used").ok
    assert rig.part("b").ok and len(rig.commands._channels) == 4, "an update may use one more"
    rig.refuse(rig.step("open", kind="group", name="d"), "conflict", "wait for its end")
    assert "close" not in rig.calls
    assert rig.step("commit").ok and rig.step("open", kind="group", name="d").ok
    assert list(rig.commands._channels) == ["group/used", "ipc/", "group/d"]


def test_groups_that_are_awaited_take_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_commands, "LOOK", 0.0)
    monkeypatch.setattr(weight_commands, "MAX_CHANNELS", 1)
    rig = Rig()
    assert rig.begin("open", "first", kind="group", name="a") is None
    assert rig.begin("open", "second", kind="group", name="b") is None
    first, second = rig.commands.take_replies(int)
    assert (first.id, second.id, second.ok) == ("first", "second", True)
    rig.refuse(first, "invalid", "1 newer groups were formed meanwhile")


def test_malformed_parts() -> None:
    rig = Rig()
    for tensors, sentence in (
        ([], "names no tensors"),
        ([{**SPEC, "dtype": "complex64"}], "a has the dtype 'complex64'"),
        ([{**SPEC, "shape": [-1]}], "with a negative size"),
        ([{**SPEC, "shape": [2**40, 2**40]}], "a has the shape [1099511627776, 1099511627776], of"),
        ([SPEC, SPEC], "names a twice"),
        ([{"name": 1}], "the command is malformed"),
    ):
        rig.refuse(rig.step("part", kind="ipc", part={"tensors": tensors}), "invalid", sentence)
    assert rig.calls == []


def test_an_update_that_is_cancelled() -> None:
    """Nothing is lost before the first write; later the engine ends."""
    rig = Rig()
    rig.step("begin")
    assert rig.step("cancel").ok
    rig.part()
    with pytest.raises(DeviceLost, match="they are a mixture: the trainer cancelled it"):
        rig.step("cancel")


@pytest.mark.parametrize("is_written", [False, True])
def test_a_trainer_that_has_gone(is_written: bool) -> None:
    rig = Rig(CommandSettings(transfers=TRANSFERS, timeout=0.01))
    rig.step("begin")
    if is_written:
        rig.part()
    rig.commands.check_deadline()
    time.sleep(0.02)
    if not is_written:
        rig.commands.check_deadline()
        assert rig.step("begin").ok
        return
    with pytest.raises(DeviceLost, match="no message of the trainer came for 0.01 s"):
        rig.commands.check_deadline()


@pytest.mark.parametrize("action", ["load", "commit"])
def test_a_write_that_fails_ends_the_engine(action: str) -> None:
    with pytest.raises(DeviceLost, match="they are a mixture: torn"):
        Rig(**{action: "torn"}).part(commit=True)


def test_an_engine_that_awaits_weights() -> None:
    """It holds its steps until a whole update, from a folder or a trainer."""
    rig = Rig(CommandSettings(transfers=TRANSFERS, awaits="they are lost"))
    assert rig.commands.holds_steps
    rig.refuse(rig.part(commit=True, partial=True), "conflict", "a whole update is needed: they are lost")
    assert rig.step("cancel").ok and rig.commands.holds_steps
    assert rig.part(commit=True).ok and not rig.commands.holds_steps
    rig = Rig(CommandSettings(awaits="they are lost"))
    assert rig.update().ok and not rig.commands.holds_steps
