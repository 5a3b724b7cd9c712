"""Reading request dumps: damaged and hostile files end in one sentence, and shapes keep what
prompts share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from frame.core.errors import ConfigError
from frame.entrypoints.tools.bench import dump as module
from frame.entrypoints.tools.bench.dump import RecordedWorkload, read_dump
from frame.entrypoints.tools.bench.replay import build_jobs, parse_speed
from frame.entrypoints.tools.bench.workload import Arrivals

HEAD = {"format": "frame-request-dump", "version": 1, "model": "m", "content": "full", "block": 64}
LINE = {
    "at": 100.0, "id": "a", "params": {"seed": 7}, "num_prompt": 3, "num_output": 2, "finish": "stop", "prompt": [5, 6, 7],
    "output": [8, 9], "first": 0.5, "last": 1.0, "end": 1.5,
}  # fmt: skip


def write(path: Path, *lines: Any, head: Any = HEAD) -> Path:
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in (head, *lines)]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return path


def test_files_of_a_folder_are_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    write(tmp_path / "requests-2.jsonl", LINE | {"id": "b", "at": 90.0})
    write(tmp_path / "requests-1.jsonl", LINE)
    write(tmp_path / "crash-1.jsonl", LINE | {"id": "c", "at": 110.0, "finish": "running"})
    (tmp_path / "other.txt").write_text("nonsense")
    assert [recorded.line.id for recorded in read_dump(tmp_path)] == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ((b"{",), "f:2 is damaged"),
        ((LINE, json.dumps(LINE).encode()[:-9]), "f:3 is damaged"),
        ((b"\xff\xfe",), "f:2 is damaged"),
        ((b"[" * 100_000,), "f:2 is damaged"),
        ((b"",), "f:2 is damaged"),
        (([LINE],), "f:2 is damaged"),
        ((LINE | {"at": -1},), "f:2 is damaged (Expected `float` >= 0.0 - at `$.at`)"),
        ((LINE | {"at": 1e300},), "at `$.at`"),
        ((LINE | {"prompt": [5, 6, "x"]},), "Expected `int`, got `str` - at `$.prompt[2]`"),
        ((LINE | {"prompt": [5, 6, 2**31]},), "`$.prompt[2]`"),
        ((LINE | {"prompt": [5, 6, -1]},), "`$.prompt[2]`"),
        ((LINE | {"num_prompt": 4},), "prompt has 3 tokens, and num_prompt is 4"),
        ((LINE | {"num_output": 0},), "output has 2 tokens, and num_output is 0"),
        ((LINE | {"num_prompt": 0, "prompt": []},), "is not from 1 to"),
        ((LINE | {"prompt": None},), "prompt or output is missing"),
        ((LINE | {"first": 2.0},), "first is after last"),
        ((LINE | {"first": None},), "first is after last"),
        ((LINE | {"finish": "bored"},), "at `$.finish`"),
        ((LINE | {"params": {"temperature": -1}},), "temperature is -1.0; it must be from 0 to 100"),
        ((LINE | {"params": {"stop": ["x"] * 1000}},), "stop has 1000 strings"),
        ((LINE | {"params": None},), "at `$.params`"),
        ((LINE, LINE | {"at": 1e9}),  "days, and at most 7 can be replayed"),
        ((), "has no recorded sequences"),
    ],
)  # fmt: skip
def test_damaged_lines_are_named(tmp_path: Path, lines: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_dump(write(tmp_path / "f", *lines))
    text = str(caught.value)
    assert sentence in text and text.count("\n") == 0 and len(text) < 400


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (b"", "f is no request dump"),
        (b"\x80\x04pickle", "f is no request dump"),
        (HEAD | {"format": "other"}, "f is no request dump"),
        (HEAD | {"version": 2}, "f has version 2 of the format, and this frame reads 1"),
        (HEAD | {"block": 0}, "f is no request dump"),
        (HEAD | {"content": "shapes"}, "a dump of shapes has a prompt or an output"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, head: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_dump(write(tmp_path / "f", LINE, head=head))


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is no file"):
        read_dump(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="/dev/zero is no file"):
        read_dump(Path("/dev/zero"))
    with pytest.raises(ConfigError, match=r"none cannot be read \(No such file"):
        read_dump(tmp_path / "none")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(5 << 30)  # sparse
    with pytest.raises(ConfigError, match="huge has more than 4 GiB"):
        read_dump(tmp_path / "huge")
    path = write(tmp_path / "long", LINE | {"id": "x" * 2000})
    monkeypatch.setattr(module, "MAX_LINE", 1000)
    with pytest.raises(ConfigError, match="long:2 has more than 0 MiB"):
        read_dump(path)
    monkeypatch.setattr(module, "MAX_SEQUENCES", 1)
    many = write(tmp_path / "many", LINE | {"id": ""}, LINE | {"id": ""}, {"a line that is": "not read any more"})
    with pytest.raises(ConfigError, match="has more than 1 sequences"):
        read_dump(many)
    monkeypatch.setattr(module, "MAX_SEQUENCES", 9)
    monkeypatch.setattr(module, "MAX_ALL_TOKENS", LINE["num_prompt"])  # a short line of shapes names millions
    with pytest.raises(ConfigError, match="tokens together"):
        read_dump(many)


def test_shapes_share_what_the_prompts_shared(tmp_path: Path) -> None:
    shape = {name: value for name, value in LINE.items() if name not in ("prompt", "output")} | {"num_prompt": 200}
    lines = [shape | {"id": str(i), "blocks": blocks} for i, blocks in enumerate(([1, 2, 3], [1, 2, 9], [4, 2, 3]))]
    first, second, third = (each.build_prompt(2000) for each in read_dump(write(tmp_path / "f", *lines, head=HEAD | {"content": "shapes"})))
    assert [len(first), len(second), len(third)] == [200] * 3
    assert first[:128] == second[:128] and first[128:192] != second[128:192]
    assert first[:64] != third[:64]
    assert all(10 <= token < 2000 for token in first)


def test_jobs_at_the_times_of_the_record(tmp_path: Path) -> None:
    lines = (LINE, LINE | {"at": 104.0}, LINE | {"at": 105.0, "media": 1}, LINE | {"at": 106.0, "num_output": 0, "output": []})
    recorded = read_dump(write(tmp_path / "f", *lines))
    jobs, skipped = build_jobs(recorded, 2.0, 2000)
    assert [job.at for job in jobs] == [0.0, 2.0]
    assert skipped == {"have media": 1, "have no output": 1}
    assert [job.at for job in build_jobs(recorded, parse_speed("max"), 2000)[0]] == [0.0, 0.0]
    workload = RecordedWorkload(recorded)
    assert [job.at for job in workload.jobs(2000, 0, Arrivals())] == [0.0, 4.0]
    assert [(job.prompt, job.output) for job in workload.jobs(2000, 0)] == [([5, 6, 7], 2)] * 2
    assert [job.at for job in workload.jobs(2000, 0, Arrivals(1e6))] != [0.0, 4.0]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast", "1e9"])
def test_speeds_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is no speed"):
        parse_speed(text)
