"""`ReplicaClient` over simulated links: which replica gets a request, and what a replica's end
changes."""

from __future__ import annotations

import asyncio
import random

import pytest

from frame.core.interfaces.media import MediaItem, PlaceholderRun
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Abort, AbortAll, Control, ControlReply, Finish, Generate, Heartbeat, StepTokens
from frame.entrypoints.engine_client import commands
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import EngineDeadError, InvalidRequestError, QueueFullError
from frame.entrypoints.engine_client.replicas import ReplicaClient
from frame.entrypoints.engine_client.response_state import RequestState
from frame.entrypoints.engine_client.stats import Outstanding
from frame.interfaces.routing import RoutingContext
from frame.parallel.replica_choice import BLOCK, ReplicaChooser, sum_loads
from frame.plugins.routing_policies import prefix_load
from frame.plugins.routing_policies.prefix_load import PrefixLoad
from tests.entrypoints.engine_client.test_client import LIMITS, Link, rids

DRAW = random.Random(3)


def prompt(blocks: int) -> list[int]:
    return [DRAW.randrange(50_000) for _ in range(blocks * BLOCK)]


def make_chooser() -> ReplicaChooser:
    return ReplicaChooser(PrefixLoad(RoutingContext()))


def test_requests_spread_by_load() -> None:
    chooser = make_chooser()
    loads = {0: 0, 1: 0, 2: 0}
    for _ in range(30):
        loads[chooser.choose_replica(prompt(1), "", loads)] += 1
    assert loads == {0: 10, 1: 10, 2: 10}


def test_turns_of_a_conversation_stay_together() -> None:
    chooser, loads = make_chooser(), {0: 0, 1: 0}
    talks = [prompt(2) for _ in range(8)]
    first = []
    for talk in talks:
        first.append(chooser.choose_replica(talk, "", loads))
        loads[first[-1]] += 1
    assert sorted(first) == [0] * 4 + [1] * 4
    assert [chooser.choose_replica([*talk, *prompt(1)], "", {0: 4, 1: 4}) for talk in talks] == first
    chosen = chooser.choose_replica(talks[0], "another tenant", {0: 9, 1: 9, 2: 0})
    assert chosen == 2  # namespaces share no prefix


def test_an_adapter_stays_where_it_is() -> None:
    """A replica that has served an adapter is preferred for other prompts of other tenants, until
    it has too many of them."""
    chooser, even = make_chooser(), {0: 0, 1: 0, 2: 0}
    homes = {name: chooser.choose_replica([1], "", {number: load + (number != home) for number, load in even.items()}, (), name)
             for home, name in enumerate(("a", "b", "c"))}  # fmt: skip
    assert homes == {"a": 0, "b": 1, "c": 2}
    for name, home in homes.items():
        for tenant, text in (("", [2]), ("tenant", prompt(3))):
            assert chooser.choose_replica(text, tenant, {number: 2 * (number == home) for number in even}, (), name) == home
    shared = prompt(2)
    chooser.choose_replica(shared, "", {0: 9, 1: 9, 2: 0})
    assert chooser.choose_replica(shared, "", {0: 0, 1: 1, 2: 1}, (), "d") == 0  # no prefix is shared with the base
    loads = dict.fromkeys(even, 0)
    for _ in range(300):
        loads[chooser.choose_replica([3], "", loads, (), "a")] += 1
    assert max(loads.values()) <= 2 * min(loads.values())


def test_a_hot_prefix_overloads_no_replica() -> None:
    chooser, loads, hot = make_chooser(), {0: 0, 1: 0, 2: 0, 3: 0}, prompt(4)
    for _ in range(200):
        loads[chooser.choose_replica([*hot, 1, 2, 3], "", loads)] += 1
    assert max(loads.values()) - min(loads.values()) < 100


def test_a_replica_that_is_away_gets_nothing() -> None:
    chooser, hot = make_chooser(), prompt(2)
    home = chooser.choose_replica(hot, "", {0: 0, 1: 0})
    assert chooser.choose_replica(hot, "", {1 - home: 100}) == 1 - home


def test_the_memory_of_prefixes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_load, "MAX_PREFIXES", 6400)
    policy = PrefixLoad(RoutingContext())
    chooser = ReplicaChooser(policy)
    for number in range(250):
        chooser.choose_replica([number] * 32 * BLOCK, "", {0: 0, 1: 0})
    assert len(policy._replicas) == 6400


def make(count: int = 2) -> tuple[ReplicaClient, list[Link]]:
    outstanding, links = Outstanding(), [Link() for _ in range(count)]
    return ReplicaClient([EngineClient(link, LIMITS, outstanding=outstanding) for link in links], make_chooser()), links


def submit(client: ReplicaClient, n: int, rid: str = "r") -> RequestState:
    client.reserve_sequences(n)
    request = client.prepare_request([[1, 2, 3]], [SamplingParams(n=n)], rid)
    for sequence in request.sequences:
        client.start_sequence(sequence)
    return request


async def test_a_request_runs_on_several_replicas() -> None:
    client, links = make()
    request = submit(client, 4)
    assert [len(rids(link)) for link in links] == [2, 2]
    assert client.num_outstanding == 4
    with pytest.raises(QueueFullError):
        client.reserve_sequences(1)
    with pytest.raises(InvalidRequestError, match="is running"):
        client.prepare_request([[1]], [SamplingParams(n=2)], "r")
    for link, each in zip(links, client.clients, strict=True):
        names = rids(link)
        link.inbox = [StepTokens(rids=names, token_ids=[[5], [6]], finishes={0: Finish("length")})]
        each.receive_messages()
    assert (client.num_outstanding, client.stats.generated_tokens, request.num_unfinished) == (2, 4, 2)
    assert client.abort_requests(["r"]) == 2
    client.abort_request(request)
    assert client.num_outstanding == 0
    assert client.stats.finished == {"length": 2, "abort": 2}
    client.abort_requests([])
    assert [link.sent[-1] for link in links] == [AbortAll(), AbortAll()]


