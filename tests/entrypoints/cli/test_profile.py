"""`frame profile` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from frame.entrypoints.cli.main import cli
from tests.entrypoints.serving import RunningServer


def test_an_engine_is_recorded_and_its_trace_read_again(checkpoint: Path, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.json.gz", tmp_path / "out.json"
    engine = ["--model", str(checkpoint), "--max-model-len", "256", "--max-total-tokens", "2048", "--threads", "1"]
    sizes = ["--requests", "3", "--input-len", "12", "--output-len", "8", "--steps", "6"]
    done = CliRunner().invoke(cli, ["profile", "offline", *engine, *sizes, "--trace", str(trace), "--json", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert (found["has_gpu"], found["rows"]["extend"]["tokens"], found["rows"]["decode"]["rows"]) == (False, 36, 3)
    assert found["rows"]["decode"]["kernels"][0]["us_per_step"] > 0
    again = CliRunner().invoke(cli, ["profile", "read", str(trace), "--top", "3"])
    assert again.exit_code == 0, again.output
    assert "step to step" in again.output
    later = CliRunner().invoke(cli, ["profile", "offline", *engine, *sizes[:-2], "--steps", "2", "--skip", "2", "--json", str(out)])
    assert later.exit_code == 0, later.output
    assert set(json.loads(out.read_text())["rows"]) == {"decode"}


def test_a_recording_that_would_never_begin_is_refused(checkpoint: Path) -> None:
    engine = ["--model", str(checkpoint), "--max-model-len", "256", "--max-total-tokens", "2048", "--threads", "1"]
    done = CliRunner().invoke(cli, ["profile", "offline", *engine, "--input-len", "12", "--output-len", "8", "--skip", "8"])
    assert done.exit_code == 78
    assert "--skip 8 is not below the 8 output tokens" in done.output


def test_a_server_without_a_folder_for_profiles_says_so(server: RunningServer) -> None:
    done = CliRunner().invoke(cli, ["profile", "server", "--base-url", server.url])
    assert done.exit_code == 1
    assert "--profile-dir" in done.output
