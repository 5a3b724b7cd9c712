"""Starts the processes of `frame serve`, and the HTTP server over them.

The engines start first. This process imports FastAPI and builds the application while they import
torch and load the model. Used by the command. Must not know a route. Imports no torch.
"""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from frame.config.resolved import Resolved
from frame.core.garbage_collection import paused_collection
from frame.entrypoints.configuration.prepare import Prepared
from frame.entrypoints.http.openai.batch_files import make_folder
from frame.entrypoints.http.operations.admin_listener import AdminListener
from frame.entrypoints.http.protocol.connections import raise_file_limit
from frame.entrypoints.http.protocol.listening import address, bound_port
from frame.entrypoints.logs import report
from frame.entrypoints.processes.deployment import Deployment, Layout
from frame.entrypoints.processes.launch import find_process_start, load_tokenizer, wait_ready
from frame.entrypoints.processes.start_signals import StartSignals
from frame.entrypoints.tls import load_certificate

if TYPE_CHECKING:
    from frame.entrypoints.configuration.sources import LoadedConfig
    from frame.entrypoints.http.server import OpenRpc
    from frame.entrypoints.processes.early_process import EarlyProcess


def serve(
    prepared: Prepared, layout: Layout, reread: Callable[[], LoadedConfig] | None, signals: StartSignals, open_rpc: OpenRpc
) -> int:
    """Serve until a signal or a child's death; returns the exit code. `layout`: the processes to
    start; `reread` reads the configuration again; `signals` that come during the start; `open_rpc`
    opens the server of another protocol, such as gRPC."""
    signals.hold()
    resolved = prepared.resolved
    started = find_process_start()  # the engine's process starts before this function is called
    certificate = load_certificate(resolved.user.server)
    listener, admin = open_listeners(resolved)
    report(f"{resolved.served_name} on {resolved.device}, {resolved.dtype}, {resolved.plan}")
    raise_file_limit(resolved.user.server.max_connections)
    deployments: list[Deployment] = []
    try:
        for each in split_layout(layout, resolved.plan.num_replicas):
            deployments.append(Deployment(resolved, each, prepared.registry, signals.released))  # noqa: PERF401 - those that started are ended below
        if layout.early is not None:
            layout.early.close()  # no launcher has taken it
        spawned = time.perf_counter()
        with paused_collection():
            import uvloop

            from frame.entrypoints.http.extensions.loading import load_extensions
            from frame.entrypoints.http.protocol.starting import StartingServer
            from frame.entrypoints.http.server import ServerParts, create_server, replica_report

        gc.freeze()  # modules stay alive, so later collections skip them
        signals.check()
        extensions = load_extensions(resolved, prepared.registry)
        with StartingServer(listener, resolved.user.server.max_connections, certificate):
            url = f"{'http' if certificate is None else 'https'}://{address(*listener.getsockname()[:2])}"
            report(f"{url} is open; requests get 503 until the model is loaded")
            tokenizer = load_tokenizer(resolved)
            infos = [wait_ready(deployment, replica_report(deployment), signals.check, started) for deployment in deployments]
            start_seconds = time.perf_counter() - spawned
        parts = ServerParts((listener, admin), tokenizer, extensions, started, start_seconds, open_rpc)
        return uvloop.run(create_server(prepared, deployments, infos, parts, reread, signals).run())
    finally:
        for deployment in deployments:
            deployment.kill()
        listener.close()
        admin.close()


def open_listeners(resolved: Resolved) -> tuple[socket.socket, AdminListener]:
    """The sockets of the API and of operators, bound before slow steps of the start. Raises
    ConfigurationError for an address or a folder that cannot be used."""
    server = resolved.user.server
    if (folder := resolved.user.batches.folder) is not None:
        make_folder(Path(folder))
    if server.grpc_port:  # the gRPC library binds it itself, after the model is loaded
        bound_port(server.host, server.grpc_port, "--host and --grpc-port").close()
    admin = AdminListener(server)
    try:
        return bound_port(server.host, server.port, "--host and --port"), admin
    except BaseException:
        admin.close()
        raise


def configured_layout(resolved: Resolved, module: str, early: EarlyProcess | None = None) -> Layout:
    """The processes of a configuration; children run `module`. `early`: one that has started."""
    text, has_text = resolved.user.text, resolved.tokenizer_path is not None
    detokenizer = has_text and text.detokenizer_workers > 0 and resolved.task == "generate"
    return Layout(resolved.plan.num_ranks, detokenizer, text.tokenizer_workers if has_text else 0, module, early=early)


def split_layout(layout: Layout, replicas: int) -> list[Layout]:
    """The layout of each replica; the first one has the tokenizers of all."""
    if replicas == 1:
        return [layout]
    return [replace(layout, replica=number, tokenizers=0 if number else layout.tokenizers) for number in range(replicas)]
