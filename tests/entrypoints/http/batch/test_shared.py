"""Servers that share a folder of batches: each file is of all, each batch of one at a time, what
one leaves another finishes. Nothing in the folder is believed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.entrypoints.http.batch import jobs
from frame.entrypoints.http.batch.files import StorageFullError
from frame.entrypoints.http.batch.folder import MAX_STATE_BYTES, FolderReader
from frame.entrypoints.http.batch.jobs import FINAL_STATUSES, BatchJob
from frame.testing.checkpoints import make_checkpoint
from tests.entrypoints.http.batch.test_jobs import CHAT, Server, wait_for
from tests.entrypoints.serving import RunningServer, wait_until


@pytest.fixture(autouse=True)
def fast_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SCAN_INTERVAL", 0.02)


async def find(server: Server, batch: BatchJob) -> BatchJob:
    """The batch as this server knows it."""
    await server.runner.refresh(batch.id)
    found = server.runner.get(batch.id, batch.tenant)
    assert found is not None
    return found


async def test_files_are_of_all_servers(tmp_path: Path) -> None:
    one, two = Server(tmp_path, max_bytes_per_key=1024), Server(tmp_path, max_bytes_per_key=1024)
    card = await one.runner.files.create(b"x" * 600, "a", "batch", "t")
    files = two.runner.files
    assert files.get(card.id, "t") is None
    await files.refresh(card.id)
    assert files.get(card.id, "t") == card
    assert files.get(card.id, "other") is None
    with pytest.raises(StorageFullError, match="files of this key have 600 of 1024 bytes"):
        await files.create(b"x" * 425, "b", "batch", "t")
    writer = await two.runner.files.open_writer("c", "batch", "t")
    writer.append(b"x" * 300)
    await one.runner.files.refresh()
    assert [each.id for each in one.runner.files.list_files("t")] == [card.id]  # the other is not complete
    assert one.runner.files.num_bytes == 900
    one.runner.files.recover([])  # of a server that starts: it leaves what another one writes
    writer.abandon()
    found = files.get(card.id, "t")
    assert found is not None
    await files.delete(found)
    await one.runner.files.refresh(card.id)
    assert one.runner.files.get(card.id, "t") is None
    await one.runner.files.refresh()
    assert (one.runner.files.num_bytes, files.num_bytes) == (0, 0)


async def test_a_batch_has_one_owner_and_all_see_it(tmp_path: Path) -> None:
    one, two = Server(tmp_path, concurrency=1), Server(tmp_path)
    async with one.watching(), two.watching():
        one.gate.clear()
        batch = await one.begin(4, "t")
        await wait_for(lambda: one.asked)
        one.statuses = [200, 400, 200, 200]
        one.gate.set()
        other = await find(two, batch)
        assert other is not batch
        await one.over(batch)
        await wait_for(lambda: other.status == "completed")
        assert (other.completed, other.failed, other.total) == (3, 1, 4)
        assert two.runner.get(batch.id, "u") is None
        assert (len(one.asked), two.asked) == (4, [])
        assert len(two.lines(other.output_file_id)) == 3


async def test_waiting_batches_are_taken_by_a_server_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_RUNNING", 1)
    one, two = Server(tmp_path), Server(tmp_path)
    one.gate.clear()
    async with one.watching():
        first = await one.begin(1, "t")
        await wait_for(lambda: one.asked)
        second = await one.begin(1, "t")
        async with two.watching():
            await wait_for(lambda: second.status == "completed")
        assert (len(one.asked), len(two.asked), first.status) == (1, 1, "in_progress")
        one.gate.set()
        await one.over(first)


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_batch_is_cancelled_from_another_server(tmp_path: Path, is_running: bool) -> None:
    one, two = Server(tmp_path, concurrency=1), Server(tmp_path)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(two.watching())
        if is_running:
            await stack.enter_async_context(one.watching())
        one.gate.clear()
        batch = await one.begin(3, "t")
        await wait_for(lambda: one.asked)
        other = await find(two, batch)
        await two.runner.cancel(other)
        assert other.status == "cancelling" or (is_running and other.status == "cancelled")
        assert two.asked == []
        if not is_running:
            one.die()
            await wait_for(lambda: (tmp_path / f"{batch.id}.cancel").exists() is False)
        await wait_for(lambda: other.status == "cancelled")
        assert two.asked == []
        # the other server removes its lock after the last status
        await wait_for(lambda: [path.suffix for path in tmp_path.iterdir() if path.name.startswith("batch-")] == [".json"])


@pytest.mark.slow
async def test_a_batch_without_a_server_is_cancelled_at_once(tmp_path: Path) -> None:
    one, two = Server(tmp_path), Server(tmp_path)
    one.gate.clear()
    batch = await one.begin(3, "t")
    await wait_for(lambda: one.asked)
    await one.end()
    other = await find(two, batch)
    await two.runner.cancel(other)
    assert (other.status, two.asked) == ("cancelled", [])


@pytest.mark.slow
async def test_a_deleted_input_ends_the_batch(tmp_path: Path) -> None:
    one, two = Server(tmp_path), Server(tmp_path)
    one.gate.clear()
    batch = await one.begin(3, "t")
    await wait_for(lambda: one.asked)
    await one.end()
    (tmp_path / f"{batch.input_file_id}.jsonl").unlink()
    async with two.watching():
        other = await find(two, batch)
        await two.over(other)
    assert other.status == "failed"
    assert "its input file has been deleted; upload it again" in (other.error or "")


def make_state(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "endpoint": CHAT, "input_file_id": f"file-{'9' * 32}", "created_at": 1, "expires_at": 1 << 40, "tenant": "",
            "status": "in_progress"} | fields  # fmt: skip


async def test_states_of_the_folder_are_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outside = tmp_path / "outside.jsonl"
    outside.write_text(json.dumps({"custom_id": "0", "method": "POST", "url": CHAT, "body": {}}) + "\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    names = [f"batch-{number:032x}" for number in range(8)]
    states: list[dict[str, Any]] = [
        make_state(names[0], input_file_id="../outside"),
        make_state(names[1], endpoint="/abort_request"),
        make_state(names[2], status="odd"),
        make_state("../outside"),
        make_state(names[4], metadata={"a": "x" * MAX_STATE_BYTES}),
        make_state(names[5], total="many"),
    ]
    for name, state in zip(names, states, strict=False):
        (folder / f"{name}.json").write_text(json.dumps(state))
    (folder / f"{names[6]}.json").symlink_to(outside)
    os.mkfifo(folder / f"{names[7]}.json")
    files = [f"file-{number:032x}" for number in range(3)]
    card = {"filename": "a", "purpose": "batch", "bytes": 10**15, "created_at": 0, "tenant": ""}
    for name in files:
        (folder / f"{name}.json").write_text(json.dumps(card | {"id": name}))
    (folder / f"{files[0]}.jsonl").write_text("four")
    (folder / f"{files[1]}.jsonl").symlink_to(outside)
    server = Server(folder)
    async with server.watching():
        found = server.runner.list_batches("")
        assert [batch.id for batch in found] == [names[0]]
        await server.over(found[0])
        for name in ("../outside", "..", "", "batch-\x00", "batch-" + "é" * 300, names[7]):
            await server.runner.refresh(name)
            await server.runner.files.refresh(name)
    assert (found[0].status, server.asked) == ("failed", [])
    assert "its input file has been deleted" in (found[0].error or "")
    assert [(each.id, each.bytes) for each in server.runner.files.list_files("")] == [(files[0], 4)]
    assert caplog.text.count("is left out") == 7
    assert outside.exists()


def test_changes_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that has not changed costs one look at its time; one name, one at that file's."""
    reader, reads = FolderReader(tmp_path, "batch", jobs._batch_decoder), list[str]()
    read = FolderReader._read
    monkeypatch.setattr(FolderReader, "_read", lambda *each: (reads.append(each[1]), read(*each))[1])
    names = [f"batch-{number:032x}" for number in range(50)]
    for name in names:
        (tmp_path / f"{name}.json").write_text(json.dumps(make_state(name)))
    assert reader.read_changes().keys() == set(names)
    assert (reader.read_changes(), reader.read_change(names[0]), len(reads)) == ({}, {}, 50)
    (tmp_path / f"{names[0]}.json").unlink()
    (tmp_path / f"{names[1]}.new").write_text(json.dumps(make_state(names[1], total=5)))
    (tmp_path / f"{names[1]}.new").rename(tmp_path / f"{names[1]}.json")
    changed = reader.read_change(names[1])[names[1]]
    assert changed is not None and changed.total == 5
    assert reader.read_changes() == {names[0]: None}
    assert len(reads) == 51
    old = time.time() - 60
    os.utime(tmp_path, (old, old))
    assert reader.read_changes() == {}
    monkeypatch.setattr(FolderReader, "_list_stamps", lambda _: pytest.fail("the folder has not changed"))
    assert reader.read_changes() == {}


