"""What `frame --help` and the help of its groups say of each command is a whole sentence. The help
of a command with settings shows the common ones, those of a section, or all."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner, Result

from frame.entrypoints.cli.main import cli
from frame.entrypoints.cli.options import COMMON_FLAGS
from frame.entrypoints.configuration.flat_settings import settings
from frame.entrypoints.configuration.tier_flags import TIER_FLAGS

WIDTH = 80


@pytest.mark.parametrize("name", ["bench", "config", "plugins", "profile"])
def test_every_command_is_told_in_a_sentence(name: str) -> None:
    context = click.Context(cli, **cli.context_settings)
    group = cli.get_command(context, name)
    assert isinstance(group, click.Group)
    room = WIDTH - 6 - max(map(len, group.commands))
    for command in group.commands.values():
        assert not command.get_short_help_str(room).endswith("..."), f"{name} {command.name}: no sentence of {room} characters"


def show(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, terminal_width=WIDTH)


def flags_in(text: str) -> set[str]:
    return {line.split()[0].removeprefix("--") for line in text.splitlines() if line.startswith("  --")}


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--help", "--tp", "2"], ["--tp", "2", "-h"]])
def test_help_shows_the_flags_that_people_use(arguments: list[str]) -> None:
    result = show("serve", *arguments)
    assert result.exit_code == 0
    assert len(result.output.splitlines()) <= 60
    assert 10 <= len(COMMON_FLAGS) <= 15
    assert flags_in(result.output) == {*COMMON_FLAGS, "watch", "config", "set"}
    assert {each.flag for each in settings()} > COMMON_FLAGS
    last = "--help all shows all flags, --help SECTION those of a section of the settings: model, parallel,"
    assert last in " ".join(result.output.split())


@pytest.mark.parametrize("form", [["--help", "cache"], ["--help=cache"], ["-h", "cache"]])
def test_help_shows_a_section(form: list[str]) -> None:
    result = show("serve", *form)
    assert result.exit_code == 0
    assert flags_in(result.output) == {"disable-radix-cache", *TIER_FLAGS, *(each.flag for each in settings() if each.path[0] == "cache")}


@pytest.mark.parametrize("form", [["--help", "all"], ["--help=all"], ["-h", "all", "--tp", "2"]])
def test_help_shows_all_flags(form: list[str]) -> None:
    assert flags_in(show("serve", *form).output) > {each.flag for each in settings() if each.shape != "table"}


def test_an_unknown_section_is_an_error_with_a_remedy() -> None:
    for section, remedy in (("modle", "; did you mean 'model'?"), ("xyz", "; sections: model, parallel,")):
        result = show("serve", "--help", section)
        assert result.exit_code == 2
        assert f"The settings have no section {section!r}{remedy}" in result.output
