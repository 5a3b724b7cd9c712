"""A subcommand: `frame hello NAME` greets and counts the kinds of plugins."""

import click

from frame.interfaces.cli import CliCommand
from frame.interfaces.kinds import KINDS


class Hello(CliCommand):
    conformance_arguments = (("there",),)
    conformance_outputs = tuple(
        (each, f"Hello, {name}. frame has {len(KINDS)} kinds of plugins.\n") for each, name in (((), "world"), (("there",), "there"))
    )

    def make_command(self) -> click.Command:
        @click.command(help="Greet, and count the kinds of plugins.")
        @click.argument("name", default="world")
        def command(name: str) -> None:
            click.echo(f"Hello, {name}. frame has {len(KINDS)} kinds of plugins.")

        return command
