"""The registry: names, versions and who uses them, over engines that a test plays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from frame.config.server_sections import AdaptersSection
from frame.core.errors import ConfigurationError
from frame.core.messages import Generate
from frame.entrypoints.engine_client import adapter_placement
from frame.entrypoints.engine_client import adapter_registry as module
from frame.entrypoints.engine_client.adapter_registry import OTHER, AdapterRegistry, UnknownAdapterError
from frame.entrypoints.engine_client.adapter_spool import AdapterSpool, AdapterUse
from frame.entrypoints.engine_client.limits import EngineDeadError, InvalidRequestError
from frame.interfaces.adapter import AdapterError
from tests.entrypoints.adapter_engine import AdapterLink, make_adapter


@asynccontextmanager
async def registry_of(num_engines: int = 1, **settings: Any) -> AsyncIterator[tuple[AdapterRegistry, list[AdapterLink]]]:
    links = [AdapterLink() for _ in range(num_engines)]
    spool = AdapterSpool(None)
    registry = AdapterRegistry([link.client for link in links], AdaptersSection(enabled=True, **settings), spool, ("base", "/models/base"))
    try:
        async with asyncio.timeout(30):
            yield registry, links
    finally:
        spool.close()


def run(test: Callable[..., Awaitable[None]]) -> Any:
    def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adapter_placement, "PAUSE", 0.01)
        asyncio.run(test(tmp_path))  # type: ignore[arg-type]

    wrapped.__name__ = test.__name__
    return wrapped


async def acquire(registry: AdapterRegistry, name: str, tenant: str = "") -> AdapterUse:
    return (await registry.acquire([name], tenant))[name]


async def wait_for(condition: Callable[[], Any]) -> None:
    """Wait for background work."""
    while not condition():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.001)


def check_empty(registry: AdapterRegistry, links: list[AdapterLink]) -> None:
    """Nothing is left of any adapter."""
    assert registry.list_versions() == []
    assert registry.placement.num_loaded == 0
    assert not registry._locks
    assert list(registry.spool._folder().iterdir()) == []
    assert all(not link.orders.held for link in links)


# versions -----------------------------------------------------------------------------------------


@run
async def test_requests_end_on_the_version_that_they_began_with(tmp_path: Path) -> None:
    async with registry_of(2) as (registry, links):
        folder = make_adapter(tmp_path / "a", b"old")
        old = (await registry.load_folder("a", str(folder))).version
        assert all(link.orders.held == [old.digest] for link in links)
        running = links[0].start(await acquire(registry, "a"), "r1")
        make_adapter(folder, b"new")
        new = (await registry.load_folder("a", str(folder))).version
        later = links[0].start(await acquire(registry, "a"), "r2")
        assert [message.adapter for message in links[0].sent if isinstance(message, Generate)] == [old.digest, new.digest]
        assert running.adapters == f"a@{old.digest[:12]}"
        assert later.adapters == f"a@{new.digest[:12]}"
        assert len(registry.list_versions()) == 2
        links[0].finish(running)
        await wait_for(lambda: all(link.orders.held == [new.digest] for link in links))
        links[0].finish(later)
        await registry.unload("a")
        check_empty(registry, links)


@run
async def test_equal_bytes_change_nothing(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        folder = str(make_adapter(tmp_path / "a"))
        first = await registry.load_folder("a", folder)
        assert await registry.load_folder("a", folder) is first
        other = await registry.load_folder("b", folder)
        assert other.version is first.version
        assert len(link.orders.loads) == 1
        await registry.unload("a")
        assert link.orders.held == [first.version.digest]  # of b
        await registry.unload("b")
        check_empty(registry, [link])


@run
async def test_loads_of_one_name_happen_in_their_order(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        folders = [str(make_adapter(tmp_path / str(i), bytes([i]) * (1 << (20 - i)))) for i in range(8)]  # the first takes longest
        loads = [registry.load_folder("a", folder) for folder in folders]
        await asyncio.gather(*loads)
        named = registry.find("a", "")
        assert named is not None
        assert named.folder == folders[-1]
        await wait_for(lambda: len(link.orders.held) == 1)
        await registry.unload("a")
        check_empty(registry, [link])


@run
async def test_reloads_under_streams(tmp_path: Path) -> None:
    """Each request runs on one version, which stays until its end, and nothing is left."""
    random.seed(1)
    async with registry_of(2, max_loaded=4) as (registry, links):
        folders = [str(make_adapter(tmp_path / str(i), bytes([i]))) for i in range(8)]
        await registry.load_folder("a", folders[0])

        async def stream(number: int) -> None:
            for turn in range(6):
                use = await acquire(registry, "a")
                link = links[number % 2]
                request = link.start(use, f"{number}-{turn}")
                await asyncio.sleep(random.random() * 0.02)
                assert use.version.digest in link.orders.held
                if turn % 3:
                    link.finish(request)
                else:
                    link.client.abort_request(request)

        async def reload() -> None:
            for turn in range(60):
                await registry.load_folder("a", folders[turn % 8])

        await asyncio.gather(reload(), *map(stream, range(64)))
        await registry.unload("a")
        await wait_for(lambda: not registry.list_versions())
        check_empty(registry, links)
        assert not any(registry.counts.running.values())


# unload -------------------------------------------------------------------------------------------


@run
async def test_unload_waits_for_requests(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        await registry.load_folder("a", str(make_adapter(tmp_path / "a")))
        request = link.start(await acquire(registry, "a"), "r")
        unloading = asyncio.create_task(registry.unload("a"))
        await asyncio.sleep(0.02)
        with pytest.raises(UnknownAdapterError):
            await acquire(registry, "a")
        assert not unloading.done()
        link.finish(request)
        await unloading
        check_empty(registry, [link])
        with pytest.raises(UnknownAdapterError):
            await registry.unload("a")


@run
async def test_unload_aborts_requests(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        folder = str(make_adapter(tmp_path / "a"))
        await registry.load_folder("a", folder)
        await registry.load_folder("b", folder)  # the same bytes
        of_a, of_b, plain = (
            link.start(use, rid) for use, rid in ((await acquire(registry, "a"), "1"), (await acquire(registry, "b"), "2"), (None, "3"))
        )
        await registry.unload("a", aborts=True)
        assert [r.num_unfinished for r in (of_a, of_b, plain)] == [0, 1, 1]
        assert of_a.sequences[0].finish.reason == "abort"  # type: ignore[union-attr]
        await registry.unload("b", aborts=True)
        assert of_b.num_unfinished == 0
        assert plain.num_unfinished == 1
        check_empty(registry, [link])


# names --------------------------------------------------------------------------------------------


@run
async def test_tenants_have_names_of_their_own(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        await registry.load_folder("x", str(make_adapter(tmp_path / "1", b"1")))
        await registry.load_folder("x", str(make_adapter(tmp_path / "2", b"2")), "alice")
        await registry.load_folder("y", str(make_adapter(tmp_path / "3", b"3")), "alice")
        mine, all_of = (registry.find("x", tenant) for tenant in ("alice", "bob"))
        assert mine is not None
        assert all_of is not None
        assert (mine.owner, all_of.owner) == ("alice", "")
        with pytest.raises(UnknownAdapterError):
            await acquire(registry, "y", "bob")
        assert [named.name for named in registry.list_adapters("bob")] == ["x"]
        assert len(registry.list_adapters("alice")) == 3 == len(registry.list_adapters(None))
        link.start(await acquire(registry, "y", "alice"), "r")
        assert dict(registry.counts.running) == {OTHER: 1}  # metrics are for all to read


@pytest.mark.parametrize("name", ["", "a:b", "a b", "a,b", "é", "-a", ".a", "a" * 129, "base", "a\n"])
def test_names_that_adapters_cannot_have(name: str) -> None:
    async def load() -> None:
        async with registry_of() as (registry, _):
            with pytest.raises(AdapterError, match="name"):
                await registry.load_folder(name, "/nowhere")

    asyncio.run(load())


@pytest.mark.slow
@run
async def test_names_and_labels_are_bounded(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        folder = make_adapter(tmp_path / "a")
        files = registry.spool.copy_folder(str(folder))
        for number in range(module.MAX_NAMES):
            registry.spool._keep(files.folder, files.digest)
            await registry.load_files(f"n{number}", files)
        with pytest.raises(AdapterError, match="10000 adapters, its limit"):
            await registry.load_folder("one-more", str(folder))
        assert await registry.load_folder("n5", str(folder))
        for number in range(200):
            link.finish(link.start(await acquire(registry, f"n{number}"), str(number)))
        assert len(registry.counts.tokens) == module.MAX_LABELS + 1
        assert registry.counts.tokens[OTHER] == 100


# host memory --------------------------------------------------------------------------------------


@run
async def test_the_least_recently_used_is_evicted(tmp_path: Path) -> None:
    async with registry_of(max_loaded=2) as (registry, (link,)):
        versions = [
            (await registry.load_folder(f"a{i}", str(make_adapter(tmp_path / str(i), bytes([i]))))).version.digest for i in range(2)
        ]
        link.finish(link.start(await acquire(registry, "a0"), "r0"))
        versions.append((await registry.load_folder("a2", str(make_adapter(tmp_path / "2", b"\2")))).version.digest)
        assert set(link.orders.held) == {versions[0], versions[2]}
        request = link.start(await acquire(registry, "a1"), "r1")  # loaded again
        assert set(link.orders.held) == {versions[1], versions[2]}
        assert request.num_unfinished == 1


@run
async def test_many_adapters_pass_through_few_places(tmp_path: Path) -> None:
    """Busy adapters are evicted too, and no request waits for ever."""
    async with registry_of(max_loaded=3) as (registry, (link,)):
        names = [f"a{i}" for i in range(20)]
        for i, name in enumerate(names):
            await registry.load_folder(name, str(make_adapter(tmp_path / name, bytes([i]))))
        done = 0

        async def request(number: int) -> None:
            nonlocal done
            name = names[number % 3] if number % 2 else names[number % 20]
            request = link.start(await acquire(registry, name), str(number))
            assert len(link.orders.held) <= 3
            await asyncio.sleep(0.002)
            link.finish(request)
            done += 1

        await asyncio.gather(*map(request, range(200)))
        assert done == 200
        assert registry.num_waiting == 0


@run
async def test_an_engine_that_is_full_makes_room(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        link.orders.room = 2
        names = [f"a{i}" for i in range(4)]
        for i, name in enumerate(names):
            await registry.load_folder(name, str(make_adapter(tmp_path / name, bytes([i]))))
        assert len(link.orders.held) == 2
        requests = [link.start(await acquire(registry, name), name) for name in names[:2]]
        waiting = asyncio.create_task(acquire(registry, names[2]))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        link.finish(requests[0])
        await waiting
        link.orders.room = 0
        link.orders.held.clear()
        link.finish(requests[1])


@run
async def test_requests_with_several_adapters_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async with registry_of(max_loaded=2) as (registry, (link,)):
        names = [f"a{i}" for i in range(4)]
        for i, name in enumerate(names):
            await registry.load_folder(name, str(make_adapter(tmp_path / name, bytes([i]))))

        async def hold(pair: tuple[str, str]) -> None:
            uses = await registry.acquire(pair, "")
            assert {use.version.digest for use in uses.values()} == set(link.orders.held)
            await asyncio.sleep(0.001)
            for use in uses.values():
                use.version.release()

        await asyncio.gather(*(hold((names[i % 4], names[(i + 1) % 4])) for i in range(40)))
        with pytest.raises(InvalidRequestError, match="names 3 adapters"):
            await registry.acquire(names[:3], "")


@run
async def test_a_wait_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    async with registry_of(max_loaded=1) as (registry, (link,)):
        for i, name in enumerate("ab"):
            await registry.load_folder(name, str(make_adapter(tmp_path / name, bytes([i]))))
        request = link.start(await acquire(registry, "b"), "r")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await acquire(registry, "a")
        link.finish(link.start(await acquire(registry, "b"), "r2"))
        link.finish(request)
        link.finish(link.start(await acquire(registry, "a"), "r3"))
        await registry.unload("a")
        await registry.unload("b")
        check_empty(registry, [link])


@run
async def test_a_load_whose_request_leaves_is_known(tmp_path: Path) -> None:
    async with registry_of(max_loaded=1) as (registry, (link,)):
        for i, name in enumerate("ab"):
            await registry.load_folder(name, str(make_adapter(tmp_path / name, bytes([i]))))
        link.orders.pause = 0.05
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.06):  # in the load, after the eviction
                await acquire(registry, "a")
        link.orders.pause = 0.0
        count = len(link.orders.loads)
        link.finish(link.start(await acquire(registry, "a"), "r"))
        assert len(link.orders.loads) == count
        assert len(link.orders.held) == 1


# failures -----------------------------------------------------------------------------------------


@run
async def test_an_adapter_that_an_engine_refuses(tmp_path: Path) -> None:
    async with registry_of(2) as (registry, links):
        folder = str(make_adapter(tmp_path / "a"))
        digest = registry.spool.copy_folder(folder).digest
        links[1].orders.refuses[digest] = "rank 8 is above adapters.max_rank"
        with pytest.raises(AdapterError, match=r"above adapters.max_rank"):
            await registry.load_folder("a", folder)
        await wait_for(lambda: not registry.list_versions())
        assert all(not link.orders.held for link in links)
        assert registry.find("a", "") is None
        with pytest.raises(ConfigurationError, match=r"adapters.modules: a=/none: there is no folder"):
            registry._settings = AdaptersSection(enabled=True, modules=("a=/none",))
            await registry.load_modules()


@run
async def test_a_crash_during_a_load(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        folder = str(make_adapter(tmp_path / "bad"))
        await registry.load_folder("good", str(make_adapter(tmp_path / "good", b"good")))
        request = link.start(await acquire(registry, "good"), "r")
        for _ in range(2):
            link.orders.is_silent = True
            loading = asyncio.create_task(registry.load_folder("bad", folder))
            await asyncio.sleep(0.05)
            link.crash()
            link.orders.is_silent = False
            with pytest.raises((EngineDeadError, AdapterError), match="crashed"):
                await loading
            link.client.resume_requests()
            await wait_for(lambda: link.client.unavailable_reason is None)
        with pytest.raises(AdapterError, match="crashed 2 times while it loaded this adapter, which is loaded no more"):
            await registry.load_folder("bad", folder)
        assert request.num_unfinished == 1
        messages = [message for message in link.sent if isinstance(message, Generate)]
        assert len({message.adapter for message in messages}) == 1  # it keeps its digest
        assert len(messages) == 3
        link.finish(request)
        await registry.unload("good")
        await wait_for(lambda: not registry.list_versions())


@run
async def test_adapters_are_back_before_their_requests(tmp_path: Path) -> None:
    """`AdapterOrders` checks the order of messages."""
    async with registry_of(2) as (registry, links):
        names = [f"a{i}" for i in range(4)]
        for i, name in enumerate(names):
            await registry.load_folder(name, str(make_adapter(tmp_path / name, bytes([i]))))
        requests = [links[0].start(await acquire(registry, name), name) for name in names[:2]]
        plain = links[0].start(None, "plain")
        links[0].crash()
        late = asyncio.create_task(acquire(registry, "a3"))  # while the engine is away
        requests.append(links[0].start(await late, "late"))
        links[0].sent.clear()
        links[0].orders.pause = 0.01
        links[0].client.resume_requests()
        assert links[0].client.unavailable_reason is not None
        await wait_for(lambda: links[0].client.unavailable_reason is None)
        assert len(links[0].orders.held) == 3  # a2 has no request
        assert {m.rid.partition("~")[0] for m in links[0].sent if isinstance(m, Generate)} == {"a0", "a1", "late", "plain"}
        assert len(links[1].orders.held) == 4
        links[0].finish(links[0].start(await acquire(registry, "a2"), "again"))
        for request in [*requests, plain]:
            links[0].finish(request)


@run
async def test_a_second_crash_during_the_recovery(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        await registry.load_folder("a", str(make_adapter(tmp_path / "a")))
        await registry.load_folder("b", str(make_adapter(tmp_path / "b", b"b")))
        of_a, of_b, plain = (
            link.start(use, rid) for use, rid in ((await acquire(registry, "a"), "1"), (await acquire(registry, "b"), "2"), (None, "3"))
        )
        link.crash()
        for _ in range(2):  # the first of them kills two engines
            link.orders.is_silent = True
            link.client.resume_requests()
            await asyncio.sleep(0.01)
            link.crash()
        link.orders.is_silent = False
        link.client.resume_requests()
        await wait_for(lambda: link.client.unavailable_reason is None)
        assert of_a.sequences[0].finish.error.endswith("loaded no more; check its files")  # type: ignore[union-attr]
        assert [of_b.num_unfinished, plain.num_unfinished] == [1, 1]
        with pytest.raises(AdapterError, match="loaded no more"):
            await acquire(registry, "a")


@run
async def test_an_adapter_that_is_refused_at_the_recovery(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        version = (await registry.load_folder("a", str(make_adapter(tmp_path / "a")))).version
        request = link.start(await acquire(registry, "a"), "r")
        link.crash()
        link.orders.refuses[version.digest] = "the file is gone."
        link.client.resume_requests()
        await wait_for(lambda: not request.num_unfinished)
        assert (
            request.sequences[0].finish.error
            == "the adapter of this request could not be loaded again after a crash of the engine: the file is gone."
        )  # type: ignore[union-attr]
        assert link.client.unavailable_reason is None


@run
async def test_no_request_runs_on_the_base_model_instead(tmp_path: Path) -> None:
    async with registry_of() as (registry, (link,)):
        use = (await registry.load_folder("a", str(make_adapter(tmp_path / "a")))).version
        held = await acquire(registry, "a")
        use.holders.clear()
        request = link.start(held, "r")
        assert request.sequences[0].finish.error == "the engine does not have this request's adapter; send the request again"  # type: ignore[union-attr]
        assert not link.sent


@run
async def test_thousands_of_loads_leave_nothing(tmp_path: Path) -> None:
    async with registry_of(max_loaded=2) as (registry, (link,)):
        folders = [str(make_adapter(tmp_path / str(i), bytes([i]))) for i in range(5)]
        for turn in range(500):
            await registry.load_folder(f"n{turn % 3}", folders[turn % 5])
            if turn % 4 == 3:
                link.finish(link.start(await acquire(registry, f"n{turn % 3}"), str(turn)))
            if turn % 7 == 6:
                await registry.unload(f"n{turn % 3}", aborts=True)
        for named in registry.list_adapters(None):
            await registry.unload(named.name)
        await wait_for(lambda: not registry.list_versions())
        check_empty(registry, [link])
        await wait_for(lambda: not registry._tasks)
