"""Adapters of the offline engine: names and folders, versions, and room, over a played engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frame import Engine, SamplingParams
from frame.config.server_sections import AdaptersSection
from frame.core.messages import ControlReply, Generate
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.offline.adapters import OfflineAdapters
from frame.entrypoints.offline.engine import EngineError
from frame.interfaces.adapter import AdapterError
from tests.entrypoints.adapter_engine import make_adapter

TWO = SamplingParams(max_tokens=2)


class Played:
    """An engine's side of the orders. `session` changes with a restart."""

    def __init__(self, **settings: Any) -> None:
        self.held: list[str] = []
        self.room = 100
        self.session = object()
        self.refusal: str | None = None
        self.adapters = OfflineAdapters(AdaptersSection(enabled=True, **settings), None, self.send, lambda: self.session)

    def send(self, action: str, digest: str, folder: str = "") -> ControlReply:
        error = code = None
        if action == "unload_adapter":
            self.held.remove(digest)
        elif self.refusal is not None:
            error = self.refusal
        elif len(self.held) >= self.room:
            error, code = "host memory is full", "conflict"
        else:
            assert len(list(Path(folder).iterdir())) == 2
            self.held.append(digest)
        return ControlReply(id="", ok=error is None, error=error, code=code)  # type: ignore[arg-type]

    def restart(self) -> None:
        self.held, self.session = [], object()


def test_versions_and_folders(tmp_path: Path) -> None:
    played = Played()
    adapters = played.adapters
    folder = make_adapter(tmp_path / "a", b"1")
    old = adapters.load("a", str(folder))
    assert adapters.find("a", 2) == [old, old]
    assert adapters.find([None, "a", folder], 3) == ["", old, old]  # the same bytes
    with adapters.hold([old]):
        make_adapter(folder, b"2")
        new = adapters.load("a", str(folder))
        assert adapters.find(["a", folder], 2) == [new, old]  # the folder as it was when it was loaded
        assert played.held == [old, new]
    adapters.unload(str(folder))
    assert played.held == [new]
    adapters.unload("a")
    assert not played.held
    assert not list(adapters._spool._folder().iterdir())
    with pytest.raises(InvalidRequestError, match="no adapter 'a'"):
        adapters.unload("a")
    with pytest.raises(InvalidRequestError, match="neither the name of a loaded adapter nor a folder"):
        adapters.find("a", 1)
    with pytest.raises(InvalidRequestError, match="2 prompts but 1 adapters"):
        adapters.find([None], 2)
    with pytest.raises(InvalidRequestError, match="unloaded meanwhile"), adapters.hold([old]):
        pass
    with pytest.raises(AdapterError, match="there is no folder"):
        adapters.load("x", "/nowhere")


def test_unload_waits_for_jobs(tmp_path: Path) -> None:
    played = Played()
    digest = played.adapters.load("a", str(make_adapter(tmp_path / "a")))
    unloading = threading.Thread(target=played.adapters.unload, args=("a",))
    with played.adapters.hold([digest]):
        unloading.start()
        unloading.join(0.05)
        assert unloading.is_alive()
    unloading.join(5)
    assert not played.held


def test_room_in_host_memory(tmp_path: Path) -> None:
    played = Played(max_loaded=2)
    adapters = played.adapters
    digests = [adapters.load(str(i), str(make_adapter(tmp_path / str(i), bytes([i])))) for i in range(3)]
    assert played.held == digests[1:]
    done = []

    def run(number: int) -> None:
        pair = [digests[number % 3], digests[(number + 1) % 3]]
        with adapters.hold(pair):
            adapters.place(pair)
            assert {*pair} <= {*played.held}
            done.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(done) == 12
    with pytest.raises(InvalidRequestError, match="names 3 adapters, and the engine holds 2"), adapters.hold(digests):
        pass
    played.room = 1
    played.restart()
    with adapters.hold([digests[0]]):
        adapters.place([digests[0]])
    with adapters.hold([digests[1]]):
        adapters.place([digests[1]])
        assert played.held == [digests[1]]


def test_a_restart_and_a_refusal(tmp_path: Path) -> None:
    played = Played()
    digest = played.adapters.load("a", str(make_adapter(tmp_path / "a")))
    with played.adapters.hold([digest]):
        played.restart()
        assert played.adapters.place([digest]) is played.session
        assert played.held == [digest]
    played.refusal = "rank 8 is above adapters.max_rank"
    with pytest.raises(EngineError, match="rank 8"):
        played.adapters.load("b", str(make_adapter(tmp_path / "b", b"b")))
    assert played.adapters.find("a", 1) == [digest]
    with pytest.raises(InvalidRequestError, match="neither"):
        played.adapters.find("b", 1)


# the engine ---------------------------------------------------------------------------------------


class Recording:
    """The engine's messages: requests lose their adapter, which the engine of this test has not."""

    def __init__(self, engine: Engine, played: Played) -> None:
        self.sent: list[str] = []
        self._send_all = engine._session.send_all
        played.session = engine._session
        engine._adapters = played.adapters
        engine._session.collector._send_all = self.send

    def send(self, messages: Any) -> None:
        self.sent += [message.adapter for message in messages if isinstance(message, Generate)]
        self._send_all([msgspec.structs.replace(each, adapter="") if isinstance(each, Generate) else each for each in messages])


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(model=str(checkpoint), max_model_len=256, max_total_tokens=4096, threads=1) as running:
        yield running


def test_methods_take_an_adapter(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="enable_lora=True"):
        engine.load_lora_adapter("a", tmp_path)
    with pytest.raises(InvalidRequestError, match="enable_lora=True"):
        engine.generate("x", TWO, lora="a")
    played = Played()
    recording = Recording(engine, played)
    engine.load_lora_adapter("a", make_adapter(tmp_path / "a"))
    (digest,) = played.held
    engine.generate(["x", "y"], [{"max_tokens": 1, "n": 2}, TWO], lora=["a", None])
    assert recording.sent == [digest, digest, ""]
    assert list(engine.stream("x", TWO, lora="a"))
    assert asyncio.run(engine.agenerate("x", TWO, lora="a")).token_ids

    async def stream() -> int:
        return len([delta async for delta in engine.astream("x", TWO, lora="a")])

    assert asyncio.run(stream())
    assert recording.sent[3:] == [digest] * 3
    assert not played.adapters._users[digest]
    engine.unload_lora_adapter("a")
    assert not played.held
