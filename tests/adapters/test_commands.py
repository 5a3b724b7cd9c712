"""Loads and unloads: replies come when every rank has carried out the order."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.adapters.adapter_pool import AdapterSizes
from frame.adapters.commands import AdapterCommands, AdapterLoader
from frame.adapters.places import AdapterPlaces, AdapterVersions
from frame.core.interfaces.runner import AdapterOrder
from frame.core.messages import Control, ControlReply
from tests.adapters.harness import make_adapters, make_reader, write_adapter

RIGHT = {"q.a": torch.ones(4, 6), "q.b": torch.ones(4, 4)}


class Ranks:
    """A runner whose other rank answers with `error`, once it is not None."""

    def __init__(self, loader: AdapterLoader) -> None:
        self.loader = loader
        self.error: str | None = ""
        self.orders: list[AdapterOrder] = []

    def start_order(self, order: AdapterOrder) -> Any:
        self.orders.append(order)
        mine, ranks = self.loader.start_order(order), self

        class Both:
            def poll(self) -> str | None:
                error = mine.poll()
                return None if error is None or ranks.error is None else error or ranks.error

        return Both()


class Setup:
    def __init__(self) -> None:
        self.adapters = make_adapters(AdapterSizes(2, 4, 2), {"q": (6, [4])})
        self.ranks: Any = Ranks(AdapterLoader(lambda: make_reader(self.adapters), self.adapters.host, lambda: None))
        self.versions = AdapterVersions()
        self.places = AdapterPlaces(self.versions, 2, 4)
        self.commands = AdapterCommands(self.ranks, self.adapters.host, self.versions, [self.places])

    def run(self, action: Any, **arguments: Any) -> ControlReply:
        reply = self.commands.begin(Control(id="x", action=action, arguments=arguments))
        while reply is None:
            time.sleep(0.001)
            reply = next(iter(self.commands.take_replies()), None)
        return reply


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_load_is_answered_with_what_the_adapter_is(setup: Setup, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, RIGHT, '{"rank": 4, "invocation": [3, 4]}')
    reply = setup.run("load_adapter", digest="x", folder=str(folder))
    assert reply.ok
    assert (reply.data["rank"], reply.data["pages"], reply.data["invocation"]) == (4, 1, [3, 4])
    assert setup.run("load_adapter", digest="x", folder="/nowhere").data == reply.data, "it is loaded already"
    assert setup.run("unload_adapter", digest="x").ok
    assert not setup.adapters.host
    assert not setup.versions.by_digest


def test_a_rank_that_fails_undoes_the_load_everywhere(setup: Setup, tmp_path: Path) -> None:
    setup.ranks.error = "rank 1: host memory does not hold the adapter"
    reply = setup.run("load_adapter", digest="x", folder=str(write_adapter(tmp_path, RIGHT)))
    assert not reply.ok
    assert "rank 1" in (reply.error or "")
    assert [order.folder for order in setup.ranks.orders][1:] == [""], "the other ranks forget it"
    while len(setup.commands):
        setup.commands.take_replies()
    assert not setup.adapters.host


def test_a_load_waits_for_every_rank(setup: Setup, tmp_path: Path) -> None:
    setup.ranks.error = None
    control = Control(id="x", action="load_adapter", arguments={"digest": "x", "folder": str(write_adapter(tmp_path, RIGHT))})
    assert setup.commands.begin(control) is None
    time.sleep(0.05)
    assert setup.commands.take_replies() == []
    again = setup.commands.begin(control)
    assert again is not None
    assert again.code == "conflict"
    setup.ranks.error = ""
    assert [reply.ok for reply in setup.commands.take_replies()] == [True]


def test_an_adapter_in_use_stays(setup: Setup, tmp_path: Path) -> None:
    setup.run("load_adapter", digest="x", folder=str(write_adapter(tmp_path, RIGHT)))
    setup.versions.by_digest["x"].num_requests = 1
    assert setup.run("unload_adapter", digest="x").code == "conflict"
    assert "x" in setup.adapters.host
    reply = setup.run("load_adapter", digest="y", folder=str(tmp_path / "missing"))
    assert not reply.ok
    assert "cannot be read" in (reply.error or "")
