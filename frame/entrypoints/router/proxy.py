"""`Proxy`: the router's ASGI application. A request goes to one replica, and its answer is passed
on as it comes.

A request is repeated on another replica only while no byte of an answer has arrived, and only if
the replica never got it or the route keeps nothing. An answer that breaks off ends with an error
event that names the request. Must not know how replicas are chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import httpx

from frame.entrypoints.handoff import HEADER, FleetKey
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, DisconnectedError, ResponseCutError
from frame.entrypoints.http.protocol.bodies import AT_ONCE, Bodies
from frame.entrypoints.http.request_context import ADAPTER, BLOCKS, BODY_PAUSE, RequestContext
from frame.entrypoints.logs import REQUEST_ID, request_id_of
from frame.entrypoints.router.divided_requests import make_decode_body, make_prefill_body, read_divisible
from frame.entrypoints.router.exchange import (
    REFUSED,
    Exchange,
    Losses,
    LostError,
    Parts,
    RoutedRequest,
    ShortReply,
    error_event,
    find_reason,
    kept,
    next_chunk,
    read_sentence,
    read_short,
)
from frame.entrypoints.router.metrics import RouterMetrics
from frame.entrypoints.router.moving import StreamMover
from frame.entrypoints.router.replicas import Backend, Backends, counted, timed
from frame.entrypoints.router.requests import (
    BROADCAST,
    STATES,
    Prompt,
    is_pinned,
    is_repeatable,
    is_stored,
    is_streamed,
    read_prompt,
)
from frame.interfaces.routing import RoutingRequest

log = logging.getLogger(__name__)

REFUSAL_TIME = 5.0  # seconds in which a replica sends the body of a refusal
BROADCAST_TIME = 40.0  # seconds in which each replica answers a request for all; its engine has 30
STATES_TIME = 910.0  # the same for those that may wait for running requests, or load weights
STATUS = {"serving": "ok", "joining": "joining", "draining": "draining"}  # of /health, by state
MAX_PREFILLS = 2  # prefill servers that are tried
PREFILL_TIMEOUT = 60.0  # seconds that they have together, before a decode server computes the prompt
HANDLE_REFUSED = (400, 413)  # a decode server may refuse what the router has added to the body, or its size
FAILED = 400  # statuses from it on: the cache has nothing of the prompt
MAX_ADAPTERS, MAX_ADAPTER_NAME = 4096, 1024  # names that are remembered, and the bytes of one
_ABORT_ALL = re.compile(rb'"abort_all"\s*:\s*true')


class Proxy:
    """Passes requests to replicas. `max_body`: bytes of a request. Those of all requests are
    bounded by `AT_ONCE` times as many; a request beyond is refused with status 503. `pause`:
    seconds between two pieces of a body. `prefill`: servers that begin requests, which those of
    `backends` continue, within `prefill_timeout` seconds. `key`: lets streams move between replicas
    that have it."""

    def __init__(
        self,
        backends: Backends,
        client: httpx.AsyncClient,
        max_body: int,
        pause: float = BODY_PAUSE,
        prefill: Backends | None = None,
        key: FleetKey | None = None,
    ) -> None:
        self.prefill_timeout = PREFILL_TIMEOUT
        self.backends, self._prefill, self.metrics = backends, prefill, RouterMetrics(backends, prefill)
        self._max_body, self._via = max_body, client.headers["via"].encode()
        self._exchange = Exchange(client, self.metrics)
        self._key = key
        self._mover = None if key is None else StreamMover(key, backends, self._exchange, self.metrics)
        self._bodies = Bodies(AT_ONCE * max_body, pause)
        self._adapters: OrderedDict[bytes, None] = OrderedDict()  # models of requests that an adapter has served

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the router does not serve {scope['type']}")
        path = scope["path"]
        if self._has_seen(scope):
            await self._serve(scope, receive, send)  # which refuses it
        elif path in ("/health", "/health/ready", "/readyz", "/ping", "/health/live", "/livez"):
            status = {backend.url: STATUS.get(backend.state, "unhealthy") for backend in self._all}
            is_ok = path in ("/health/live", "/livez") or bool(self.backends.healthy)
            await _respond(send, 200 if is_ok else 503, json.dumps({"replicas": status}).encode(), retry=not is_ok)
        elif path == "/metrics":
            await _respond(send, 200, self.metrics.render(), b"text/plain; version=0.0.4; charset=utf-8")
        else:
            await self._serve(scope, receive, send)

    def _has_seen(self, scope: Any) -> bool:
        """Whether this router has sent the request."""
        return any(name == b"via" and self._via in value for name, value in scope["headers"])

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        is_websocket = scope.pop("hand_over", None) is not None
        name = scope["request_id"] = request_id_of(scope["headers"])
        REQUEST_ID.set(name)  # in the context of this request's task alone
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        headers = [pair for pair in kept(scope["headers"]) if pair[0] != b"x-request-id"]
        if scope.get("client"):  # a replica on this machine logs the last address that is not this machine's
            headers.append((b"x-forwarded-for", scope["client"][0].encode()))
        context = RequestContext(scope, receive, send, self._max_body, bodies=self._bodies)
        try:
            if is_websocket:
                raise ApiError(400, "the router passes no WebSockets on; connect to a server itself")
            if self._has_seen(scope):
                sentence = "the request came back to this router: one of its replicas is the router itself, or leads to it; remove that one"
                raise ApiError(508, sentence)
            if any(name == HEADER for name, _ in headers):
                raise ApiError(400, f"{HEADER.decode()} is a header between router and servers; leave it out")
            if not target.startswith(b"/"):
                raise ApiError(400, f"the request's target is {target[:40].decode('latin-1')!r}; send a path that begins with /")
            body, gone = await context.body(), asyncio.create_task(_wait_gone(receive))
            headers += [(b"x-request-id", name.encode()), (b"via", self._via)]
            try:
                path = scope["path"].removesuffix("/")
                request = RoutedRequest(scope["method"], target, path, headers, body, name, send, gone)
                await (self._broadcast(request) if request.path in BROADCAST else self._route(request))
            finally:
                gone.cancel()
                if request.is_begun:
                    self.metrics.count_prefill("unused")
        except DisconnectedError:
            self.metrics.count("client_gone")
        except ApiError as error:
            self.metrics.count("refused")
            await context.fail(error)
        finally:
            await context.close()

    @property
    def _all(self) -> list[Backend]:
        return [*self.backends.all, *(self._prefill.all if self._prefill is not None else ())]

    async def _begin(self, request: RoutedRequest, routing: RoutingRequest) -> RoutedRequest:
        """Let a prefill server begin a request. -> the request that a decode server continues; the
        same one where it is not divided, or where no prefill server has done its part. Raises
        DisconnectedError."""
        fields = read_divisible(request.method, request.path, request.body)
        if fields is None or self._prefill is None:
            return request
        headers = [pair for pair in request.headers if pair[0] != b"accept-encoding"]  # the response is read here
        begun = replace(request, body=make_prefill_body(fields, request.path), headers=headers)
        tried = {each.number for each in self._prefill.healthy if each.is_suspended or (each.first_bytes.is_silent and each.outstanding)}
        last, deadline = len(tried) + MAX_PREFILLS, asyncio.get_running_loop().time() + self.prefill_timeout
        while len(tried) < last and (backend := self._prefill.choose(routing, tried, request.prefixes)) is not None:
            tried.add(backend.number)
            try:
                with counted(backend, request.prefixes) as place:
                    async with asyncio.timeout_at(deadline):
                        response = await self._exchange.wait(begun, backend, read_short(await self._exchange.open(begun, backend)))
                    backend.first_bytes.note_answer()
                    if response.status >= FAILED:
                        self._prefill.refuse(routing, place)
            except (LostError, ApiError, httpx.HTTPError, OSError) as error:
                log.warning("the prefill server %s failed: %s", backend.url, str(error) or "no answer in time")
                self._prefill.forget_request(routing, backend)
                if isinstance(error, TimeoutError):
                    backend.first_bytes.suspend(time.monotonic(), is_silent=True)
                continue
            if response.status not in REFUSED:
                body = make_decode_body(fields, response.body) if response.status == 200 else None
                if body is not None:
                    return replace(request, body=body)
                self.metrics.count_prefill("whole")
                return request
        self.metrics.count_prefill("lost")
        return request

    async def _route(self, request: RoutedRequest) -> None:
        """Send the request to a replica; to another one where that duplicates nothing."""
        prompt = read_prompt(request.body, self._adapters) if request.method == "POST" else Prompt([], b"")
        routing = RoutingRequest(prompt.blocks, request.session)
        if self.backends.prefixes is not None and any(backend.events is not None for backend in self._all):
            request.prefixes = self.backends.prefixes.read(prompt, request.headers)
        whole = request  # which another replica continues
        request = await self._begin(request, routing)
        whole.is_begun = request is not whole
        reason, last, losses = "no replica is healthy", None, Losses()
        while (backend := await self._choose_next(request, routing, losses)) is not None:
            request.tried.add(backend.number)
            signature = b"" if self._mover is None else self._mover.signature(request, backend)
            asks = self._ask_blocks(request, backend)
            with counted(backend, request.prefixes) as place:
                try:
                    with timed(backend, is_streamed(request.body)):
                        reply = await self._exchange.open(request, backend, signature, asks_blocks=asks)
                    if reply.status_code >= FAILED:
                        self.backends.refuse(routing, place)
                    if whole.is_begun and reply.status_code not in REFUSED:
                        whole.is_begun, is_refused = False, reply.status_code in HANDLE_REFUSED
                        self.metrics.count_prefill("refused" if is_refused else "transferred")
                        if is_refused:
                            log.warning("the decode server %s refuses what a prefill server has begun: it gets all of it", backend.url)
                            await reply.aclose()
                            request = whole
                            request.tried.discard(backend.number)
                            continue
                    told = reply.headers.get(BLOCKS.decode()) if asks and reply.status_code == 200 else None
                    if told is not None and request.prefixes is not None:
                        request.prefixes.owner.learn(request.prefixes, told.encode("latin-1", "replace"))
                    if ADAPTER.decode() in reply.headers:
                        self._note_adapter(prompt.model)
                    if self._mover is not None and signature and HEADER.decode() in reply.headers:
                        await self._mover.pass_on(whole, routing, place, reply, losses)
                        return
                except LostError as error:
                    reason = f"replica {backend.url} is lost: {error}"
                    self.backends.refuse(routing, place)
                    if error.was_sent:
                        losses.add(backend, is_silent=error.is_silent)
                    if error.was_sent and not is_repeatable(request.method, request.path):
                        self.metrics.count("lost")
                        log.warning("the request was sent to %s, which is lost: it is not repeated", backend.url)
                        raise ApiError(502, f"{reason}; it may have taken request {request.request_id}, which is not repeated") from None
                    if losses.may_be_caused:
                        request.tried -= await losses.wait_late(request.gone)
                    if losses.may_be_caused:
                        self.metrics.count("lost")
                        sentence = f"{reason}, number {losses.count} with request {request.request_id}, which is not repeated"
                        raise ApiError(502, sentence) from None
                    self.metrics.count("retried")
                    continue
                try:
                    if reply.status_code in REFUSED or (reply.status_code == 404 and is_stored(request.path)):  # ask another
                        with contextlib.suppress(LostError, httpx.HTTPError, OSError):  # the refusal breaks off
                            async with asyncio.timeout(REFUSAL_TIME):
                                last = await self._exchange.wait(request, backend, read_short(reply))
                        continue
                    await self._pass_on(request, backend, reply)
                    return
                finally:
                    await reply.aclose()
        if last is None:
            raise ApiError(503, f"{reason}; try again later", retry_after=RETRY_AFTER)
        self.metrics.count("refused" if last.status in REFUSED else "answered")
        await last.send(request.send)

    def _ask_blocks(self, request: RoutedRequest, backend: Backend) -> bytes:
        """The header that asks for the blocks of the prompt; b"" where they are of no use."""
        prefixes = request.prefixes
        if self._key is None or backend.events is None or prefixes is None or prefixes.is_cached:
            return b""
        return self._key.sign(request.path, BLOCKS.decode())

    def _note_adapter(self, name: bytes) -> None:
        """Later requests that name it prefer the replicas that have served it."""
        if 0 < len(name) <= MAX_ADAPTER_NAME:
            self._adapters[name] = None
            self._adapters.move_to_end(name)
            if len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)

    async def _choose_next(self, request: RoutedRequest, routing: RoutingRequest, losses: Losses) -> Backend | None:
        """The next replica; one that was only late where there is no other."""
        backend = self._choose(request, routing)
        if backend is None and (late := await losses.wait_late(request.gone)):
            request.tried -= late
            backend = self._choose(request, routing)
        return backend

    def _choose(self, request: RoutedRequest, routing: RoutingRequest) -> Backend | None:
        if is_pinned(request.path):
            return next((backend for backend in self.backends.healthy if backend.number not in request.tried), None)
        return self.backends.choose(routing, request.tried, request.prefixes)

    async def _pass_on(self, request: RoutedRequest, backend: Backend, reply: httpx.Response) -> None:
        """The answer to the client, as its bytes come."""
        head = kept(reply.headers.raw)
        has_length = "content-length" in reply.headers and "transfer-encoding" not in reply.headers
        has_length = has_length and reply.status_code not in (204, 304)  # without a body, whatever the length says
        if has_length:
            head.append((b"content-length", reply.headers["content-length"].encode()))
        await request.send({"type": "http.response.start", "status": reply.status_code, "headers": head})
        with contextlib.closing(Parts(request, backend)) as parts:
            await self._pass_on_body(request, backend, reply, parts, has_length=has_length)

    async def _pass_on_body(
        self, request: RoutedRequest, backend: Backend, reply: httpx.Response, parts: Parts, *, has_length: bool
    ) -> None:
        read, last = partial(next_chunk, reply.aiter_raw().__aiter__()), b""  # last: the last two bytes sent
        while True:
            try:
                chunk = await parts.wait(read)
            except (LostError, httpx.HTTPError, OSError) as error:
                self.metrics.count("broken")
                await backend.group.check(backend, is_suspect=True)
                log.warning("the response breaks off: replica %s is lost: %s", backend.url, error)
                if has_length or not reply.headers.get("content-type", "").startswith("text/event-stream"):
                    raise ResponseCutError from None
                sentence = f"the replica {backend.url} was lost while it answered request {request.request_id}"
                if self.backends.closing:
                    sentence = f"{self.backends.closing}, and the answer to request {request.request_id} ends here"
                event = (b"" if last in (b"", b"\n\n") else b"\n\n") + error_event(request, sentence)  # not a part of a half event
                await request.send({"type": "http.response.body", "body": event, "more_body": False})
                return
            last = (last + chunk[-2:])[-2:] if chunk else last
            await request.send({"type": "http.response.body", "body": chunk or b"", "more_body": chunk is not None})
            if chunk is None:
                self.metrics.count("answered")
                return

    async def _broadcast(self, request: RoutedRequest) -> None:
        """Send a request to all replicas. The response names those that have not done it: they
        refuse, fail, are lost or join; those that drain are left out. A request to abort goes to
        these too, and is answered by the replica that has it."""
        is_abort = request.path == "/abort_request"
        asked, missing = self._divide(is_abort=is_abort)
        request = replace(request, headers=[pair for pair in request.headers if pair[0] != b"accept-encoding"])  # responses are read here
        results = await asyncio.gather(*(self._ask(request, backend) for backend in asked), return_exceptions=True)
        failed = [ApiError(502, f"replica {backend.url} is {backend.state}") for backend in missing]
        done, refused = list[ShortReply](), list[tuple[Backend, ShortReply]]()
        for backend, result in zip(asked, results, strict=True):
            if isinstance(result, ApiError):
                failed.append(result)
            elif isinstance(result, BaseException):
                raise result
            elif result.status < 300:
                done.append(result)
            else:
                refused.append((backend, result))
        if not asked:
            why = "".join(f"{error.message}; " for error in failed)
            raise ApiError(503, f"{why}no replica is healthy; try again later", retry_after=RETRY_AFTER)
        needs_one = is_abort and _ABORT_ALL.search(request.body) is None
        is_same = not failed and not done and len({(reply.status, reply.body) for _, reply in refused}) == 1
        if (done and needs_one) or is_same or len(done) == len(asked) + len(missing):
            self.metrics.count("answered")
            await (done[0] if done else refused[0][1]).send(request.send)
            return
        sentences = [f"replica {backend.url} answers {reply.status}: {read_sentence(reply.body)}" for backend, reply in refused]
        sentences += dict.fromkeys(error.message for error in failed)
        sentences.append(f"{len(done)} of {len(asked) + len(missing)} replicas have done it")
        status = failed[0].status if failed and (needs_one or not refused) else max(refused[0][1].status, FAILED)
        raise ApiError(status, "; ".join(sentences), retry_after=RETRY_AFTER if status in REFUSED else None)

    def _divide(self, *, is_abort: bool) -> tuple[list[Backend], list[Backend]]:
        """-> (the replicas that get a request for all, those that should and cannot)."""
        asked, missing = list[Backend](), list[Backend]()
        for backend in self._all:
            runs_requests = backend.state == "draining" or (backend.state == "joining" and backend.outstanding > 0)
            was_up = backend.state == "lost" and backend.check_time >= 0  # its requests may go on
            if backend.is_healthy or backend.is_asleep or (is_abort and runs_requests):
                asked.append(backend)
            elif not backend.is_leaving and (was_up if is_abort else backend.state in ("lost", "joining")):
                missing.append(backend)
        return asked, missing

    async def _ask(self, request: RoutedRequest, backend: Backend) -> ShortReply:
        """One replica's answer to a request for all. Raises ApiError that names the replica,
        DisconnectedError."""
        seconds = STATES_TIME if request.path in STATES else BROADCAST_TIME
        with counted(backend):
            try:
                async with asyncio.timeout(seconds):
                    reply = await self._exchange.open(request, backend)
                    return await self._exchange.wait(request, backend, read_short(reply))
            except TimeoutError:
                raise ApiError(504, f"replica {backend.url} did not answer within {seconds:g} s") from None
            except (LostError, httpx.HTTPError, OSError) as error:
                raise ApiError(502, f"replica {backend.url} is lost: {find_reason(error)}") from None


async def _wait_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(send: Any, status: int, body: bytes, content_type: bytes = b"application/json", *, retry: bool = False) -> None:
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    if retry:
        headers.append((b"retry-after", str(RETRY_AFTER).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
