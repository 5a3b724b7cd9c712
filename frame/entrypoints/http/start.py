"""Starts the processes of `frame serve`, and the HTTP server over them; checks a start.

The engines start first. This process imports FastAPI and builds the application while they import
torch and load the model. `check_start` runs the steps of a start that can refuse it, without
weights, child processes or requests, by the code of the start itself. Used by the commands. Must
not know a route. Imports no torch, except for `check_start` when it is called.
"""

from __future__ import annotations

import gc
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from frame.config.resolved import Resolved
from frame.core.blame import blaming, explain
from frame.core.errors import ConfigurationError, PluginError
from frame.core.garbage_collection import paused_collection
from frame.entrypoints.configuration.prepare import Prepared
from frame.entrypoints.http.protocol.connections import raise_file_limit
from frame.entrypoints.http.protocol.listening import AdminListener, address, bound_port
from frame.entrypoints.keys import open_keys
from frame.entrypoints.logs import report
from frame.entrypoints.processes.deployment import Deployment, Layout, create_launcher
from frame.entrypoints.processes.launch import find_process_start, load_tokenizer, wait_ready
from frame.entrypoints.processes.start_signals import StartSignals
from frame.entrypoints.tls import load_certificate
from frame.host.installation import suggest_cpu_kernels

if TYPE_CHECKING:
    from frame.entrypoints.configuration.sources import LoadedConfig
    from frame.entrypoints.http.server import OpenRpc
    from frame.entrypoints.processes.early_process import EarlyProcess

GIB = 1024**3


def serve(prepared: Prepared, layout: Layout, reread: Callable[[], LoadedConfig] | None, signals: StartSignals, open_rpc: OpenRpc) -> int:
    """Serve until a signal or a child's death; returns the exit code. `layout`: the processes to
    start; `reread` reads the configuration again; `signals` that come during the start; `open_rpc`
    opens the server of another protocol, such as gRPC."""
    signals.hold()
    resolved = prepared.resolved
    started = find_process_start()  # the engine's process starts before this function is called
    certificate = load_certificate(resolved.user.server)
    keys = open_keys(resolved, prepared.registry)
    listener, admin = open_listeners(resolved)
    report(f"{resolved.served_name} on {resolved.device}, {resolved.dtype}, {resolved.plan}")
    if resolved.device == "cpu" and resolved.dtype == "bfloat16" and (suggestion := suggest_cpu_kernels()) is not None:
        report(suggestion)
    for modality, why in resolved.lacking_media.items():
        report(f"{modality} parts are refused: {why}")
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

            from frame.entrypoints.http.extensions import load_extensions
            from frame.entrypoints.http.protocol.starting import StartingServer
            from frame.entrypoints.http.server import ServerStart, create_server, replica_report

        gc.freeze()  # modules stay alive, so later collections skip them
        signals.check()
        extensions = load_extensions(resolved, prepared.registry)
        with StartingServer(listener, resolved.user.server.max_connections, certificate):
            url = f"{'http' if certificate is None else 'https'}://{address(*listener.getsockname()[:2])}"
            report(f"{url} is open; requests get 503 until the model is loaded")
            tokenizer = load_tokenizer(resolved)
            infos = [wait_ready(deployment, replica_report(deployment), signals.check, started) for deployment in deployments]
            start_seconds = time.perf_counter() - spawned
        start = ServerStart((listener, admin), tokenizer, extensions, started, start_seconds, open_rpc, keys)
        return uvloop.run(create_server(prepared, deployments, infos, start, reread, signals).run())
    finally:
        for deployment in deployments:
            deployment.kill()
        listener.close()
        admin.close()


def open_listeners(resolved: Resolved) -> tuple[socket.socket, AdminListener]:
    """The sockets of the API and of operators, bound before slow steps of the start. Raises
    ConfigurationError for an address or a folder that cannot be used."""
    server = resolved.user.server
    if server.state_dir is not None:
        from frame.entrypoints.http.openai.response_files import make_state_folder

        make_state_folder(Path(server.state_dir))
    if (folder := resolved.batch_folder) is not None:
        from frame.entrypoints.http.batch.folder import make_folder

        make_folder(folder)
    if (dump := resolved.user.log.request_dump) is not None:
        from frame.entrypoints.engine_client.request_dump import make_folder as make_dump_folder

        if resolved.task != "generate":
            raise ConfigurationError(f"log.request_dump records generated text, and this model's task is {resolved.task}; leave it out")
        make_dump_folder(Path(dump))
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
    tokenizers = text.tokenizer_workers if has_text else 0
    standby = resolved.device != "cpu"  # ranks on a CPU need the memory and the cores for the model
    return Layout(resolved.plan.num_ranks, detokenizer, tokenizers, module, early=early, standby=standby)