async def test_a_cancelled_request_keeps_its_room() -> None:
    client, links = make()
    client.reserve_sequences(3)
    request = client.prepare_request([[1, 2]], [SamplingParams(n=3)], "r")
    for sequence in request.sequences[:2]:
        client.start_sequence(sequence)
    client.abort_start(request)
    assert client.num_outstanding == 3
    assert [isinstance(link.sent[-1], Abort) for link in links] == [True, True]
    client.release_sequences(3)
    assert client.num_outstanding == 0


async def test_a_restarted_replica_has_no_cached_prefix() -> None:
    client, links = make()

    def start(rid: str) -> int:
        """-> the replica of a request with the same long prompt."""
        client.reserve_sequences(1)
        request = client.prepare_request([[1] * BLOCK], [SamplingParams()], rid)
        client.start_sequence(request.sequences[0])
        client.abort_request(request)
        return next(number for number, link in enumerate(links) if rid in rids(link))

    home = start("a")
    assert start("b") == home
    client.clients[home].begin_recovery("it crashed", {})
    assert start("c") == 1 - home
    client.clients[home].resume_requests()
    assert [start(rid) for rid in "def"] == [1 - home] * 3


async def test_the_end_of_one_replica_and_of_all() -> None:
    client, links = make()
    request = submit(client, 2)
    client.clients[0].begin_recovery("it crashed", {})
    assert client.unavailable_reason is None
    with pytest.raises(EngineDeadError, match="it crashed"):
        await client.send_command("check_integrity")
    client.clients[0].fail_requests("too many crashes")
    assert (client.dead_reason, client.unavailable_reason, request.num_unfinished) == (None, None, 1)
    submit(client, 2, "s")
    assert len(rids(links[1])) == 3
    client.clients[1].begin_recovery("it crashed too", {})
    assert client.unavailable_reason == "it crashed too"
    client.clients[1].fail_requests("no more")
    assert client.dead_reason == "too many crashes"
    assert client.num_outstanding == 0


async def test_commands_go_to_all_replicas() -> None:
    client, links = make()
    asked = asyncio.create_task(client.send_command("start_profile", name="p", num_steps=3))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for number, (link, each) in enumerate(zip(links, client.clients, strict=True)):
        (control,) = (message for message in link.sent if isinstance(message, Control))
        assert control.arguments == {"name": f"p-replica{number}", "num_steps": 3}
        link.inbox = [ControlReply(id=control.id, ok=number == 0, error="no", data={"path": "x"})]
        each.receive_messages()
    reply = await asked
    assert (reply.ok, reply.error) == (False, "replica 1: no")  # done everywhere, or an error
    assert [link.sent for link in links if any(isinstance(message, Generate) for message in link.sent)] == []


async def test_a_command_that_names_a_session_reaches_each_replica() -> None:
    client, links = make()
    asked = asyncio.create_task(client.send_command("end_session", tenant="t", name="s"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for number, (link, each) in enumerate(zip(links, client.clients, strict=True)):
        (control,) = (message for message in link.sent if isinstance(message, Control))
        assert control.arguments == {"tenant": "t", "name": "s"}
        link.inbox = [ControlReply(id=control.id, ok=True, data={"ended": number})]
        each.receive_messages()
    assert (await asked).data == {"ended": 1}


async def test_a_replica_that_does_not_answer_a_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "CONTROL_TIMEOUT", 0.05)
    client, links = make()
    asked = asyncio.create_task(client.send_command("flush_cache"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (control,) = (message for message in links[0].sent if isinstance(message, Control))
    links[0].inbox = [ControlReply(id=control.id, ok=True)]
    client.clients[0].receive_messages()
    with pytest.raises(TimeoutError, match="replica 1: the engine did not answer flush_cache within 0.05 s"):
        await asked
    client.clients[1].begin_recovery("it crashed", {})
    with pytest.raises(EngineDeadError, match="replica 1: it crashed"):
        await client.send_command("flush_cache")


def test_loads_are_added() -> None:
    client, links = make()
    for link, each in zip(links, client.clients, strict=True):
        groups = [{"group": "window", "used_pages": 2}]
        link.inbox = [Heartbeat(process="engine", running=3, total_pages=7, groups=groups, accepted_at=[1, 2][: 1 + links.index(link)])]
        each.receive_messages()
    load = client.load
    assert load is not None
    assert (load.process, load.running, load.total_pages) == ("engine", 6, 14)
    assert (load.groups, load.accepted_at) == ([{"group": "window", "used_pages": 4}], [2, 2])
    assert sum_loads([{"pages": 3, "path": "a"}, {"pages": 4, "path": "b"}]) == {"pages": 7, "path": "a"}


def test_prompts_with_other_images_are_other_prompts() -> None:
    """Their token ids are equal."""
    chooser, text = make_chooser(), prompt(1)
    items = [MediaItem("image", bytes([number]) * 32, [PlaceholderRun(3, 4)], 4, "", []) for number in range(2)]
    home = chooser.choose_replica(text, "", {0: 0, 1: 0}, items[:1])
    assert chooser.choose_replica(text, "", {home: 1, 1 - home: 0}, items[:1]) == home
    assert chooser.choose_replica(text, "", {home: 1, 1 - home: 0}, items[1:]) == 1 - home
