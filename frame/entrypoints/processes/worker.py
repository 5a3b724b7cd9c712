"""A child process: `python -m frame.entrypoints.processes.worker ROLE`, with the resolved
configuration as one line of JSON on standard input. With `--early` it imports the engine first, and
the line before the configuration has the other arguments.

Roles: scheduler (rank 0), follower (rank ≥ 1), detokenizer, tokenizer. A child ends with its
parent: by the kernel's death signal, and when standard input closes. Exit codes: 0 stopped, 1
failed, 78 invalid configuration or plugins.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from frame.config.resolved import Resolved
from frame.config.server_sections import LogSection
from frame.core.blame import explain
from frame.core.errors import EXIT_CONFIGURATION, ConfigurationError, PluginError
from frame.core.garbage_collection import paused_collection
from frame.core.interfaces.collective import LOOPBACK
from frame.core.ipc.inflight_file import INFLIGHT, INFLIGHT_TEXT, open_inflight
from frame.core.ipc.transport import ZmqTransport
from frame.core.messages import AnyMessage, Fatal, Heartbeat, Message, NewWeights, Ready, StartDetokenize, StepText, StepTokens, Tokenize
from frame.entrypoints import logs
from frame.entrypoints.processes.hang_dump import enable_stack_dumps
from frame.entrypoints.tracing import RankSpans, TextSpans, Tracing, add_tokenizer_span, open_tracing
from frame.host.child_process import EXIT_ORPHANED, PARENTS_SIGNALS, die_with_parent
from frame.host.socket_directory import SocketDirectory
from frame.parallel.rank_channels import BatchReceiver, BatchSender, ResultReceiver, ResultSender
from frame.plugins.loader import load_configured

if TYPE_CHECKING:
    import numpy as np

    from frame.core.engine import Engine
    from frame.core.scheduling.kv_cache_manager import KVCacheManager
    from frame.entrypoints.processes.join_groups import Place
    from frame.kv_events.cache_events import CacheEvents
    from frame.text.detokenizer import Detokenizer
    from frame.text.tokenizer import Tokenizer

EXIT_FAILED = 1
HEARTBEAT = 1.0  # seconds, while idle
EARLY_LIMIT = 16_384  # requests whose tokens may arrive before their StartDetokenize


Role = Callable[[Resolved, argparse.Namespace, ZmqTransport, str], None]


def main(arguments: list[str] | None = None, roles: Mapping[str, Role] | None = None) -> int:
    """Run one role to its end; returns the exit code. `roles`: replacements, for tests."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    if options.death_signal:
        die_with_parent(options.parent)
    for number in PARENTS_SIGNALS:  # the terminal sends them to the whole process group
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    enable_stack_dumps()
    lines = Lines()
    if options.early:
        options = _import_early(options, lines)
    resolved = Resolved.model_validate_json(lines.read_line())
    threading.Thread(target=_watch_parent, args=(lines,), name="parent-watch", daemon=True).start()
    numbered = {"scheduler": "engine", "follower": f"rank-{options.rank}", "tokenizer": f"tokenizer-{options.rank}"}
    name = numbered.get(options.role, options.role)
    logs.configure(name if options.replica is None else f"replica-{options.replica}-{name}", resolved.user.log)
    transport = _transport(options, name)
    code = 0
    try:
        {**ROLES, **(roles or {})}[options.role](resolved, options, transport, name)
    except ConfigurationError as error:
        if isinstance(error, PluginError) and error.__cause__ is not None:  # for the plugin's author
            logging.getLogger(__name__).error("%s failed", name, exc_info=error)
        transport.send(Fatal(process=name, error=f"{name}: {error}" if isinstance(error, PluginError) else str(error)))
        code = EXIT_CONFIGURATION
    except Exception as error:
        logging.getLogger(__name__).exception("%s failed", name)
        transport.send(Fatal(process=name, error=explain(error), trace=traceback.format_exc()))
        code = EXIT_FAILED
    transport.close()
    return code


# roles --------------------------------------------------------------------------------------------


def _schedule(resolved: Resolved, options: argparse.Namespace, transport: ZmqTransport, name: str) -> None:
    clock = time.perf_counter()
    with paused_collection():
        from frame.entrypoints.processes.build_engine import build_engine

    gc.freeze()  # modules stay alive, so the collections of the start skip them

    imports = round(options.early_imports + time.perf_counter() - clock, 3)
    sockets = SocketDirectory(options.sockets)
    batches = [sockets.address(f"batches-{rank}") for rank in range(1, options.ranks)]
    followers = BatchSender(batches, sockets.address("rank-replies")) if batches else None
    results = [ResultReceiver(sockets.address(f"rank-results-{rank}")) for rank in resolved.plan.result_ranks if rank]
    place = _find_place(options)
    tracing = open_tracing(resolved, partial(load_configured, resolved.user.plugins), name)
    engine, info = build_engine(resolved, load_configured(resolved.user.plugins), transport, place, followers, HEARTBEAT, tracing, results)
    info["phases"] = {"imports": imports, **info["phases"]}
    engine.scheduler.publish_inflight(sockets.path / INFLIGHT)
    events = publish_kv_events(resolved, engine.scheduler.list_kv_managers(), options.replica or 0)
    transport.send(Ready(process=name, pid=os.getpid(), data=info))
    gc.collect()
    gc.freeze()  # objects of the start stay alive, so later collections skip them
    if engine.grammars is not None:  # whose tables have a vocabulary: a collection that traverses it delays a step by 0.1 s
        engine.grammars.on_loaded = gc.freeze
    run_engine(engine, events, tracing)


