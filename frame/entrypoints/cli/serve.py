"""`frame serve`: resolves the configuration, starts the processes and serves until a signal. Exit
codes: 0 stopped by a signal, 1 a process failed, 78 wrong configuration."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from frame.core.errors import ConfigurationError
from frame.entrypoints.cli.entry import WORKER
from frame.entrypoints.cli.options import config_command
from frame.entrypoints.configuration.sources import LoadedConfig
from frame.host.interpreter import child_environment, python_command

if TYPE_CHECKING:
    from frame.entrypoints.configuration.prepare import Prepared
    from frame.entrypoints.grpc.server import GrpcServer
    from frame.entrypoints.http.protocol.bodies import Bodies
    from frame.entrypoints.http.services import Services
    from frame.entrypoints.processes.early_process import EarlyProcess

POLL_SECONDS = 0.5
STOP_SECONDS = 60.0  # for a server that drains; then it is killed
HELP = "Serve a model over HTTP: OpenAI API at /v1, native API at /generate. The default model is the embedded frame-tiny."


@config_command(help=HELP)
@click.option("--watch", is_flag=True, help="Restart the server when a file of plugins.paths or the configuration file changes.")
@click.pass_context
def command(ctx: click.Context, loaded: LoadedConfig, watch: bool) -> None:
    if not watch:
        ctx.exit(run(loaded, early=ctx.obj))
    files = [*loaded.config.plugins.paths, *([loaded.file] if loaded.file else [])]
    if not files:
        raise ConfigurationError("--watch needs a file to watch; give --plugin FILE or --config FILE")
    ctx.exit(restart_at_changes([argument for argument in sys.argv[1:] if argument != "--watch"], files))


def serve_node(prepared: Prepared) -> int:
    """Run this host's ranks for the first host, until it ends. -> exit code."""
    from frame.entrypoints.processes.deployment import create_launcher

    resolved = prepared.resolved
    with tempfile.TemporaryDirectory() as folder:
        create_launcher(resolved, prepared.registry, resolved.plan.num_ranks, Path(folder)).serve_node()
    return 0


def run(loaded: LoadedConfig, module: str = WORKER, early: EarlyProcess | None = None) -> int:
    """Serve with child processes that run `module`. `early`: one that has started, for the engine;
    the caller ends it if this raises. -> exit code."""
    from frame.core.garbage_collection import paused_collection
    from frame.entrypoints import logs
    from frame.entrypoints.processes.start_signals import StartSignals

    logs.configure("main", loaded.config.log, logs.LogWriter())
    signals = StartSignals()
    if loaded.config.model.download:
        from frame.entrypoints.hub.errors import DownloadError
        from frame.entrypoints.hub.pull import fetch_models

        try:
            fetch_models(loaded.config)
        except DownloadError as error:
            click.echo(f"frame: the start failed: {error}", err=True)
            return 1
    with paused_collection():
        from frame.entrypoints.configuration.prepare import prepare
        from frame.entrypoints.http.start import configured_layout, serve

    if loaded.config.parallel.node_rank:
        if early is not None:
            early.close()
        return serve_node(prepare(loaded.config))
    prepared = replace(prepare(loaded.config, is_served=True), sources=loaded.sources)
    try:
        return serve(prepared, configured_layout(prepared.resolved, module, early), loaded.reread, signals, open_grpc)
    except RuntimeError as error:  # a child process ended during the start
        click.echo(f"frame: the start failed: {error}", err=True)
        return 1


def open_grpc(services: Services, bodies: Bodies) -> GrpcServer | None:
    """The gRPC server, where a port for it is configured. Raises ConfigurationError."""
    server = services.resolved.user.server
    if server.grpc_port is None:
        return None
    from frame.entrypoints.grpc.server import GrpcServer

    return GrpcServer(services, server.host, server.grpc_port, bodies)


def restart_at_changes(arguments: Sequence[str], paths: Iterable[str]) -> int:
    """Run `frame ARGUMENTS` until a signal, and again after each change below `paths`. -> the exit
    code of the last run. A server that has ended by itself is started again with the next change.
    """
    watched, is_stopped = [Path(path).expanduser() for path in paths], False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    click.echo(f"frame: watching {', '.join(map(str, watched))}", err=True)
    code = 0
    while not is_stopped:
        state = read_state(watched)
        server = subprocess.Popen(python_command("-m", "frame", *arguments), start_new_session=True, env=child_environment())
        while not is_stopped and read_state(watched) == state:
            time.sleep(POLL_SECONDS)
        code = _stop(server)
        if not is_stopped:
            click.echo("frame: a watched file changed; restarting", err=True)
    return code


def read_state(paths: Iterable[Path]) -> dict[str, int]:
    """The modification time in nanoseconds of each file, folders with their Python files."""
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else (path,))]
    times = {}
    for file in files:
        try:
            times[str(file)] = file.stat().st_mtime_ns
        except FileNotFoundError:  # an editor replaces it
            continue
    return times


def _stop(server: subprocess.Popen[bytes]) -> int:
    if server.poll() is None:
        server.terminate()
    try:
        return server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()
