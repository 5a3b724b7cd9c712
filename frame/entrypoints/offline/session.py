"""Sessions: the engine of the offline API, in a thread of this process or in child processes.

Used by `Engine`. `frame.entrypoints.processes.build_engine` builds the engine itself. Imports no
torch.
"""

from __future__ import annotations

import atexit
import math
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
from frame.entrypoints.processes.launch import get_client_limits, load_tokenizer, wait_ready
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


def resolve_arguments(config: Any, keywords: dict[str, Any], classes: Sequence[type] = ()) -> Prepared:
    """Resolve the arguments of `Engine(...)`: a FrameConfig, or a YAML file and keywords; and
    plugin classes, which are selected for the settings that are not given."""
    from frame.entrypoints.configuration.sources import from_keywords, refuse_server_settings

    if isinstance(config, FrameConfig):
        if keywords:
            raise ConfigurationError(f"{next(iter(keywords))} is given beside a FrameConfig; set it there, or give keywords only")
        base = config
    else:
        loaded = from_keywords(**keywords, **({} if config is None else {"config": str(Path(config))}))
        refuse_server_settings(loaded)
        base = loaded.config
    if base.scheduler.target_itl_ms is None:  # throughput counts more than gaps between tokens
        base = base.model_copy(update={"scheduler": base.scheduler.model_copy(update={"target_itl_ms": 0.0})})
    if base.model.download:
        from frame.entrypoints.hub.pull import fetch_models

        fetch_models(base)
    return prepare(select_classes(base, classes), classes=classes)


def select_classes(config: FrameConfig, classes: Sequence[type]) -> FrameConfig:
    """The configuration with these plugins selected for the settings that it leaves out; a list of
    plugins gets them at its end. Raises PluginError for a class that the engine's processes cannot
    import."""
    from frame.plugins.files import name_class

    chosen: dict[str, dict[str, Any]] = {}
    sampling = config.sampling
    for target in classes:
        kind, name = name_class(target)
        is_parallel = config.parallel.tp > 1 or config.parallel.pp > 1
        if is_parallel or (kind.name == "grammar_backend" and (sampling.grammar_workers or sampling.grammar_mask_processes)):
            parts = {"grammar_workers": sampling.grammar_workers, "grammar_mask_processes": sampling.grammar_mask_processes}
            zeros = " and ".join(f"sampling.{name}: 0" for name, count in parts.items() if count)
            change = "parallel.tp: 1 and parallel.pp: 1" if is_parallel else zeros
            sentence = f"{target.__qualname__} is a class of this process, which the processes of the engine cannot import"
            raise PluginError(f"{sentence}; set {change}, or write it to a file and set plugins.paths")
        if not kind.key:
            raise PluginError(f"{target.__qualname__} is a {kind.name}, which is no part of an engine; leave it out of plugins=[…]")
        section, _, field = kind.key.partition(".")
        values = chosen.setdefault(section, {})
        values_of_section = getattr(config, section)
        if kind.is_list:
            values[field] = (*values.get(field, getattr(values_of_section, field)), name)
        elif field not in values_of_section.model_fields_set:
            values[field] = name
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values) for section, values in chosen.items()})
