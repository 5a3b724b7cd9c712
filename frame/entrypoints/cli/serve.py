"""`frame serve`: resolve, start the processes, serve until a signal. Exit codes: 0 stopped, 1 a
process died, 78 wrong configuration."""

from __future__ import annotations

from dataclasses import replace

import click

from frame.entrypoints.cli.options import config_command
from frame.entrypoints.configuration.sources import LoadedConfig

HELP = "Serve a model over HTTP: the OpenAI API at /v1, the native one at /generate. Without arguments: the embedded frame-tiny."


@config_command(help=HELP)
@click.pass_context
def command(ctx: click.Context, loaded: LoadedConfig) -> None:
    ctx.exit(run(loaded))


def run(loaded: LoadedConfig, module: str = "frame.entrypoints.processes.worker") -> int:
    """Serve with children that run `module`; returns the exit code."""
    from frame.entrypoints import logs
    from frame.entrypoints.configuration.prepare import prepare
    from frame.entrypoints.http.server import configured_layout, serve, stop_while_starting

    logs.configure("main", loaded.config.log, logs.LogWriter())
    stop_while_starting()
    prepared = replace(prepare(loaded.config, is_served=True), sources=loaded.sources)
    try:
        return serve(prepared, configured_layout(prepared.resolved, module), loaded.reread)
    except RuntimeError as error:  # a child that ended during the start
        click.echo(f"frame: the start failed: {error}", err=True)
        return 1