def run_engine(engine: Engine, events: Sequence[CacheEvents], tracing: Tracing | None) -> None:
    """Run the engine to its end, and send what events and spans are left."""
    try:
        engine.run()
    finally:
        for each in events:
            each.close()
        if tracing is not None:
            tracing.close()


def publish_kv_events(resolved: Resolved, managers: Sequence[KVCacheManager], replica: int) -> list[CacheEvents]:
    """Publish what the prefix caches hold, if the configuration says so. -> what is to be closed.
    Raises ConfigurationError for an address that cannot be used."""
    cache = resolved.user.cache
    if cache.events_endpoint is None:
        return []
    from frame.kv_events.cache_events import CacheEvents
    from frame.kv_events.publisher import EventSettings, KVEventPublisher

    events = []
    for number, manager in enumerate(managers, replica * len(managers)):
        settings = EventSettings(
            cache.events_endpoint, cache.events_replay_endpoint, cache.events_topic, cache.events_buffer_steps, cache.events_hwm,
            cache.events_layout, number,
        )  # fmt: skip
        publisher = KVEventPublisher(settings)
        manager.events = CacheEvents(publisher, manager.num_token_pages, manager.page_size, cache.events_max_queue_size)
        events.append(manager.events)
    return events


def _follow(resolved: Resolved, options: argparse.Namespace, transport: ZmqTransport, name: str) -> None:
    with paused_collection():
        from frame.entrypoints.processes.build_engine import add_group, add_profiling, add_updates, build_rank, follow_tiers
        from frame.parallel.tp_follower import follow

    sockets = SocketDirectory(options.sockets)
    batches = BatchReceiver(sockets.address(f"batches-{options.rank}"), options.rank, sockets.address("rank-replies"))
    place = _find_place(options)
    registry = load_configured(resolved.user.plugins)
    rank = build_rank(resolved, registry, place)
    updating = add_updates(resolved, registry, add_profiling(resolved, rank, place), rank, options.rank)
    runner = add_group(resolved, updating, rank, options.rank)
    tiers = follow_tiers(resolved, registry, rank, options.rank)
    tracing = open_tracing(resolved, partial(load_configured, resolved.user.plugins), name)
    results = ResultSender(sockets.address(f"rank-results-{options.rank}")) if options.rank in resolved.plan.result_ranks else None
    transport.send(Ready(process=name, pid=os.getpid()))
    observer, group = None if tracing is None else RankSpans(tracing), resolved.plan.find_group(options.rank)
    try:
        follow(runner, batches, observer, results, place.watch, group, tiers)
    finally:
        if tracing is not None:
            tracing.close()


def _find_place(options: argparse.Namespace) -> Place:
    from frame.entrypoints.processes.join_groups import Place
    from frame.parallel.rank_watch import RankWatch

    watch = RankWatch(options.rank, options.ranks) if options.ranks > 1 else None
    return Place(options.rank, options.ranks, options.rendezvous, options.local_index, options.host, watch)


def _detokenize(resolved: Resolved, options: argparse.Namespace, transport: ZmqTransport, name: str) -> None:
    from frame.text.detokenizer import Detokenizer

    detokenize(resolved, transport, name, Detokenizer(tokenizer_of(resolved), EARLY_LIMIT, open_inflight_text(options)))


def open_inflight_text(options: argparse.Namespace) -> np.ndarray | None:
    """The in-flight file of the detokenizer; None if it cannot be created."""
    try:
        return open_inflight(Path(options.sockets) / INFLIGHT_TEXT, 1)[0]
    except OSError as error:
        logging.getLogger(__name__).warning("no in-flight file: %s; a request that crashes the detokenizer is not identified", error)
        return None


def detokenize(resolved: Resolved, transport: ZmqTransport, name: str, detokenizer: Detokenizer) -> None:
    """Detokenize until the process is ended."""
    tracing = _until_term(resolved, name)
    spans = None if tracing is None else TextSpans(tracing)
    for message in _messages(transport, name):
        transport.send_all(detokenize_message(detokenizer, message, spans))


