"""The outer composition root: starts an engine from a configuration, in a thread of this process or
in child processes.

Used by the offline `Engine` and by the servers. `frame.entrypoints.processes.build_engine` builds
the engine itself. Imports no torch.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from frame.config.resolved import Resolved
from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError, PluginError
from frame.core.garbage_collection import paused_collection
from frame.core.ipc.transport import InProcessTransport
from frame.core.messages import Control, Heartbeat, Message, Ready
from frame.entrypoints.configuration.prepare import Prepared, prepare
from frame.entrypoints.engine_client.limits import ClientLimits
from frame.entrypoints.offline.collector import Collector
from frame.entrypoints.processes.deployment import Deployment, Layout
from frame.text.detokenizer import Detokenizer
from frame.text.tokenizer import Tokenizer

CLOSE_TIMEOUT = 30.0  # seconds for an engine to stop


class Session(Protocol):
    """A running engine, for the offline API."""

    collector: Collector
    tokenizer: Tokenizer | None
    limits: ClientLimits
    info: dict[str, Any]

    def send_all(self, messages: Sequence[Message]) -> None: ...

    def close(self) -> None: ...


def open_session(prepared: Prepared) -> Session:
    """Start an engine for offline use: in a thread for one rank, else in processes. Raises
    ConfigurationError, or the error of the start."""
    if prepared.resolved.plan.num_replicas > 1:
        raise ConfigurationError("parallel.dp is for servers; set parallel.dp: 1 and start one Engine a replica, or use frame serve")
    tokenizer = load_tokenizer(prepared.resolved)
    collector = Collector(None if tokenizer is None else Detokenizer(tokenizer))
    kind = ThreadSession if prepared.resolved.plan.num_ranks == 1 else ProcessSession
    return kind(prepared, collector, tokenizer)


def load_tokenizer(resolved: Resolved) -> Tokenizer | None:
    """The tokenizer; None where `--skip-tokenizer-init` skips it."""
    if resolved.tokenizer_path is None:
        return None
    user = resolved.user
    return Tokenizer.load(resolved.tokenizer_path, user.text.chat_template, trust_remote_code=user.model.trust_remote_code)


def get_client_limits(resolved: Resolved, info: dict[str, Any]) -> ClientLimits:
    """The limits that a client of this engine checks requests against."""
    return ClientLimits(
        max_outstanding=resolved.plan.dp * resolved.max_running_requests + resolved.user.scheduler.max_queued_requests,
        max_context=resolved.max_context,
        vocab_size=resolved.model.vocab_size,
        capacity=int(info["max_total_tokens"]),
        is_pooling=resolved.pooling is not None,
        grammar=bool(resolved.plugins.get("grammar_backend")) and resolved.tokenizer_path is not None,
        grammar_processes=resolved.user.sampling.grammar_workers > 0,
        request_timeout=resolved.user.scheduler.request_timeout,
        seed=resolved.user.model.seed,
        refused_params=resolved.refused_params,
        custom_params=resolved.custom_params,
    )


class ThreadSession:
    """Runs the engine in a thread, which gives its messages to the collector."""

    def __init__(self, prepared: Prepared, collector: Collector, tokenizer: Tokenizer | None) -> None:
        self.collector = collector
        self.tokenizer = tokenizer
        self.info: dict[str, Any] = {}
        self._near, self._far = InProcessTransport.pair(collector.handle_message)
        self._error: BaseException | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(prepared, started), name="engine", daemon=True)
        self._thread.start()
        started.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        self.limits = get_client_limits(prepared.resolved, self.info)
        _connect(collector, self.send_all, prepared.resolved)
        atexit.register(self.close)  # the thread must end before the interpreter does

    def _run(self, prepared: Prepared, started: threading.Event) -> None:
        clock = time.perf_counter()
        try:
            with paused_collection():
                from frame.entrypoints.processes.build_engine import build_engine

            imports = round(time.perf_counter() - clock, 3)
            engine, self.info = build_engine(prepared.resolved, prepared.registry, self._far)
            self.info["phases"] = {"imports": imports, **self.info["phases"]}
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error
            return
        finally:
            started.set()
        with suppress(BaseException):  # sent as `Fatal` already; its traceback would keep the model alive
            engine.run()
        self.collector.fail_jobs("the engine was closed")

    def send_all(self, messages: Sequence[Message]) -> None:
        self._near.send_all(messages)

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._near.send(Control(id="close", action="shutdown"))
            self._thread.join(CLOSE_TIMEOUT)


class ProcessSession:
    """Runs the engine's ranks in processes. A thread here gives their messages to the collector and
    detects their end."""

    def __init__(self, prepared: Prepared, collector: Collector, tokenizer: Tokenizer | None) -> None:
        self.collector = collector
        self.tokenizer = tokenizer
        layout = Layout(ranks=prepared.resolved.plan.num_ranks, detokenizer=False, tokenizers=0)
        self._deployment = Deployment(prepared.resolved, layout, prepared.registry)
        try:
            self.info = wait_ready(self._deployment)
        except BaseException:
            self._deployment.kill()
            raise
        self.limits = get_client_limits(prepared.resolved, self.info)
        self._closing = False
        _connect(collector, self.send_all, prepared.resolved)
        self._thread = threading.Thread(target=self._receive, name="engine-messages", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while not self._closing:
            for message in self._deployment.transport.receive(0.2):
                if not isinstance(message, Ready | Heartbeat):
                    self.collector.handle_message(message)
            dead = self._deployment.find_dead_child()
            if dead is not None and not self._closing:
                self.collector.fail_jobs(dead)
                return

    def send_all(self, messages: Sequence[Message]) -> None:
        self._deployment.transport.send_all(messages)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._thread.join(CLOSE_TIMEOUT)
            self.collector.fail_jobs("the engine was closed")
            self._deployment.stop(CLOSE_TIMEOUT)


def _connect(collector: Collector, send_all: Callable[[Sequence[Message]], None], resolved: Resolved) -> None:
    """Let the collector send sequences: as many as may wait, so that none is refused, and at least
    those that may run. A sequence has a deadline only where the user has set one: what is not
    generated within 600 s would be lost."""
    scheduler = resolved.user.scheduler
    deadline = None if "request_timeout" in scheduler.model_fields_set else math.inf
    collector.connect(send_all, max(scheduler.max_queued_requests, resolved.max_running_requests), deadline)


def wait_ready(
    deployment: Deployment,
    report: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
    started: float | None = None,
) -> dict[str, Any]:
    """Wait until every process is ready; returns the data of the engine's `Ready`. `check` is
    called now and then, and may raise. `started`: the `time.perf_counter()` that `report` counts
    from; None: now. Raises ConfigurationError or RuntimeError with the error of
    a child that failed."""
    info: dict[str, Any] = {}
    waiting = set(deployment.names)
    started = time.perf_counter() if started is None else started
    while waiting:
        for message in deployment.transport.receive(0.1):
            deployment.handle_message(message)
            if isinstance(message, Ready):
                waiting.discard(message.process)
                info = message.data or info
                if report is not None:
                    seconds = time.perf_counter() - started
                    report(f"{message.process} ready after {seconds:.1f} s{_phases(message.data, seconds)}")
        check()
        error = deployment.get_start_error()
        if error is not None:
            raise error
    return info


def find_process_start() -> float:
    """The `time.perf_counter()` at which this process was started; now, where /proc does not say
    it. To 0.01 s: psutil rounds the time of boot to seconds."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        age = 0.0
    return time.perf_counter() - max(0.0, age)


