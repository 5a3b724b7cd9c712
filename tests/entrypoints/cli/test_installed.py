"""Subcommands of installed packages: listed without an import, permitted by the configuration,
blamed by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from frame.entrypoints.cli import installed
from frame.entrypoints.cli.main import cli


@click.command()
def greet() -> None:
    click.echo("greetings")


NOT_A_COMMAND = 3


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Entry points of three packages."""
    found = []
    for owner, name, target in (
        ("frame-greet", "greet", "greet"),
        ("frame-greet", "number", "NOT_A_COMMAND"),
        ("frame-lost", "lost", "no_such_name"),
        ("frame-lost", "twice", "greet"),
        ("Frame.Other", "twice", "greet"),
        ("frame-other", "serve", "greet"),
    ):
        entry = EntryPoint(name, f"{__name__}:{target}", installed.GROUP)
        vars(entry).update(dist=SimpleNamespace(name=owner, version="2.0"))
        found.append(entry)
    monkeypatch.setattr(installed, "entry_points", lambda group: found)
    return found


@pytest.fixture
def run(entries: list[Any]) -> Any:
    return lambda *arguments, **environment: CliRunner(env=environment).invoke(cli, arguments, prog_name="frame")


def test_help_lists_them_with_their_package_and_imports_none(run: Any) -> None:
    output = run("--help").output
    assert "From frame-greet 2.0." in output
    assert "From frame-lost 2.0 and Frame.Other 2.0." in output
    assert output.count("  serve ") == 1  # a built-in command keeps its name


def test_a_command_runs(run: Any) -> None:
    assert run("greet").output == "greetings\n"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("number", "The command 'number' of frame-greet 2.0: {here}:NOT_A_COMMAND is no click command"),
        ("lost", "The command 'lost' of frame-lost 2.0 does not load from {here}:no_such_name: AttributeError"),
        ("twice", "The command 'twice' comes from frame-lost and Frame.Other; uninstall one, or set plugins.deny: [frame-lost]"),
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


def test_a_wrong_configuration_stops_no_help(run: Any) -> None:
    result = run("--help", FRAME_PLUGINS__DENY="{")
    assert result.exit_code == 0
    assert "serve" in result.output
    assert run("greet", FRAME_CACHE__PAGE_SIZE="many").exit_code == 78
