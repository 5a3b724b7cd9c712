"""Subcommands of packages and files: listed without an import, permitted by the configuration,
blamed by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from frame.entrypoints.cli import installed
from frame.entrypoints.cli.main import cli
from frame.interfaces.cli import CliCommand
from frame.plugins import loader
from frame.plugins.registry import Provenance

EXAMPLE = str(Path(__file__).parents[2] / "plugins" / "cli_command_example.py")


@click.command(help="Greet.")
def bare() -> None:
    click.echo("greetings")


class Greet(CliCommand):
    def make_command(self) -> click.Command:
        return bare


class Fails(CliCommand):
    def make_command(self) -> click.Command:
        raise OSError("no disk")


class Number(CliCommand):
    def make_command(self) -> click.Command:
        return 3  # type: ignore[return-value]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `frame` with the entry points of three packages."""
    found = [
        (Provenance(owner, "2.0"), EntryPoint(name, f"{__name__}:{target}", installed.GROUP))
        for owner, name, target in (
            ("frame-greet", "greet", "Greet"),
            ("frame-greet", "bare", "bare"),
            ("frame-greet", "fails", "Fails"),
            ("frame-greet", "number", "Number"),
            ("frame-lost", "lost", "no_such_name"),
            ("frame-lost", "twice", "Greet"),
            ("Frame.Other", "twice", "Greet"),
            ("frame-other", "serve", "Greet"),
        )
    ]
    monkeypatch.setattr(installed, "entry_points", lambda group: [entry for _, entry in found])
    monkeypatch.setattr(loader, "_entry_points", lambda: found)
    return lambda *arguments, **environment: CliRunner(env=environment).invoke(cli, arguments, prog_name="frame")


def test_help_lists_them_with_their_package_and_imports_none(run: Any) -> None:
    output = run("--help").output
    assert "From frame-greet 2.0." in output
    assert "lost " in output
    assert "From Frame.Other 2.0 and frame-lost 2.0." in output
    assert output.count("  serve ") == 1  # a built-in command keeps its name


def test_a_command_runs(run: Any) -> None:
    assert run("greet").output == "greetings\n"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("bare", "cli_command 'bare' (frame-greet 2.0): {here}:bare is no subclass of frame.interfaces.cli.CliCommand; derive it."),
        ("number", "cli_command 'number' (frame-greet): make_command returns no click command"),
        ("lost", "cli_command 'lost' (frame-lost 2.0) was selected but does not load from {here}:no_such_name: AttributeError"),
        ("twice", "uninstall or deny one (try plugins.deny: [Frame.Other])"),
        ("fails", "cli_command 'fails' (frame-greet 2.0) failed in Fails.make_command when it is called: OSError: no disk"),
        ("fails", "update or uninstall frame-greet, or report the fault to its authors"),
    ],
)
def test_what_is_wrong_is_named(run: Any, name: str, sentence: str) -> None:
    result = run(name)
    assert result.exit_code == 78
    assert sentence.format(here=__name__) in result.output


def test_denied_and_other_packages_have_no_commands(run: Any) -> None:
    output = run("--help", FRAME_PLUGINS__DENY="[frame_greet]").output
    assert "frame-greet" not in output
    assert "Frame.Other" in output
    assert run("greet", FRAME_PLUGINS__DENY="[frame_greet]").exit_code == 2
    assert run("greet", FRAME_PLUGINS__ALLOW="[frame-other]").exit_code == 2
    assert run("twice", FRAME_PLUGINS__DENY="[frame-other]").output == "greetings\n"


def test_a_denied_command_says_so(run: Any) -> None:
    deny = {"FRAME_PLUGINS__DENY": "[cli_command/greet]"}
    assert "  greet " not in run("--help", **deny).output
    result = run("greet", **deny)
    assert (result.exit_code, "plugins.deny excludes it" in result.output) == (78, True)


def test_a_wrong_configuration_stops_no_help(run: Any) -> None:
    result = run("--help", FRAME_PLUGINS__DENY="{")
    assert result.exit_code == 0
    assert "serve" in result.output
    assert run("greet", FRAME_CACHE__PAGE_SIZE="many").exit_code == 78


def test_a_file_brings_a_command_with_its_options(run: Any) -> None:
    assert "  greet " in run("--plugin", EXAMPLE, "--help", FRAME_PLUGINS__DENY="[frame-greet]").output
    options = {"FRAME_PLUGINS__DENY": "[frame-greet]", "FRAME_PLUGINS__OPTIONS": '{"cli_command/greet": {"word": "Hi"}}'}
    assert run("--plugin", EXAMPLE, "greet", "you", **options).output == "Hi, you.\n"
    assert run("greet", **options, FRAME_PLUGINS__PATHS=f"[{EXAMPLE}]").output == "Hi, world.\n"
    wrong = run("--plugin", EXAMPLE, "serve")
    assert (wrong.exit_code, "write frame serve --plugin FILE" in wrong.output) == (2, True)
    missing = run("--plugin", "no_such_file.py", "--help")
    assert (missing.exit_code, "no_such_file.py is no Python file" in missing.output) == (78, True)
