"""Commands: sums of numbers, and commands with a bug each."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

import click
from pydantic import BaseModel

from frame.interfaces.cli import CliCommand, CommandContext
from tests.testing.held_out import Wrong


class Tally(CliCommand):
    """`frame tally 1 2`."""

    conformance_arguments = (("1", "2"), ("--mean", "3", "4"))

    def __init__(self, context: CommandContext, options: BaseModel | None = None) -> None:
        self.program = context.program

    def make_command(self) -> click.Command:
        @click.command(help="Add up NUMBERS.")
        @click.argument("numbers", nargs=-1, required=True, type=float)
        @click.option("--mean", is_flag=True, help="Print the mean instead.")
        @click.option("--file", type=click.Path(path_type=Path), help="Write the result to this file.")
        def command(numbers: tuple[float, ...], mean: bool, file: Path | None) -> None:
            self.run(numbers, mean, file)

        return command

    def run(self, numbers: tuple[float, ...], mean: bool, file: Path | None) -> None:
        result = sum(numbers) / (len(numbers) if mean else 1)
        if file is None:
            click.echo(f"{result:g}")
            return
        try:
            file.write_text(f"{result:g}\n")
        except OSError as error:
            raise click.ClickException(f"{file} cannot be written: {error.strerror}") from error


TWIN = Tally
WRONG = Wrong()


@WRONG.add("`frame --help` prints a banner of this command in the midst: it is printed when the command is made.")
class PrintsBanner(Tally):
    def make_command(self) -> click.Command:
        sys.stdout.write("tally 1.0\n")
        return super().make_command()


@WRONG.add("Help takes seconds: the command imports torch when it is made.")
class ImportsTorch(Tally):
    def make_command(self) -> click.Command:
        import torch

        self.threads = torch.get_num_threads()
        return super().make_command()


@WRONG.add("A second use in one process has the options that the first one added: one command object is returned.")
class OneCommand(Tally):
    command: click.Command | None = None

    def make_command(self) -> click.Command:
        if self.command is None:
            type(self).command = super().make_command()
        assert self.command is not None
        return self.command


@WRONG.add("Users cannot find out what an option does: it has no help.")
class OptionWithoutHelp(Tally):
    def make_command(self) -> click.Command:
        command = super().make_command()
        command.params.append(click.Option(["--verbose"], is_flag=True, expose_value=False))
        return command


@WRONG.add("A wrong call ends in a stack trace and exit code 1: values are checked by hand.")
class ChecksByHand(Tally):
    def make_command(self) -> click.Command:
        @click.command(help="Add up NUMBERS.")
        @click.argument("numbers", nargs=-1, required=True)
        @click.option("--mean", is_flag=True, help="Print the mean instead.")
        def command(numbers: tuple[str, ...], mean: bool) -> None:
            self.run(tuple(float(number) for number in numbers), mean, None)

        return command


@WRONG.add("Relative paths of the shell's next command in one process point elsewhere: the command changes the working folder.")
class ChangesFolder(Tally):
    def run(self, numbers: tuple[float, ...], mean: bool, file: Path | None) -> None:
        os.chdir(tempfile.gettempdir())
        super().run(numbers, mean, file)


@WRONG.add("The log of the program changes its form and level: the command configures it for all.")
class ConfiguresLog(Tally):
    def run(self, numbers: tuple[float, ...], mean: bool, file: Path | None) -> None:
        logging.basicConfig(level=logging.DEBUG, force=True)
        super().run(numbers, mean, file)


@WRONG.add("Ctrl-C does not end the program any more: the command ignores the signal, and does not set it back.")
class IgnoresInterrupt(Tally):
    def run(self, numbers: tuple[float, ...], mean: bool, file: Path | None) -> None:
        with contextlib.suppress(ValueError):  # in another thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        super().run(numbers, mean, file)


@WRONG.add("Scripts go on after a failure: the sentence is printed, and the exit code is 0.")
class FailsWithZero(Tally):
    def run(self, numbers: tuple[float, ...], mean: bool, file: Path | None) -> None:
        try:
            super().run(numbers, mean, file)
        except click.ClickException as error:
            click.echo(error.message)


@WRONG.add("`frame --help` fails for users without a file of this command: it is read when the object is made.")
class ReadsAtStart(Tally):
    def __init__(self, context: CommandContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        file = Path.home() / ".tally.json"
        if not file.exists():
            file = Path(tempfile.mkdtemp()) / "tally.json"
            file.write_text("{}")
        self.defaults = json.loads(file.read_text())


@WRONG.add("Results contain numbers of earlier calls: they are collected in the object.")
class CollectsNumbers(Tally):
    def __init__(self, context: CommandContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.numbers: list[float] = []

    def run(self, numbers: tuple[float, ...], mean: bool, file: Path | None) -> None:
        self.numbers += numbers
        super().run(tuple(self.numbers), mean, file)


@WRONG.add("Errors of the command end the shell's program without its cleaning up: it exits by itself.")
class ExitsHard(Tally):
    def run(self, numbers: tuple[float, ...], mean: bool, file: Path | None) -> None:
        super().run(numbers, mean, file)
        if len(numbers) > 100 or any(number != number for number in numbers):
            os._exit(1)