def split_layout(layout: Layout, replicas: int) -> list[Layout]:
    """The layout of each replica; the first one has the tokenizers of all."""
    if replicas == 1:
        return [layout]
    return [replace(layout, replica=number, tokenizers=0 if number else layout.tokenizers) for number in range(replicas)]


# frame config check -------------------------------------------------------------------------------


def check_start(prepared: Prepared, report: Callable[[str], None]) -> None:
    """Raise what the start of `frame serve` raises: ConfigurationError, or RuntimeError for the
    failure of a process. `report` gets a line for each thing that was checked."""
    from frame.entrypoints.http.extensions import load_extensions  # imports FastAPI
    from frame.entrypoints.media.media_process import load_modalities  # imports transformers' processors

    resolved, registry = prepared.resolved, prepared.registry
    for listener in open_listeners(resolved):
        listener.close()
    open_keys(resolved, registry)
    report("ports, TLS, keys and folders of the server")
    with tempfile.TemporaryDirectory() as folder:
        create_launcher(resolved, registry, resolved.plan.num_ranks, Path(folder)).close()
    load_extensions(resolved, registry)
    report("routes of the server and its extensions")
    tokenizer = load_tokenizer(resolved)
    if tokenizer is None:
        report("no tokenizer: model.skip_tokenizer_init")
    else:
        report(f"tokenizer: {tokenizer.vocab_size:,} tokens, {'a' if tokenizer.has_chat_template else 'no'} chat template")
    if modalities := load_modalities(resolved, registry):
        report(f"processors of {' and '.join(modalities)}")
    for modality, why in resolved.lacking_media.items():
        report(f"{modality} parts are refused: {why}")
    try:
        _check_engine(prepared, report)
    except PluginError as error:
        raise PluginError(f"engine: {error}") from error  # as the worker reports it
    except ConfigurationError:
        raise
    except Exception as error:
        raise RuntimeError(explain(error)) from error


@blaming("at start")
def _check_engine(prepared: Prepared, report: Callable[[str], None]) -> None:
    """The start of the engine up to the first weight, of one rank of each stage."""
    from frame.entrypoints.processes.build_engine import build_grammars, create_platform, prepare_engine_tiers
    from frame.entrypoints.processes.build_scheduler import build_schedulers
    from frame.entrypoints.processes.join_groups import Place
    from frame.entrypoints.processes.planned_rank import PlannedRank

    resolved, registry = prepared.resolved, prepared.registry
    platform = create_platform(resolved, registry, Place())
    platform.activate()
    before = platform.measure_memory()
    tiers = prepare_engine_tiers(resolved, registry)
    for stage in range(resolved.plan.pp):
        rank = PlannedRank(resolved, registry, stage)
        where = f"stage {stage}: " if resolved.plan.pp > 1 else ""
        if (plan := rank.plan_memory(before)) is not None:
            sizes = f"{plan.weights / GIB:.2f} GiB of weights and {plan.tokens:,} tokens of KV cache in {plan.total / GIB:.2f} GiB"
            report(f"{where}memory of a rank: {sizes}")
            if tiers is not None:
                from frame.kv_tiers.build import check_tiers

                check_tiers(tiers, rank.geometry, plan.tokens // resolved.page_size, stage * resolved.plan.tp, platform)
                report(f"{where}KV cache tiers: sizes, folders and their owners, and memory as on {resolved.device}")
        if rank.check_weights():
            report(f"{where}weights: names and shapes of all tensors, by the headers of their files")
        else:
            report(f"{where}weights: the files' headers alone; this model or format needs values for more")
    build_schedulers(resolved, registry, resolved.max_running_requests + 1)
    build_grammars(resolved, registry)
    report("scheduler and grammar backend")
