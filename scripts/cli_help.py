"""The help pages of every command, as text of a fixed width, for the reference. Commands of
installed packages are left out."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import click

WIDTH = 120


def help_pages() -> Iterator[tuple[str, str]]:
    """(full command name, help text), depth first in the order of the help."""
    from frame.entrypoints.cli.main import cli

    with patch("frame.entrypoints.cli.main.list_help", return_value=[]):
        pages = list(_pages(cli, "frame", None))
    yield from pages


def _pages(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = command.context_class(command, parent=parent, info_name=name.rpartition(" ")[2], **settings)
    yield name, command.get_help(context)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                yield from _pages(found, f"{name} {child}", context)