def detokenize_message(detokenizer: Detokenizer, message: AnyMessage, spans: TextSpans | None = None) -> Sequence[Message]:
    """The detokenizer's reply to one message. An error ends the requests of that message only."""
    try:
        if isinstance(message, StepTokens):
            text = detokenizer.process_step(message)
            if spans is not None:
                spans.end_requests(text)
            return [text] if text.rids else []
        if isinstance(message, NewWeights):
            return [message]
        if isinstance(message, StartDetokenize):
            if spans is not None:
                spans.start_request(message)
            return detokenizer.start_request(message)
    except Exception:
        logging.getLogger(__name__).exception("the detokenizer failed on a message of type %s", type(message).__name__)
        if isinstance(message, StepTokens):
            from frame.text.incremental_decoder import FAILED

            rids, count = message.rids, len(message.rids)
            return [StepText(rids=rids, texts=[""] * count, token_ids=[[] for _ in rids], finishes=dict.fromkeys(range(count), FAILED))]
    return []


def _tokenize(resolved: Resolved, options: argparse.Namespace, transport: ZmqTransport, name: str) -> None:
    from frame.entrypoints.engine_client.tokenizing import tokenize

    tokenizer = tokenizer_of(resolved)
    tracing = _until_term(resolved, name)
    for message in _messages(transport, name):
        if isinstance(message, Tokenize):
            since = time.perf_counter()
            tokenized = tokenize(tokenizer, message)
            transport.send(tokenized)
            if tracing is not None:
                add_tokenizer_span(tracing, message, since, len(tokenized.token_ids))


def _messages(transport: ZmqTransport, name: str) -> Iterator[AnyMessage]:
    """Report ready, then yield messages for ever, with heartbeats between."""
    transport.send(Ready(process=name, pid=os.getpid()))
    beaten = 0.0
    while True:
        yield from transport.receive(HEARTBEAT)
        if time.monotonic() - beaten >= HEARTBEAT:
            beaten = time.monotonic()
            transport.send(Heartbeat(process=name))


ROLES: Mapping[str, Role] = {"scheduler": _schedule, "follower": _follow, "detokenizer": _detokenize, "tokenizer": _tokenize}


def _until_term(resolved: Resolved, name: str) -> Tracing | None:
    """A text process's tracing, whose last spans are sent at SIGTERM."""
    tracing = open_tracing(resolved, partial(load_configured, resolved.user.plugins), name)
    if tracing is not None:

        def end(number: int, frame: object) -> None:
            tracing.close()
            exit_now(0)

        signal.signal(signal.SIGTERM, end)
    return tracing


# set-up -------------------------------------------------------------------------------------------


def _import_early(options: argparse.Namespace, lines: Lines) -> argparse.Namespace:
    """Import what the engine imports. -> the options that arrive meanwhile."""
    clock = time.perf_counter()
    with paused_collection():
        import frame.entrypoints.processes.build_engine  # noqa: F401 - `_schedule` uses it

    seconds = time.perf_counter() - clock
    order = json.loads(lines.read_line())
    os.environ.update(order["environment"])
    return _options([options.role, *order["arguments"], "--parent", str(options.parent), "--early-imports", str(seconds)])


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="frame.entrypoints.processes.worker", description="A child process of frame, started by the server."
    )
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--early-imports", type=float, default=0.0)
    parser.add_argument("--sockets", required="--early" not in arguments)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--death-signal", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="")
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--local-index", type=int, default=0)
    parser.add_argument("--replica", type=int)
    parser.add_argument("--detokenizer", action="store_true")
    return parser.parse_args(arguments)


def tokenizer_of(resolved: Resolved) -> Tokenizer:
    from frame.entrypoints.processes.launch import load_tokenizer

    tokenizer = load_tokenizer(resolved)
    if tokenizer is None:
        raise ConfigurationError("a text process was started without a tokenizer")
    return tokenizer


def _transport(options: argparse.Namespace, name: str) -> ZmqTransport:
    address = SocketDirectory(options.sockets).address
    routes: dict[type[Message], str] = dict.fromkeys((StepTokens, NewWeights), address("detokenizer")) if options.detokenizer else {}
    return ZmqTransport(address(name), address(f"{name}-out"), routes, is_outbox=True)


class Lines:
    """The lines of standard input. `sys.stdin` is not used: its lock, which a waiting thread holds,
    is a fatal error at the interpreter's end."""

    def __init__(self) -> None:
        self._held = b""

    def read_line(self) -> bytes:
        """The next line. Ends this process when the parent has ended."""
        while b"\n" not in self._held:
            chunk = os.read(0, 65536)
            if not chunk:
                os._exit(EXIT_ORPHANED)
            self._held += chunk
        line, _, self._held = self._held.partition(b"\n")
        return line


def _watch_parent(lines: Lines) -> None:
    """Apply new log settings; exit when the parent has ended."""
    while True:
        logs.set_levels(LogSection.model_validate_json(lines.read_line()))


def exit_now(code: int) -> NoReturn:
    """Exit without finalizing the interpreter, which takes seconds once torch is loaded."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def run_process(roles: Mapping[str, Role] | None = None) -> NoReturn:
    """Run one role as this process. What plugins and libraries print goes to the log."""
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    exit_now(main(roles=roles))


if __name__ == "__main__":
    run_process()
