"""The `frame` command: a table of subcommands. A subcommand's module is imported when it is called,
so that help stays fast.

Exit codes: 0 success, 1 runtime failure, 2 wrong usage of the command line, 78 wrong configuration,
checkpoint or plugin.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from frame.core.errors import EXIT_CONFIGURATION, ConfigurationError, did_you_mean
from frame.entrypoints.cli.installed import PACKAGES, list_help, load_command
from frame.host.installation import has_module, install_command

if TYPE_CHECKING:
    from frame.entrypoints.processes.early_process import EarlyProcess

_HERE = "frame.entrypoints.cli"
# name -> ("module:command", one line of help)
_BUILT_IN: Mapping[str, tuple[str, str]] = {
    "serve": (f"{_HERE}.serve:command", "Serve a model over HTTP (OpenAI API)."),
    "pull": ("frame.entrypoints.hub.command:command", "Download a model from a hub."),
    "chat": (f"{_HERE}.chat:command", "Chat in the terminal, with a server or in process."),
    "eval": (f"{_HERE}.eval:command", "Score a server or an engine on the embedded tasks."),
    "bench": (f"{_HERE}.bench:command", "Measure throughput and latency."),
    "replay": (f"{_HERE}.bench:replay_command", "Send recorded requests again, and compare tokens and latencies."),
    "profile": (f"{_HERE}.profile:command", "Profile steps: kernels, gaps between them, host time."),
    "dashboard": ("frame.entrypoints.tools.dashboard:command", "Print a Grafana dashboard of the metrics."),
    "router": (f"{_HERE}.router:command", "Route requests to several servers."),
    "plan": (f"{_HERE}.plan:command", "Plan memory and devices of a configuration."),
    "simulate": (f"{_HERE}.simulate:command", "Simulate a fleet on a virtual clock."),
    "config": (f"{_HERE}.config:command", "Check, explain and show the configuration."),
    "plugins": (f"{_HERE}.plugins:command", "List, inspect, check and create plugins."),
}
# The commands whose modules this installation has: one is deleted with its module.
COMMANDS = {name: entry for name, entry in _BUILT_IN.items() if has_module(entry[0].partition(":")[0])}


# Of a command's result: the disk is full, or the place takes no files
WRITE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO))


class HelpError(click.ClickException):
    """A plugin file that help cannot read."""

    exit_code = EXIT_CONFIGURATION


class LazyGroup(click.Group):
    """Imports a command's module on first use; prints configuration errors as a sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return load_command(cmd_name, ctx.params.get("paths") or ())
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        return command if isinstance(command, click.Command) else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments name; one that is missing ends with a remedy."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            if owner := PACKAGES.get(name):
                raise click.UsageError(f"frame {name} is in the package {owner}, which is not installed; run {install_command(owner)}")
            known = [*COMMANDS, *PACKAGES, *(each for each, _ in list_help(ctx.params.get("paths") or ()))]
            raise click.UsageError(f"No such command {name!r}{did_you_mean(name, known) or '; frame --help lists the commands.'}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the table's help lines, without importing commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])
        try:
            listed = list_help(ctx.params.get("paths") or ())
        except ConfigurationError as error:  # help is printed before `invoke`
            raise HelpError(str(error)) from None
        if rows := [(name, text) for name, text in listed if name not in COMMANDS]:
            with formatter.section("Commands of installed packages"):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ConfigurationError as error:
            click.echo(f"frame: {error}", err=True)
            ctx.exit(EXIT_CONFIGURATION)
        except OSError as error:
            if error.errno not in WRITE_ERRORS:
                raise
            click.echo(f"frame: {error.filename or 'the output'} cannot be written: {error.strerror}", err=True)
            ctx.exit(1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True})
@click.version_option(package_name="frame-serve", message="frame %(version)s", help="Print the version.")
@click.option(
    "--plugin", "paths", multiple=True, is_eager=True, metavar="FILE", help="Read the commands of a Python file too; may be repeated."
)
@click.pass_context
def cli(ctx: click.Context, paths: tuple[str, ...]) -> None:
    """Serve large language models; every backend, method, policy and model is a plugin.

    Exit codes: 0 success, 1 runtime failure, 2 wrong usage, 78 wrong configuration, checkpoint or
    plugin.
    """
    if paths and ctx.invoked_subcommand in COMMANDS:
        raise click.UsageError(f"--plugin FILE before a command adds commands; write frame {ctx.invoked_subcommand} --plugin FILE")


def main(early: EarlyProcess | None = None) -> None:
    """Run the command line. `early`: one that has started, for the engine of `frame serve`."""
    cli(prog_name="frame", obj=early)


if __name__ == "__main__":
    main()
