"""The HTTP application over a real engine loop with a fake model, in one process: for tests that
send thousands of requests.

ASGI is called directly, so what uvicorn does with bytes is not tested here.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from frame.config.hardware import Hardware
from frame.config.schema import FrameConfig
from frame.core.engine import Engine, EngineOptions
from frame.core.ipc.transport import InProcessTransport
from frame.core.messages import AnyMessage, Control, Generate, StepTokens
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.engine_client.adapter_registry import AdapterRegistry
from frame.entrypoints.engine_client.adapter_spool import AdapterSpool
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.tokenizing import ThreadedTokenizer
from frame.entrypoints.http.app import App
from frame.entrypoints.http.extensions import load_extensions
from frame.entrypoints.http.operations.live_history import LiveHistory
from frame.entrypoints.http.operations.metrics import ServerMetrics
from frame.entrypoints.http.server import load_stat_loggers, open_dump
from frame.entrypoints.http.services import Services
from frame.entrypoints.keys import open_keys
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.entrypoints.processes.launch import get_client_limits, load_tokenizer
from frame.interfaces.modality import MediaPlan
from frame.loading.engine_states import EngineStates
from frame.testing.fake_runner import FakeRunner
from frame.text.detokenizer import Detokenizer
from tests.entrypoints.adapter_engine import AdapterOrders

CPU = Hardware(cpu_cores=1, memory_bytes=8 << 30)
TIMEOUT = 60.0  # seconds
PIECE = 64 * 1024  # bytes of a body that come at once
JSON_TYPE = (b"content-type", b"application/json")


@dataclass(slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class OrderedTransport:
    """A transport to an engine that knows no adapters: `orders` answers for it."""

    def __init__(self, transport: InProcessTransport) -> None:
        self.orders = AdapterOrders(lambda reply: None)
        self.receive = transport.receive
        self.sent: deque[Generate] = deque(maxlen=256)
        self._transport = transport

    def send(self, message: Any) -> None:
        if isinstance(message, Generate):
            self.sent.append(message)
        if not self.orders.take(message):
            self._transport.send(msgspec.structs.replace(message, adapter="") if isinstance(message, Generate) else message)


@dataclass(slots=True)
class InProcess:
    """`app` and what is behind it. `request` plays a client that sends all and reads all."""

    app: App
    services: Services
    engine: Engine
    orders: AdapterOrders
    sent: deque[Generate]  # the last requests that the engine got

    async def request(self, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = (JSON_TYPE,)) -> Response:
        target, _, query = path.partition("?")
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": unquote(target), "raw_path": target.encode("utf-8", "replace"),
            "query_string": query.encode(), "root_path": "", "scheme": "http", "headers": list(headers), "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2), "state": {},
        }  # fmt: skip
        starts = range(0, max(1, len(body)), PIECE)
        inbox = [{"type": "http.request", "body": body[at : at + PIECE], "more_body": at + PIECE < len(body)} for at in reversed(starts)]
        gone = asyncio.Event()
        sent: list[dict[str, Any]] = []

        async def receive() -> Any:
            if inbox:
                await asyncio.sleep(0)  # as from a socket
                return inbox.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(dict(message))

        async with asyncio.timeout(TIMEOUT):
            await self.app(scope, receive, send)
        assert sent and sent[0]["type"] == "http.response.start", f"{method} {path} was not answered"
        assert not sent[-1].get("more_body"), f"{method} {path} was not answered to its end"
        found = {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}
        return Response(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))

    async def post(self, path: str, body: Any, **headers: str) -> Response:
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        return await self.request("POST", path, msgspec.json.encode(body), (JSON_TYPE, *given))


@asynccontextmanager
async def serving(
    sections: Mapping[str, Any] | None = None, folder: str | Path = "frame-tiny", media: Any = None
) -> AsyncIterator[InProcess]:
    """The application over the tokenizer and the facts of a checkpoint. `sections` is a
    configuration, as in a file; `media` stands for the service that prepares them."""
    small = {"max_running_requests": 16, "chunked_prefill_size": 256}
    given = {name: dict(values) for name, values in (sections or {}).items()}
    given["scheduler"] = {**small, **given.get("scheduler", {})}
    given["cache"] = {"max_total_tokens": 4096, "page_size": 16, **given.get("cache", {})}
    given["model"] = {"path": str(folder), "max_context": 512, **given.get("model", {})}
    prepared = prepare(FrameConfig.model_validate(given), CPU, is_served=True)
    resolved = prepared.resolved
    tokens = resolved.max_total_tokens or 4096
    loop = asyncio.get_running_loop()
    clients: list[EngineClient] = []

    def deliver(message: AnyMessage) -> None:
        for place in message.finishes if isinstance(message, StepTokens) else ():
            link.orders.users.pop(message.rids[place], None)
        loop.call_soon_threadsafe(lambda: clients[0].handle_messages([message]))

    near, far = InProcessTransport.pair(deliver)
    plan = None if media is None else MediaPlan(table_rows=4096, encode_budget=4096, modalities=("image", "video", "audio"))
    scheduler = build_scheduler(resolved.model_copy(update={"media": plan}), prepared.registry, tokens // resolved.page_size + 1)
    config = scheduler.config
    runner = FakeRunner(config.num_pages, config.page_size, config.max_running, config.max_pages, config.vocab_size)
    engine = Engine(scheduler, runner, far, EngineOptions(resolved.overlap, "fatal", make_states=EngineStates))
    tokenizer = load_tokenizer(resolved)
    assert tokenizer is not None
    info = {"max_total_tokens": tokens, "page_size": resolved.page_size, "phases": {}}
    link = OrderedTransport(near)
    client = EngineClient(link, get_client_limits(resolved, info), Detokenizer(tokenizer))
    clients.append(client)
    link.orders.reply = lambda reply: client.handle_messages([reply])
    services = Services(resolved, client, tokenizer, ThreadedTokenizer(tokenizer), info=info, keys=open_keys(resolved, prepared.registry))
    spool = AdapterSpool(resolved.tokenizer_path)
    if resolved.user.adapters.enabled:
        services.adapters = AdapterRegistry([client], resolved.user.adapters, spool, services.base_names)
    services.media = media
    services.metrics = ServerMetrics(services)
    services.history = LiveHistory(client, services.metrics.count_failures)
    client.stats.loggers = load_stat_loggers(resolved, prepared.registry, services)
    client.stats.dump = open_dump(resolved)
    thread = threading.Thread(target=engine.run, name="engine", daemon=True)
    thread.start()
    try:
        yield InProcess(App(services, extensions=load_extensions(resolved, prepared.registry)), services, engine, link.orders, link.sent)
    finally:
        if client.stats.dump is not None:
            client.stats.dump.close()
        spool.close()
        near.send(Control(id="end", action="shutdown"))
        await asyncio.to_thread(thread.join, 10)
