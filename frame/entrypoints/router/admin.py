"""The router's admin listener: `GET`, `POST` and `DELETE /replicas`.

It has an address and a key of its own, so that clients cannot reach it. Used by `frame router
--admin-port`. Must not know a request of a client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from frame.core.errors import ConfigError
from frame.entrypoints.http.errors import ApiError, DisconnectedError
from frame.entrypoints.http.protocol.bodies import Bodies
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.keys import AdminKey
from frame.entrypoints.logs import request_id_of
from frame.entrypoints.router.discovery import MAX_REPLICAS, check_url
from frame.entrypoints.router.replicas import OPERATOR, Backends

MAX_BODY = 16 * 1024  # bytes
PAUSE = 10.0  # seconds between two pieces of a body


class _Replica(msgspec.Struct, forbid_unknown_fields=True):
    url: str


class AdminApp:
    """The listener's ASGI application."""

    def __init__(self, backends: Backends, key: AdminKey) -> None:
        self._backends, self._key = backends, key
        self._bodies = Bodies(64 * MAX_BODY, PAUSE)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        scope["request_id"] = request_id_of(scope["headers"])
        context = RequestContext(scope, receive, send, MAX_BODY, bodies=self._bodies)
        try:
            status, body = await self._run(context)
            await context.respond(msgspec.json.encode(body), status)
        except ApiError as error:
            await context.fail(error)
        except DisconnectedError:
            pass
        finally:
            await context.close()

    async def _run(self, context: RequestContext) -> tuple[int, Any]:
        method, path = context.scope["method"], context.scope["path"].removesuffix("/")
        if not self._key.opens(context.scope["headers"]):
            sentence, challenge = "the admin key is missing or wrong; send Authorization: Bearer KEY", ((b"www-authenticate", b"Bearer"),)
            raise ApiError(401, sentence, code="invalid_admin_key", headers=challenge)
        if path != "/replicas":
            raise ApiError(404, "there is no such path here; use /replicas")
        if method == "GET":
            return 200, {"replicas": self._list()}
        if method not in ("POST", "DELETE"):
            allowed = ((b"allow", b"GET, POST, DELETE"),)
            raise ApiError(405, f"/replicas does not take {method[:20]}; use GET, POST or DELETE", headers=allowed)
        try:
            url = check_url(msgspec.json.decode(await context.body(), type=_Replica).url, "url")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f'the body is not {{"url": "http://HOST:PORT"}}: {error}', "url") from None
        except ConfigError as error:
            raise ApiError(400, str(error), "url") from None
        return self._add(url) if method == "POST" else self._remove(url)

    def _add(self, url: str) -> tuple[int, Any]:
        known = self._backends.find(url)
        if known is None and len(self._backends.all) >= MAX_REPLICAS:
            raise ApiError(409, f"the router has {MAX_REPLICAS} replicas; remove one", "url")
        added = self._backends.add(url, OPERATOR)
        return 200 if added is known else 201, {"url": added.url, "state": added.state}

    def _remove(self, url: str) -> tuple[int, Any]:
        backend = self._backends.find(url)
        if backend is None:
            raise ApiError(404, f"the router has no replica {url}", "url")
        self._backends.remove(backend)
        return 202, {"url": url, "state": backend.state}

    def _list(self) -> list[dict[str, Any]]:
        fields = ("url", "state", "outstanding", "is_suspended")
        return [
            {**{name: getattr(backend, name) for name in fields}, "source": ", ".join(sorted(backend.sources - {""}))}
            for backend in self._backends.all
        ]
