"""Wrong subcommands, derived from one that greets."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from typing import Any, ClassVar

import click

from frame.interfaces.cli import CliCommand, CommandContext
from tests.testing.mutants import MutantList


class Greeting(CliCommand):
    """Greets."""

    conformance_arguments = (("there", "--times", "2"),)
    conformance_outputs = (((), "frame: hello, world\n"), (("there", "--times", "2"), "frame: hello, there\n" * 2))

    def __init__(self, context: CommandContext, options: Any = None) -> None:
        self.program = context.program

    def make_command(self) -> click.Command:
        @click.command(help="Greet NAME.")
        @click.argument("name", default="world")
        @click.option("--times", default=1, help="Number of greetings.")
        def command(name: str, times: int) -> None:
            self.run(name, times)

        return command

    def run(self, name: str, times: int) -> None:
        for _ in range(times):
            click.echo(f"{self.program}: hello, {name}")


mutant = MUTANTS = MutantList("cli_command", reference=Greeting)


@mutant
class ReturnsAFunction(Greeting):
    """Returns a function that is no click command."""

    def make_command(self) -> click.Command:
        return self.run  # type: ignore[return-value]


@mutant
class KeepsOneCommand(Greeting):
    """Makes one command for all calls."""

    made: ClassVar[list[click.Command]] = []

    def make_command(self) -> click.Command:
        self.made[:] = self.made or [super().make_command()]
        return self.made[0]


@mutant
class AddsOptionsEachTime(Greeting):
    """Keeps its options in a list of the class, which grows with each command."""

    options: ClassVar[list[click.Parameter]] = []

    def make_command(self) -> click.Command:
        command = super().make_command()
        self.options.append(click.Option([f"--extra-{len(self.options)}"], help="One more."))
        command.params += self.options
        return command


@mutant
class ChangesTheEnvironment(Greeting):
    """Sets an environment variable for the libraries of its own when it is made."""

    def __init__(self, context: CommandContext, options: Any = None) -> None:
        super().__init__(context, options)
        os.environ["MUTANT_THREADS"] = str(1 + int(os.environ.get("MUTANT_THREADS", "0")))


@mutant
class PrintsABanner(Greeting):
    """Prints its name when it is made, also into the JSON of other commands."""

    def make_command(self) -> click.Command:
        sys.stdout.write("greeting 1.0\n")
        return super().make_command()


@mutant
class HasNoHelp(Greeting):
    """Has no help text, so that a list of commands has an empty line."""

    def make_command(self) -> click.Command:
        command = super().make_command()
        command.help = None
        return command


@mutant
class ExplainsNoOption(Greeting):
    """Has an option without a help text."""

    def make_command(self) -> click.Command:
        command = super().make_command()
        command.params.append(click.Option(["--loud"], is_flag=True, expose_value=False))
        return command


@mutant
class ExplainsAtLength(Greeting):
    """Begins its help with a sentence that a list of commands cuts."""

    def make_command(self) -> click.Command:
        command = super().make_command()
        command.help = "Greet somebody whose name is given, or the whole world where no name is given, several times if that is wanted."
        return command


@mutant
class LacksTheHelpOption(Greeting):
    """Has no option --help, which all other commands have."""

    def make_command(self) -> click.Command:
        command = super().make_command()
        command.add_help_option = False
        return command


@mutant
class SharesAFlag(Greeting):
    """Has two options of one name, of which the second is never read."""

    def make_command(self) -> click.Command:
        command = super().make_command()
        command.params.append(click.Option(["--times"], help="Other greetings.", expose_value=False))
        return command


@mutant
class IgnoresUnknownOptions(Greeting):
    """Ignores options that it does not have."""

    def make_command(self) -> click.Command:
        command = super().make_command()
        command.context_settings = {"ignore_unknown_options": True, "allow_extra_args": True}
        return command


@mutant
class FailsOnUnknownOptions(Greeting):
    """Ends with exit code 1 for a wrong call."""

    def make_command(self) -> click.Command:
        class Fails(click.Command):
            def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
                try:
                    return super().parse_args(ctx, args)
                except click.UsageError as error:
                    raise click.ClickException(f"cannot read {args}") from error

        found = super().make_command()
        return Fails(found.name, callback=found.callback, params=found.params, help=found.help)


@mutant
class ImportsTorch(Greeting):
    """Imports torch before it is called."""

    def make_command(self) -> click.Command:
        import torch  # noqa: F401

        return super().make_command()


@mutant
class CountsAtTheStart(Greeting):
    """Computes for more than a second before its help appears."""

    def make_command(self) -> click.Command:
        began = time.process_time()
        while time.process_time() - began < 1.0:
            pass
        return super().make_command()


@mutant
class FailsInTheCall(Greeting):
    """Raises an error in every call."""

    def run(self, name: str, times: int) -> None:
        raise KeyError(name)


@mutant
class EndsWithAnotherCode(Greeting):
    """Ends a good call with exit code 3."""

    def run(self, name: str, times: int) -> None:
        sys.exit(3)


@mutant
class LeavesTheFolder(Greeting):
    """Changes the working folder."""

    def run(self, name: str, times: int) -> None:
        os.chdir("/")


@mutant
class TakesASignal(Greeting):
    """Keeps its handler of a signal after the call."""

    def run(self, name: str, times: int) -> None:
        signal.signal(signal.SIGHUP, lambda *_: None)


@mutant
class ConfiguresLogging(Greeting):
    """Adds a handler to the root logger."""

    def run(self, name: str, times: int) -> None:
        logging.getLogger().addHandler(logging.NullHandler())


@mutant
class KeepsTheProcessAlive(Greeting):
    """Starts a thread that lives on after the call."""

    def run(self, name: str, times: int) -> None:
        threading.Thread(target=time.sleep, args=(1.0,)).start()


@mutant
class HidesErrors(Greeting):
    """Ends with exit code 0 when its output cannot be written."""

    def run(self, name: str, times: int) -> None:
        with contextlib.suppress(Exception):
            super().run(name, times)
