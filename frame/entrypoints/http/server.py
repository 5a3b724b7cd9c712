"""Runs the HTTP server over engines that are ready: ready line, supervision, drain, exit code. One
asyncio loop; uvicorn speaks HTTP. `frame.entrypoints.http.start` starts the engines and imports
this module meanwhile. Imports no torch: the model is in other processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from frame.config.resolved import Resolved
from frame.config.schema import FrameConfig
from frame.config.server_sections import LogSection, ServerSection
from frame.core.errors import ConfigurationError
from frame.core.messages import Finish
from frame.entrypoints.configuration.prepare import Prepared
from frame.entrypoints.engine_client.adapter_registry import AdapterRegistry
from frame.entrypoints.engine_client.adapter_spool import AdapterSpool
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.replicas import ReplicaClient
from frame.entrypoints.engine_client.request_dump import RequestDump
from frame.entrypoints.engine_client.stats import Outstanding, StatLoggers
from frame.entrypoints.engine_client.tokenizing import ThreadedTokenizer, TokenizerProcesses
from frame.entrypoints.http.app import App
from frame.entrypoints.http.extensions import Extensions
from frame.entrypoints.http.operations.live_history import INTERVAL, LiveHistory
from frame.entrypoints.http.operations.metrics import ServerMetrics
from frame.entrypoints.http.operations.page import describe
from frame.entrypoints.http.protocol.bodies import Bodies
from frame.entrypoints.http.protocol.connections import ConnectionLimits
from frame.entrypoints.http.protocol.listening import AdminListener, HttpServer, address
from frame.entrypoints.http.services import Services
from frame.entrypoints.keys import KeyAccess
from frame.entrypoints.logs import report, set_levels
from frame.entrypoints.media.media_service import MediaService
from frame.entrypoints.moderation import read_policy
from frame.entrypoints.processes.deployment import Deployment
from frame.entrypoints.processes.hang_dump import LoopWatchdog
from frame.entrypoints.processes.launch import get_client_limits
from frame.entrypoints.processes.resource_monitor import start_monitor
from frame.entrypoints.processes.start_signals import StartSignals
from frame.entrypoints.processes.supervisor import TICK, RestartPolicy, Supervisor
from frame.entrypoints.relevance import read_score_prompt
from frame.entrypoints.tls import Certificate, load_certificate
from frame.entrypoints.tracing import open_tracing
from frame.host.socket_directory import SocketDirectory
from frame.interfaces.keys import KeyStore
from frame.interfaces.parsing import ParserContext
from frame.interfaces.routing import RoutingContext
from frame.interfaces.stats import StatLoggerContext
from frame.parallel.replica_choice import ReplicaChooser
from frame.text.detokenizer import Detokenizer
from frame.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from frame.entrypoints.configuration.sources import LoadedConfig
    from frame.entrypoints.http.protocol.continuation import Fleet
    from frame.plugins.registry import Registry

log = logging.getLogger(__name__)

FLUSH_TIME = 0.5  # seconds to send error events after a child's end
POLL = 0.02  # seconds
WATCHDOG_RESET = 1.0  # seconds between two resets of the event loop's watchdog
UNANSWERED = Finish("error", None, "the server is shutting down; send the request to another one", "queue_full")
STUCK = 10.0  # seconds without a reset, after which the stacks of all threads are written


def create_server(
    prepared: Prepared,
    deployments: Sequence[Deployment],
    infos: Sequence[dict[str, Any]],
    start: ServerStart,
    reread: Callable[[], LoadedConfig] | None,
    signals: StartSignals,
) -> Server:
    """The server of engines that are ready. `infos`: the data of their `Ready`; `reread` reads the
    configuration again; `signals` that came during the start."""
    resolved, user = prepared.resolved, prepared.resolved.user
    clients = _clients(resolved, deployments, start.tokenizer, infos)
    services = _services(prepared, deployments[0], clients, start, infos[0])
    app = App(services, extensions=start.extensions)
    services.watch = start_monitor({name: pid for deployment in deployments for name, pid in deployment.pids.items()}, user.server)
    replicas = [
        Replica(deployment, client, _supervisor(services, deployment, client, start.start_seconds))
        for deployment, client in zip(deployments, clients, strict=True)
    ]

    def tell_children(settings: LogSection) -> None:
        for deployment in deployments:
            deployment.set_log_settings(settings)

    reload = Reload(user.server, (lambda: user) if reread is None else lambda: reread().config, tell_children, services.keys)
    return Server(app, replicas, start, reload, signals)


def replica_report(deployment: Deployment) -> Callable[[str], None]:
    """The function that reports on the processes of a deployment."""
    number = deployment.layout.replica
    return report if number is None else lambda text: report(f"replica {number}: {text}")


def _clients(
    resolved: Resolved, deployments: Sequence[Deployment], tokenizer: Tokenizer | None, infos: Sequence[dict[str, Any]]
) -> list[EngineClient]:
    """The client of each replica."""
    smallest = min(infos, key=lambda info: int(info["max_total_tokens"]))
    limits, outstanding, clients = get_client_limits(resolved, smallest), Outstanding(), []
    for deployment in deployments:
        makes_text = resolved.task == "generate" and not deployment.layout.detokenizer
        local = Detokenizer(tokenizer) if tokenizer is not None and makes_text else None
        clients.append(EngineClient(deployment.transport, limits, local, deployment.layout.detokenizer, outstanding))
    return clients


def _chooser(prepared: Prepared) -> ReplicaChooser:
    """What chooses the replica of a request."""
    resolved = prepared.resolved
    return ReplicaChooser(prepared.registry.create(resolved.choice("routing_policy"), RoutingContext(resolved.user.model.seed)))


def _services(
    prepared: Prepared, deployment: Deployment, clients: Sequence[EngineClient], start: ServerStart, info: dict[str, Any]
) -> Services:
    """`deployment`: the one with the tokenizers."""
    resolved, layout = prepared.resolved, deployment.layout
    client = clients[0] if len(clients) == 1 else ReplicaClient(clients, _chooser(prepared))
    tokenizer = start.tokenizer
    services = Services(resolved, client, tokenizer, info=info, keys=start.keys)
    if layout.tokenizers:
        text_input = TokenizerProcesses(layout.tokenizers, lambda worker, message: deployment.tokenizers[worker].send(message))
        clients[0].on_tokenized = text_input.receive_reply
        services.text_input = text_input
    elif tokenizer is not None:
        services.text_input = ThreadedTokenizer(tokenizer)
    for attribute, parser in load_parsers(resolved, prepared.registry).items():
        setattr(services, attribute, parser)
    if resolved.user.adapters.enabled:
        spool = AdapterSpool(resolved.tokenizer_path)
        services.adapters = AdapterRegistry(clients, resolved.user.adapters, spool, services.base_names)
    if resolved.media is not None and tokenizer is not None:
        services.media = _open_media(resolved)
    services.score_prompt = read_score_prompt(resolved.user.text.score_prompt)
    services.moderation_policy = read_policy(resolved.user.text.moderation_policy)
    services.metrics = ServerMetrics(services)
    services.history = LiveHistory(client, services.metrics.count_failures)
    client.stats.loggers = load_stat_loggers(resolved, prepared.registry, services)
    client.stats.dump = open_dump(resolved)
    services.tracing = open_tracing(resolved, lambda: prepared.registry, "main")
    services.about = describe(prepared, info)
    if os.environ.get("FRAME_FLEET_KEY"):
        services.fleet = _join_fleet(resolved, tokenizer)
    return services


def _join_fleet(resolved: Resolved, tokenizer: Tokenizer | None) -> Fleet | None:
    """What lets streams move to and from other servers. Raises ConfigurationError."""
    from frame.entrypoints.handoff import read_fleet_key
    from frame.entrypoints.http.protocol.continuation import Fleet

    key = read_fleet_key()
    return None if key is None else Fleet(key, resolved, tokenizer)


def _open_media(resolved: Resolved) -> MediaService:
    folder = SocketDirectory()
    media = MediaService(resolved, folder.path)
    weakref.finalize(media, folder.remove)
    return media


def open_dump(resolved: Resolved) -> RequestDump | None:
    """What records the requests of a model that generates; None: nothing does."""
    settings = resolved.user.log
    is_recorded = settings.request_dump is not None and resolved.task == "generate"
    return RequestDump(settings, resolved.served_name) if is_recorded else None


def load_parsers(resolved: Resolved, registry: Registry) -> dict[str, Callable[[], Any]]:
    """What makes a parser for a response, by the attribute of `Services` that holds it."""
    kinds = {"reasoning": "reasoning_parser", "tool_calls": "tool_call_parser"}
    chosen = {attribute: registry.choose(resolved.choice(kind)) for attribute, kind in kinds.items() if resolved.plugins.get(kind)}
    context = ParserContext(resolved.model.architecture, resolved.model.chat_template)
    return {attribute: partial(target, context, options) for attribute, (target, options) in chosen.items()}


def load_stat_loggers(resolved: Resolved, registry: Registry, services: Services) -> StatLoggers | None:
    """The chosen stat loggers, which read the metrics of `services`; None: there are none."""
    read = services.metrics.read if services.metrics is not None else tuple
    context = StatLoggerContext(resolved.served_name, read, resolved.user.server.metrics_aliases)
    chosen = resolved.plugins.get("stat_logger", ())
    loggers = {f"{each.name!r} ({each.distribution} {each.version})": registry.create(each, context) for each in chosen}
    if services.history is not None:
        loggers["the page's latencies"] = services.history.latencies
    return StatLoggers(resolved.served_name, loggers, lambda: services.client.load) if loggers else None


def _supervisor(services: Services, deployment: Deployment, client: EngineClient, start_seconds: float) -> Supervisor:
    user = services.resolved.user.server
    policy = RestartPolicy(user.max_restarts, user.heartbeat_timeout, start_seconds)
    text_input = services.text_input
    return Supervisor(
        deployment,
        client,
        policy,
        replica_report(deployment),
        text_input.resend_requests if isinstance(text_input, TokenizerProcesses) else None,
        services.watch,
    )


class RpcServer(Protocol):
    """A server of another protocol over the same services and the same pool of bodies."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def renew_certificate(self, certificate: Certificate) -> None: ...