# processes ----------------------------------------------------------------------------------------

NUM_LINES = 60
STEP = {"FRAME_FAKE_STEP": "0.005"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("model"))


class SharedFolder:
    """Servers with one `server.state_dir`."""

    def __init__(self, model: Path, folder: Path, count: int) -> None:
        self._model, self._folder = model, folder
        self.servers = [self.start() for _ in range(count)]

    def start(self) -> RunningServer:
        return RunningServer(self._model, "--state-dir", str(self._folder), "--batch-concurrency", "4", "--drain-timeout", "5", env=STEP)

    def upload(self, server: RunningServer, count: int) -> str:
        body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True}
        lines = (json.dumps({"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body}) for n in range(count))
        content = "\n".join(lines).encode()
        reply = httpx.post(f"{server.url}/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"}, timeout=60)
        return str(reply.raise_for_status().json()["id"])

    def begin(self, server: RunningServer, name: str) -> str:
        made = server.post("/v1/batches", {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"})
        return str(made.raise_for_status().json()["id"])

    def check(self, server: RunningServer, name: str) -> None:
        """All lines of a batch that has ended were answered once."""
        batch = server.get(f"/v1/batches/{name}")
        counts = {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        assert (batch["status"], batch["request_counts"], batch["errors"], batch["error_file_id"]) == ("completed", counts, None, None)
        content = httpx.get(f"{server.url}/v1/files/{batch['output_file_id']}/content", timeout=60).raise_for_status().text
        assert sorted(int(json.loads(line)["custom_id"]) for line in content.splitlines()) == list(range(NUM_LINES))

    def stop(self) -> None:
        for server in self.servers:
            with suppress(ProcessLookupError):
                server.process.send_signal(signal.SIGCONT)
            server.stop()


@pytest.fixture
def shared(model: Path, tmp_path: Path) -> Iterator[SharedFolder]:
    with ExitStack() as stack:
        shared = SharedFolder(model, tmp_path / "state", 2)
        stack.callback(shared.stop)
        yield shared


def pause(server: RunningServer) -> None:
    """SIGSTOP for a while: its batches stay with it."""
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    server.process.send_signal(signal.SIGCONT)


def drain(server: RunningServer) -> None:
    assert server.stop() == 0


def disturb(shared: SharedFolder, acts: list[Callable[[RunningServer], Any]], draw: random.Random) -> None:
    """Act on a server at a random time of a batch, and follow the batch through the other one."""
    name = shared.upload(shared.servers[0], NUM_LINES)
    for act in acts:
        victim, witness = draw.sample(shared.servers, 2)
        batch = shared.begin(victim, name)
        time.sleep(draw.uniform(0.0, 0.8))
        act(victim)
        wait_until(lambda: witness.get(f"/v1/batches/{batch}")["status"] in FINAL_STATUSES, 60)  # noqa: B023 - ends here
        shared.check(witness, batch)
        if victim.process.poll() is not None:
            shared.servers[shared.servers.index(victim)] = shared.start()
            shared.check(shared.servers[0], batch)


def kill(server: RunningServer) -> None:
    """Of the server's own process, which has the locks; its engine ends by itself."""
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()


@pytest.mark.slow
def test_batches_outlive_their_servers(shared: SharedFolder) -> None:
    disturb(shared, [kill, drain, pause], random.Random(1))
    one, two = shared.servers
    name = shared.upload(two, NUM_LINES * 20)
    batch = shared.begin(two, name)
    wait_until(lambda: one.get(f"/v1/batches/{batch}")["request_counts"]["completed"] > 0, 60)
    assert one.post(f"/v1/batches/{batch}/cancel", {}).json()["status"] == "cancelling"
    wait_until(lambda: one.get(f"/v1/batches/{batch}")["status"] == "cancelled", 60)
    ended = one.get(f"/v1/batches/{batch}")
    content = httpx.get(f"{one.url}/v1/files/{ended['output_file_id']}/content", timeout=60).text
    assert len(content.splitlines()) == ended["request_counts"]["completed"] < NUM_LINES * 20
    assert httpx.delete(f"{one.url}/v1/files/{name}", timeout=30).json()["deleted"]
    assert httpx.get(f"{two.url}/v1/files/{name}", timeout=30).status_code == 404


@pytest.mark.soak
def test_rounds_of_batches_that_outlive_their_servers(shared: SharedFolder) -> None:
    """FRAME_ROUNDS (100) rounds each of SIGKILL, SIGTERM and SIGSTOP of one of two servers."""
    disturb(shared, [kill, drain, pause] * int(os.environ.get("FRAME_ROUNDS", "100")), random.Random(2))
