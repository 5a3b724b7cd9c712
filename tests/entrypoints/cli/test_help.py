"""What `frame --help` and the help of its groups say of each command is a whole sentence."""

from __future__ import annotations

import click
import pytest

from frame.entrypoints.cli.main import cli

WIDTH = 80


@pytest.mark.parametrize("name", ["bench", "config", "plugins", "profile"])
def test_every_command_is_told_in_a_sentence(name: str) -> None:
    context = click.Context(cli)
    group = cli.get_command(context, name)
    assert isinstance(group, click.Group)
    room = WIDTH - 6 - max(map(len, group.commands))
    for command in group.commands.values():
        assert not command.get_short_help_str(room).endswith("..."), f"{name} {command.name}: no sentence of {room} characters"