OpenRpc = Callable[[Services, Bodies], RpcServer | None]  # None: no port is configured for it. Raises ConfigurationError.


@dataclass(frozen=True, slots=True)
class ServerStart:
    """What the start made for the server."""

    listeners: tuple[socket.socket, AdminListener]
    tokenizer: Tokenizer | None
    extensions: Extensions
    started: float  # time.perf_counter() of the start
    start_seconds: float  # until the engines were ready
    open_rpc: OpenRpc
    keys: KeyAccess | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine with its processes."""

    deployment: Deployment
    client: EngineClient
    supervisor: Supervisor


@dataclass(slots=True)
class Reload:
    """What SIGHUP renews while the server runs: API keys, the TLS certificate, and the level of the
    log. Everything is read and checked before anything is changed.

    `read_config` reads the configuration's sources again; of it, only the section `log` is used.
    The files of keys and certificates are those of `server`, the running configuration."""

    server: ServerSection
    read_config: Callable[[], FrameConfig]
    tell_children: Callable[[LogSection], None]
    keys: KeyAccess | None = None
    on_certificate: list[Callable[[Certificate], None]] = field(default_factory=list)

    async def run(self) -> None:
        """Renew all of it, or, when something cannot be read, nothing; the log says which."""
        try:
            settings, store, certificate = await asyncio.to_thread(self._read)
        except ConfigurationError as error:
            log.error("SIGHUP: nothing is reloaded, and what was read before stays in use: %s", error)
            return
        done = [f"log level {settings.level}"]
        set_levels(settings)
        self.tell_children(settings)
        if self.keys is not None and store is not None:
            await self.keys.use_store(store)
            done.append(f"the API keys of {self.keys.num_tenants} tenants")
        if certificate is not None:
            for renew in self.on_certificate:
                renew(certificate)
            done.append("the certificate")
        report(f"SIGHUP: reloaded {', '.join(done)}")

    def _read(self) -> tuple[LogSection, KeyStore | None, Certificate | None]:
        store = None if self.keys is None else self.keys.make_store()
        return self.read_config().log, store, load_certificate(self.server)


class Server:
    """The running server: listeners, readers of the transports, supervision, signals."""

    def __init__(self, app: App, replicas: Sequence[Replica], start: ServerStart, reload: Reload, signals: StartSignals) -> None:
        self._services = services = app.services
        self._replicas = replicas
        self._listener, self._admin = start.listeners
        self._started = start.started
        self._open_rpc = start.open_rpc
        self._stop = asyncio.Event()
        self._now = asyncio.Event()  # a second signal: stop without waiting
        server = services.resolved.user.server
        self._certificate = load_certificate(server)
        limits = ConnectionLimits(server.max_connections, server.client_timeout)
        self._http = HttpServer(app, limits, self._certificate)
        self._bodies = app.bodies
        self._reload = reload
        self._signals = signals

    async def run(self) -> int:
        """Serve until a signal or a failure. Returns the exit code."""
        loop = asyncio.get_running_loop()
        self._signals.forward(self._on_signal, lambda: self._services.run(self._reload.run()))
        for replica in self._replicas:
            loop.add_reader(replica.deployment.transport.fd, replica.client.receive_in_turns)
            replica.client.receive_in_turns()  # the descriptor reports changes only
        watching = asyncio.create_task(self._watch())
        if (media := self._services.media) is not None:
            await media.start()
        if (adapters := self._services.adapters) is not None:
            await adapters.load_modules()
        serving = asyncio.create_task(self._http.serve([self._listener]))
        listening = asyncio.create_task(self._http.listening.wait())
        await asyncio.wait({listening, serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if serving.done():
            serving.result()  # raises why it does not listen
        self._reload.on_certificate.append(self._http.renew_certificate)
        self._admin.start(App(self._services, is_admin=True))
        self._reload.on_certificate += [http.renew_certificate for http in self._admin.running]
        rpc = self._open_rpc(self._services, self._bodies)
        if rpc is not None:
            await rpc.start()
            self._reload.on_certificate.append(rpc.renew_certificate)
        if (batches := self._services.batches) is not None:
            self._services.run(batches.watch())
        self._announce()
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({stopping, watching, serving}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()  # an error of the supervision ends the server too
            await asyncio.sleep(FLUSH_TIME)
        else:
            await self._drain()
        if batches is not None:
            await batches.close()
        watching.cancel()
        died = self._services.client.dead_reason is not None
        self._http.should_exit = True
        self._http.force_exit = died or self._now.is_set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(serving, 2.0)
        await self._admin.stop()
        if rpc is not None:
            await rpc.stop()
        if self._services.tracing is not None:
            await asyncio.to_thread(self._services.tracing.close)
        if self._services.keys is not None:
            await self._services.keys.close()
        if (loggers := self._services.client.stats.loggers) is not None:
            loggers.close()
        if (dump := self._services.client.stats.dump) is not None:
            await asyncio.to_thread(dump.close)
        await asyncio.to_thread(self._services.close_responses)
        for replica in self._replicas:
            loop.remove_reader(replica.deployment.transport.fd)
        if adapters is not None:
            adapters.spool.close()
        if media is not None:
            await media.close()
        if not died:
            timeout = 0.0 if self._now.is_set() else 10.0
            await asyncio.gather(*(asyncio.to_thread(replica.deployment.stop, timeout) for replica in self._replicas))
        return self._replicas[0].supervisor.exit_code if died else 0

    def _announce(self) -> None:
        where = address(*self._listener.getsockname()[:2])
        scheme = "http" if self._certificate is None else "https"
        gc.collect()
        gc.freeze()  # later collections, which hold the event loop, need not look at what the start made
        report(f"ready on {scheme}://{where} after {time.perf_counter() - self._started:.1f} s")

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._now.set()
        self._stop.set()

    async def _watch(self) -> None:
        """Supervise the children until the server has to stop; then every request has an error."""
        measured = reset = time.monotonic()
        client, alarm = self._services.client, LoopWatchdog(STUCK)
        while client.dead_reason is None:
            await asyncio.sleep(TICK)
            for replica in self._replicas:
                if replica.client.dead_reason is None:
                    await self._tick(replica)
            if time.monotonic() - reset > WATCHDOG_RESET:
                reset = time.monotonic()
                alarm.reset()
            if time.monotonic() - measured > INTERVAL:
                measured = time.monotonic()
                if self._services.metrics is not None:
                    self._services.metrics.update_rate()
                if self._services.history is not None:
                    self._services.history.take_sample(measured)
        alarm.close()
        report(f"stopping: {client.dead_reason}")

    async def _tick(self, replica: Replica) -> None:
        await replica.supervisor.tick()
        if replica.client.dead_reason is not None and self._services.client.dead_reason is None:
            replica_report(replica.deployment)(f"{replica.client.dead_reason}; the other replicas go on")
            replica.deployment.kill_children([name for name in replica.deployment.names if not name.startswith("tokenizer-")])
            replica.deployment.close_standby()

    async def _drain(self) -> None:
        """Refuse new requests, wait for those that run, and end the rest: with an error that a
        router repeats elsewhere where nothing was sent, else as aborted."""
        self._services.draining = True
        client, timeout = self._services.client, self._services.resolved.user.server.drain_timeout
        if self._services.fleet is not None:
            self._services.run(self._services.fleet.ask_for_moves())
        report(f"stopping: {client.num_outstanding} requests have {timeout:g} s to finish")
        deadline = time.monotonic() + timeout
        # four conditions, the clock among them: no single event has them
        while client.num_outstanding and time.monotonic() < deadline and not self._now.is_set() and client.dead_reason is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL)
        if client.num_outstanding:
            client.abort_unanswered(UNANSWERED)
            client.abort_requests([])
            deadline = time.monotonic() + FLUSH_TIME
            while client.num_outstanding and time.monotonic() < deadline:  # noqa: ASYNC110 - as above
                await asyncio.sleep(POLL)
        await asyncio.sleep(0.05)  # for the last bytes
