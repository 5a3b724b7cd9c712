"""`frame NAME` for a NAME that is no command says what to do; numbers of options are finite."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from frame.entrypoints.cli import main
from frame.entrypoints.cli.installed import PACKAGES
from frame.host.installation import install_command
from tests.architecture.source import ROOT


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "load_command", lambda name, paths: None)
    monkeypatch.setattr(main, "list_help", lambda paths: [])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("serv", "No such command 'serv'; did you mean 'serve'?"),
        ("plugin", "No such command 'plugin'; did you mean 'plugins'?"),
        ("quantise", "No such command 'quantise'; did you mean 'quantize'?"),
        ("xyz", "No such command 'xyz'; frame --help lists the commands."),
        (
            "quantize",
            f"frame quantize is in the package frame-quantize, which is not installed; run {install_command('frame-quantize')}",
        ),
    ],
)
def test_the_remedy_is_named(name: str, sentence: str) -> None:
    result = CliRunner().invoke(main.cli, [name, "x", "--y"])
    assert result.exit_code == 2
    assert result.output.splitlines()[-1] == f"Error: {sentence}"


def test_the_packages_bring_these_commands() -> None:
    for name, package in PACKAGES.items():
        assert f"\n{name} = " in (ROOT / "packages" / package / "pyproject.toml").read_text().partition("entry-points.frame_commands]")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "--machine", "1xh200", "--burstiness", "nan"],
        ["simulate", "--machine", "1xh200", "--rate", "nan"],
        ["bench", "serve", "--burstiness", "nan"],
        ["bench", "serve", "--temperature", "nan"],
        ["bench", "serve", "--goal-ttft", "nan"],
        ["plan", "--machine", "8xh200", "--rate", "nan"],
        ["plan", "--machine", "8xh200", "--hosts", "2", "--arrivals", "inf"],
        ["router", "--replica", "http://127.0.0.1:1", "--health-interval", "nan"],
    ],
)
def test_numbers_of_options_are_finite(arguments: list[str]) -> None:
    done = CliRunner().invoke(main.cli, arguments)
    assert done.exit_code == 2, done.output
    assert f"'{arguments[-2]}': {arguments[-1]} is not" in done.output


def test_a_plan_of_one_token_has_no_time_between_tokens() -> None:
    done = CliRunner().invoke(main.cli, ["plan", "--machine", "8xh200", "--hosts", "2", "--arrivals", "1", "--context", "2"])
    assert done.exit_code == 0, done.output
    assert "ITL none, end to end" in done.output


def test_a_report_that_cannot_be_written_is_refused_before_the_work() -> None:
    done = CliRunner().invoke(main.cli, ["simulate", "--machine", "1xh200", "--json", "/proc/report.json"])
    assert done.exit_code == 2, done.output
    assert "'/proc/report.json' cannot be written" in done.output
