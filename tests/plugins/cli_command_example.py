"""`frame --plugin cli_command_example.py greet NAME`."""

import click
from pydantic import BaseModel

from frame.interfaces.cli import CliCommand


class Greet(CliCommand):
    """Greets with a word of the configuration."""

    conformance_arguments = (("there",),)
    conformance_outputs = (((), "Hello, world.\n"), (("there",), "Hello, there.\n"))

    class Options(BaseModel):
        word: str = "Hello"

    def __init__(self, context, options=None):
        self.word = (options or self.Options()).word

    def make_command(self):
        @click.command(help="Greet NAME.")
        @click.argument("name", default="world")
        def command(name):
            click.echo(f"{self.word}, {name}.")

        return command
