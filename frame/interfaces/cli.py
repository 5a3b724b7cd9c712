"""The interface of subcommands, `frame NAME` (kind `cli_command`).

Used by the command line. click is imported by the plugin alone. Imports no torch and no click.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class CommandContext:
    """The program that a command belongs to."""

    program: str = "frame"  # its name in usage lines


class CliCommand(ABC):
    """A subcommand. Its plugin name is its name on the command line.

    Contract:
    - The module, the constructor and `make_command` do none of the command's work, print nothing
      and import no torch: help appears at once.
    - `make_command` returns a new command at each call. The command and each of its options have a
      help text; `--help` shows it.
    - A wrong call raises `click.UsageError` (exit code 2), a failure `click.ClickException` (1), a
      wrong configuration `frame.core.errors.ConfigurationError` (78).
    - The command leaves signal handlers, logging and the working folder as they are, unless it runs
      until the process ends.

    `conformance_arguments`, a class attribute, may list calls for the suite, each a tuple of
    arguments with which the command ends soon and with exit code 0. `conformance_outputs` may say
    what such calls print.
    """

    conformance_arguments: tuple[tuple[str, ...], ...] = ()
    conformance_outputs: tuple[tuple[tuple[str, ...], str], ...] = ()

    def __init__(self, context: CommandContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def make_command(self) -> click.Command: ...
