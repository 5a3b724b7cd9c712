"""`RequestDump`: limits of size and age, files of others, and a full disk."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frame.config.server_sections import LogSection
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, StepTokens
from frame.entrypoints.engine_client import request_dump
from frame.entrypoints.engine_client.request_dump import DumpFiles, RequestDump
from frame.entrypoints.tools.bench.dump import read_dump
from tests.entrypoints.engine_client.test_client import make, submit

HEAD = b'{"format":"frame-request-dump","version":1}\n'


def open_dump(folder: Path, **settings: Any) -> RequestDump:
    folder.chmod(0o700)
    named = {f"request_dump_{name}": value for name, value in settings.items()}
    return RequestDump(LogSection.model_validate({"request_dump": str(folder), **named}), "tiny")


def finish(client: Any, rid: str, *tokens: int) -> None:
    submit(client, SamplingParams(), rid=rid)
    client.handle_messages([StepTokens(rids=[rid], token_ids=[list(tokens)], finishes={0: Finish("stop")})])


def test_sequences_that_ended_or_were_abandoned(tmp_path: Path) -> None:
    client, _ = make()
    client.stats.dump = open_dump(tmp_path)
    finish(client, "one", 5, 6)
    gone = submit(client, SamplingParams(temperature=0.5), rid="two")
    client.handle_messages([StepTokens(rids=["two"], token_ids=[[7]])])
    client.abort_request(gone)
    client.stats.dump.close()
    one, two = read_dump(tmp_path)
    assert (one.line.id, one.line.finish, one.output.tolist()) == ("one", "stop", [5, 6])
    assert (two.line.id, two.line.finish, two.output.tolist(), two.line.params.temperature) == ("two", "abort", [7], 0.5)
    assert one.line.params.seed is not None  # the client chose it
    assert abs(one.line.at - time.time()) < 60 and one.line.first is not None and one.line.first <= one.line.last <= one.line.end


def test_a_share_takes_whole_requests(tmp_path: Path) -> None:
    client, _ = make()
    client.stats.dump = open_dump(tmp_path, share=0.5)
    for number in range(200):
        finish(client, f"r{number}", 5)
    client.stats.dump.close()
    recorded = read_dump(tmp_path)
    assert 60 < len(recorded) < 140


def test_files_stay_below_their_limits(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    (tmp_path / "requests-0.jsonl").symlink_to(tmp_path / "notes.txt")
    files = DumpFiles(tmp_path, HEAD, max_bytes=80_000, max_age=3600)
    for number in range(1000):
        files.write(b"%04d" % number + b"x" * 995 + b"\n")
        written = list(tmp_path.glob("requests-2*"))
        assert sum(path.stat().st_size for path in written) <= 80_000
    files.write_crash([b"%04d" % number + b"y" * 995 + b"\n" for number in range(20)])
    files.close()
    newest = max(tmp_path.glob("requests-2*"), key=lambda path: path.name).read_bytes()
    assert newest.startswith(HEAD) and newest.endswith(b"0999" + b"x" * 995 + b"\n")
    (crash,) = tmp_path.glob("crash-*")
    assert [line[:4] for line in crash.read_bytes().splitlines()[1:]] == [b"%04d" % number for number in range(11, 20)]
    assert (tmp_path / "notes.txt").read_text() == "kept" and (tmp_path / "requests-0.jsonl").is_symlink()
    with pytest.raises(OSError, match="longer than an eighth"):
        files.write(b"x" * 10_000)


def test_old_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DumpFiles(tmp_path, HEAD, max_bytes=80_000, max_age=80)
    files.write(b"a\n")
    (first,) = tmp_path.iterdir()
    now = time.time()
    monkeypatch.setattr(request_dump.time, "time", lambda: now + 11)
    files.check_age()
    files.write(b"b\n")
    assert len(list(tmp_path.iterdir())) == 2
    os.utime(first, (now - 60, now - 60))
    files.check_age()
    assert first not in list(tmp_path.iterdir())


def test_a_folder_that_is_gone_harms_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client, _ = make()
    folder = tmp_path / "dump"
    folder.mkdir()
    client.stats.dump = dump = open_dump(folder)
    folder.rmdir()
    folder.write_text("in its place")
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            finish(client, f"r{number}", 5)
        dump.close()
    assert dump.dropped == 5
    sentence = next(record.message for record in caplog.records if "not recorded" in record.message)
    assert sentence.endswith("cannot be written (Not a directory)")
    assert client.stats.finished == {"stop": 5}


def test_a_deleted_folder_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = DumpFiles(tmp_path / "dump", HEAD, max_bytes=80_000, max_age=3600)
    files.write(b"a\n")  # makes the folder
    files.check_age()
    files.write(b"b\n")
    assert [path.read_bytes() for path in (tmp_path / "dump").iterdir()] == [HEAD + b"a\nb\n"]
    shutil.rmtree(tmp_path / "dump")
    with caplog.at_level(logging.WARNING):
        files.check_age()
        files.check_age()
    files.write(b"c\n")
    files.close()
    assert caplog.text.count("was deleted") == 1
    assert [path.read_bytes() for path in (tmp_path / "dump").iterdir()] == [HEAD + b"c\n"]
    assert (tmp_path / "dump").stat().st_mode & 0o777 == 0o700


def test_a_backlog_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = make()
    monkeypatch.setattr(request_dump, "MAX_WAITING", 3)
    client.stats.dump = dump = open_dump(tmp_path)
    finish(client, "long", 5, 6, 7)
    assert dump.dropped == 1
    dump.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_half_line_file_or_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes parts of a line and of a head; what is there afterwards can be read."""
    client, _ = make()
    client.stats.dump = open_dump(tmp_path)
    finish(client, "before", 5)
    dump, write, room = client.stats.dump, os.write, [1 << 20]

    def write_some(file: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(file, data[: room[0]])
        room[0] -= done
        return done

    def reach(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    reach(lambda: any(path.stat().st_size > 200 for path in tmp_path.glob("requests-*")))
    monkeypatch.setattr(request_dump.os, "write", write_some)
    room[0], num_files = 40, sum(1 for _ in Path("/proc/self/fd").iterdir())
    for number in range(20):
        finish(client, f"lost{number}", 5)
        reach(lambda number=number: dump.dropped > number)  # type: ignore[misc]
        room[0] = 10
    dump.record_crash([])
    reach(lambda: dump.dropped == 21)
    room[0] = 1 << 20
    finish(client, "after", 5)
    dump.close()
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= num_files
    assert [recorded.line.id for recorded in read_dump(tmp_path)] == ["before", "after"]
