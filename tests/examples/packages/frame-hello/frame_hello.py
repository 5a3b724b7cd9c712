"""A subcommand: `frame hello NAME` greets and lists the installed plugin kinds."""

import click

from frame.core.interfaces.kinds import KINDS


@click.command(help="Greet, and count the kinds of plugins.")
@click.argument("name", default="world")
def command(name: str) -> None:
    click.echo(f"Hello, {name}. frame has {len(KINDS)} kinds of plugins.")
