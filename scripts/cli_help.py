"""The help pages of every command, as text of a fixed width, for the reference: the flags of
settings, which many commands share, once. Commands of installed packages are left out."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import click

from frame.entrypoints.cli.options import ALL, HELP, OWN, ConfigCommand

WIDTH = 120


def help_pages() -> Iterator[tuple[str, str]]:
    """(full command name, help text), depth first in the order of the help."""
    from frame.entrypoints.cli.main import cli

    with patch("frame.entrypoints.cli.main.list_help", return_value=[]):
        pages = list(_pages(cli, "frame", None))
    yield from pages


def shared_flags() -> str:
    """The flags of settings, of every command that has them."""
    from frame.entrypoints.cli.serve import command

    text = _format(command, _make_context(command, None, "frame serve"), ALL)
    return text[text.index("Configuration:\n") :]


def _format(command: click.Command, context: click.Context, which: str) -> str:
    context.meta[HELP] = which
    text = command.get_help(context)
    return f"{text}\n\nThe flags of settings: see Shared flags." if which == OWN and isinstance(command, ConfigCommand) else text


def _make_context(command: click.Command, parent: click.Context | None, name: str) -> click.Context:
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    return command.context_class(command, parent=parent, info_name=name.rpartition(" ")[2], **settings)


def _pages(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    context = _make_context(command, parent, name)
    yield name, _format(command, context, OWN)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                yield from _pages(found, f"{name} {child}", context)
