"""`frame bench` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from frame.entrypoints.cli.bench import command
from frame.entrypoints.cli.main import cli
from frame.entrypoints.tools.bench.report import read
from tests.entrypoints.serving import RunningServer


def test_its_commands() -> None:
    assert set(command.commands) == {"offline", "serve", "startup", "attention", "moe", "compare"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["offline", "--input-len", "x"], "'x' is not a range of lengths; write 128 or 32:256"),
        (["attention", "--context", "5:x"], "'5:x' is not a range of lengths"),
        (["offline", "--json", "/no-such-folder/x.json"], "'/no-such-folder/x.json' cannot be written; name a file in a folder"),
        (["startup", "--json", "/"], "'/' is a folder; name a file"),
        (["serve", "--goal-ttft", "0"], "0.0 is not in the range x>0"),
        (["serve", "--rate", "1,x"], "'1,x' is not a list of rates; write 0.5,1,2"),
        (["serve", "--rate", "2,0"], "the rates must be different numbers above 0"),
        (["serve", "--rate", "2,2"], "the rates must be different numbers above 0"),
        (["serve", "--rate", "2", "--baseline", "x.json"], "--baseline has no effect without --plot"),
        (["moe", "--plot", "x.gif"], "'x.gif' has no supported file type; use .png or .svg"),
    ],
)
def test_wrong_values_are_named_before_anything_runs(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(cli, ["bench", *arguments])
    assert (done.exit_code, sentence in done.output) == (2, True), done.output


def test_a_server_is_measured(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "served.json"
    arguments = ["bench", "serve", "--base-url", server.url, "--requests", "6", "--input-len", "4:20", "--output-len", "3:6"]
    done = CliRunner().invoke(cli, [*arguments, "--rate", "500", "--vocabulary", "300", "--goal-ttft", "60000", "--json", str(path)])
    assert done.exit_code == 0, done.output
    found = read(path)
    row = found["rows"]["mixed"]
    assert (row["requests"], row["failed"], row["good"]) == (6, 0, 6)
    assert 18 <= row["output_tokens"] <= 36
    assert row["first_token_ms"]["p50"] > 0
    assert "TTFT" in done.output
    done = CliRunner().invoke(cli, ["bench", "compare", str(path), str(path)])
    assert done.exit_code == 0
    assert "1.00×" in done.output


def test_rates_are_measured_in_turn_and_drawn(server: RunningServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, plot = tmp_path / "rates.json", tmp_path / "rates.svg"
    arguments = [
        "bench",
        "serve",
        "--base-url",
        server.url,
        "--requests",
        "3",
        "--input-len",
        "4",
        "--output-len",
        "3",
        "--vocabulary",
        "300",
    ]
    done = CliRunner().invoke(cli, [*arguments, "--rate", "100,50", "--json", str(path), "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert {name: row["rate"] for name, row in read(path)["rows"].items()} == {"mixed at 100/s": 100, "mixed at 50/s": 50}
    assert plot.read_bytes().startswith(b"<?xml")
    plot.unlink()
    done = CliRunner().invoke(cli, [*arguments, "--rate", "80", "--plot", str(plot), "--baseline", str(path)])
    assert done.exit_code == 0, done.output
    assert plot.exists()
    done = CliRunner().invoke(cli, [*arguments, "--plot", str(plot)])
    assert (done.exit_code, "--plot draws values over the request rate" in done.output) == (2, True)


@pytest.mark.slow
def test_an_engine_and_its_start_are_measured(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "offline.json"
    engine = ["--model", str(checkpoint), "--max-model-len", "512", "--max-total-tokens", "4096", "--threads", "1"]
    sizes = ["--requests", "4", "--input-len", "8", "--output-len", "5"]
    done = CliRunner().invoke(cli, ["bench", "offline", *engine, *sizes, "--json", str(path)])
    assert done.exit_code == 0, done.output
    row = read(path)["rows"]["mixed"]
    assert row["output_tokens"] == 20
    assert len(row["all_seconds"]) == 2
    assert 0 < row["share_of_floor"] < 1
    assert read(path)["ceilings"]["source"] == "measured"
    done = CliRunner().invoke(cli, ["bench", "offline", *engine, "--workload", "longctx"])
    assert done.exit_code == 78
    assert "the engine takes 512" in done.output
    done = CliRunner().invoke(cli, ["bench", "startup", *engine, "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert read(path)["rows"]["ready"]["seconds"] > 0