def _phases(data: dict[str, Any], total: float) -> str:
    """The phases of the engine's start, which follow each other, and the rest of `total` seconds:
    as printed, they add up to it."""
    phases = {name: round(seconds, 1) for name, seconds in (data.get("phases") or {}).items()}
    rest = round(round(total, 1) - sum(phases.values()), 1)
    parts = [f"{name} {seconds:.1f} s" for name, seconds in {**phases, "other": rest}.items()]
    if kernels := data.get("kernels"):
        parts.append(f"{kernels['cache']} kernel cache: {kernels['loaded']} loaded, {kernels['compiled']} compiled")
    return f" ({', '.join(parts)}; {data['max_total_tokens']} tokens of KV cache)" if phases else ""


def resolve_arguments(config: Any, keywords: dict[str, Any], classes: Sequence[type] = ()) -> Prepared:
    """Resolve the arguments of `Engine(...)`: a FrameConfig, or a YAML file and keywords; and
    plugin classes, which are selected for the settings that are not given."""
    from frame.config.schema import FrameConfig
    from frame.entrypoints.configuration.sources import from_keywords, refuse_server_settings

    if isinstance(config, FrameConfig):
        if keywords:
            raise ConfigurationError(f"{next(iter(keywords))} is given beside a FrameConfig; set it there, or give keywords only")
        given = config
    else:
        loaded = from_keywords(**keywords, **({} if config is None else {"config": str(Path(config))}))
        refuse_server_settings(loaded)
        given = loaded.config
    return prepare(select_classes(given, classes), classes=classes)


def select_classes(config: FrameConfig, classes: Sequence[type]) -> FrameConfig:
    """The configuration with these plugins selected for the settings that it leaves out; a list of
    plugins gets them at its end. Raises PluginError for a class that the engine's processes cannot
    import."""
    from frame.plugins.files import name_class

    chosen: dict[str, dict[str, Any]] = {}
    for target in classes:
        kind, name = name_class(target)
        is_parallel = config.parallel.tp > 1 or config.parallel.pp > 1
        if is_parallel or (kind.name == "grammar_backend" and config.sampling.grammar_workers):
            change = "parallel.tp: 1 and parallel.pp: 1" if is_parallel else "sampling.grammar_workers: 0"
            sentence = f"{target.__qualname__} is a class of this process, which the processes of the engine cannot import"
            raise PluginError(f"{sentence}; set {change}, or write it to a file and set plugins.paths")
        if not kind.key:
            raise PluginError(f"{target.__qualname__} is a {kind.name}, which is no part of an engine; leave it out of plugins=[…]")
        section, _, field = kind.key.partition(".")
        values = chosen.setdefault(section, {})
        part = getattr(config, section)
        if kind.is_list:
            values[field] = (*values.get(field, getattr(part, field)), name)
        elif field not in part.model_fields_set:
            values[field] = name
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values) for section, values in chosen.items()})
