"""The `frame` command: a table of commands, each imported when it is used, so that help stays fast.

Exit codes: 0 done, 1 the command failed while running, 2 wrong usage of the command line, 78 wrong
configuration, checkpoint or plugin.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

import click

from frame.core.errors import ConfigurationError

EX_CONFIG = 78  # sysexits.h

_HERE = "frame.entrypoints.cli"
# name -> ("module:command", one line of help); a command whose module is not there is not listed
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "serve": (f"{_HERE}.serve:command", "Serve a model over HTTP (OpenAI API)."),
        "chat": (f"{_HERE}.chat:command", "Chat in the terminal, with a server or in process."),
        "eval": (f"{_HERE}.eval:command", "Score a server or an engine on the embedded tasks."),
        "bench": (f"{_HERE}.bench:command", "Measure throughput and latency."),
        "profile": (f"{_HERE}.profile:command", "Where the time of a step goes: kernels, gaps, host."),
        "dashboard": (f"{_HERE}.dashboard:command", "Print a Grafana dashboard of the metrics."),
        "config": (f"{_HERE}.config:command", "Check, explain and show the configuration."),
        "plugins": (f"{_HERE}.plugins:command", "List, inspect, check and create plugins."),
    }
)


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is named, and reports configuration
    errors without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (target, _) in COMMANDS.items() if importlib.util.find_spec(target.partition(":")[0])]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table, so that listing imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            click.echo(f"frame: {error}", err=True)
            ctx.exit(EX_CONFIG)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        try:
            click.echo(f"frame {version('frame-serve')}")
        except PackageNotFoundError:
            click.echo("frame (not installed)")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version.")
def cli() -> None:
    """Serve large language models; every backend, method, policy and model is a plugin.

    Exit codes: 0 done, 1 failed while running, 2 wrong usage, 78 wrong configuration, checkpoint or
    plugin.
    """


def open_closed_streams() -> None:
    """Open /dev/null in place of standard streams that are closed, so that no socket takes their
    numbers and is printed to."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main() -> None:
    """The console script."""
    open_closed_streams()
    cli(prog_name="frame")


if __name__ == "__main__":
    main()
