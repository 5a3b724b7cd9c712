"""`IntrospectionKeyStore`: asks an endpoint for each key that is not in its cache (OAuth 2.0 Token
Introspection, RFC 7662). Only a response that says `"active": true` opens the server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import httpx

from frame.core.errors import ConfigurationError
from frame.interfaces.keys import KeyHolder, KeyStore, KeyStoreContext, KeyStoreError, name_tenant
from frame.plugins.key_stores import IntrospectionOptions

MAX_REJECTED_SECONDS = 5.0  # for which a response that says no is used
MAX_CONNECTIONS = 16
MAX_WAITING = 256  # keys that are being asked for, or wait for a connection
MAX_RESPONSE = 64 * 1024  # bytes


class IntrospectionKeyStore(KeyStore):
    """Responses are cached by a digest of the key, until `cache_seconds` or the token's `exp`.
    Several requests with one key share one call."""

    def __init__(self, context: KeyStoreContext, options: IntrospectionOptions | None = None) -> None:
        super().__init__(context, options)
        self._options = options = options or IntrospectionOptions()
        if not options.url.startswith(("https://", "http://")):
            raise ConfigurationError(
                f"plugins.options: key_store/http.url is {options.url!r}; give the URL of an introspection endpoint, such as "
                "https://login.example.org/introspect"
            )
        headers = {"accept": "application/json"} | _read_authorization(options.authorization_file)
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
        self._client = httpx.AsyncClient(headers=headers, timeout=options.timeout, limits=limits, follow_redirects=False, trust_env=False)
        self._cached: OrderedDict[bytes, tuple[float, KeyHolder | None]] = OrderedDict()  # by digest: until when, of whom
        self._calls: dict[bytes, asyncio.Task[KeyHolder | None]] = {}

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        if not key.isascii():
            return None  # tokens are ASCII
        digest = hashlib.sha256(key).digest()
        until, holder = self._cached.get(digest, (0.0, None))
        if until > time.monotonic():
            self._cached.move_to_end(digest)
            return holder
        call = self._calls.get(digest)
        if call is None:
            if len(self._calls) >= MAX_WAITING:
                raise KeyStoreError(f"{MAX_WAITING} keys are being asked for at {self._options.url}")
            call = self._calls[digest] = asyncio.create_task(self._introspect(key, digest))
            call.add_done_callback(lambda done: self._forget_call(digest, done))
        try:
            return await asyncio.shield(call)  # another request may wait for it as well
        except asyncio.CancelledError:
            if call.cancelled():  # by `close`
                raise KeyStoreError("the key store was closed") from None
            raise

    def _forget_call(self, digest: bytes, call: asyncio.Task[KeyHolder | None]) -> None:
        self._calls.pop(digest, None)
        if not call.cancelled():
            call.exception()  # of requests that are gone, it is not logged

    async def _introspect(self, key: bytes, digest: bytes) -> KeyHolder | None:
        """Ask for a key, and remember the response. Raises KeyStoreError."""
        options = self._options
        try:
            async with (
                asyncio.timeout(options.timeout),
                self._client.stream("POST", options.url, data={"token": key.decode("ascii"), "token_type_hint": "access_token"}) as reply,
            ):
                if reply.status_code != httpx.codes.OK:
                    raise KeyStoreError(f"{options.url} answered with the status {reply.status_code}")
                body = b""
                async for piece in reply.aiter_bytes():
                    body += piece
                    if len(body) > MAX_RESPONSE:
                        raise KeyStoreError(f"{options.url} answered with more than {MAX_RESPONSE} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise KeyStoreError(f"{options.url} cannot be asked: {type(error).__name__} {error}") from error
        holder, seconds = self._read(body)
        self._cached.pop(digest, None)
        if seconds > 0:
            self._cached[digest] = (time.monotonic() + seconds, holder)
            while len(self._cached) > options.max_cached:
                self._cached.popitem(last=False)
        return holder

    def _read(self, body: bytes) -> tuple[KeyHolder | None, float]:
        """The holder, and for how many seconds this holds. Raises KeyStoreError."""
        options = self._options
        try:
            told: Any = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise KeyStoreError(f"{options.url} answered with no JSON") from error
        if not isinstance(told, dict) or not isinstance(told.get("active"), bool):
            raise KeyStoreError(f"{options.url} answered without the field `active`")
        seconds, rejected = options.cache_seconds, (None, min(options.cache_seconds, MAX_REJECTED_SECONDS))
        if not told["active"]:
            return rejected
        if (expiry := told.get("exp")) is not None:
            if not isinstance(expiry, (int, float)):
                raise KeyStoreError(f"{options.url} answered with an `exp` that is no number")
            seconds = min(seconds, expiry - time.time())
            if seconds < 0 or seconds != seconds:
                return rejected
        sent = told.get("scope")
        scopes = sent.split() if isinstance(sent, str) else ()
        is_operator = bool(options.admin_scope) and options.admin_scope in scopes
        if options.user_scope and options.user_scope not in scopes and not is_operator:
            return rejected
        account = told.get(options.tenant_field)
        if not isinstance(account, str) or not account:
            raise KeyStoreError(f"{options.url} answered without a text in `{options.tenant_field}`, the tenant_field of key_store/http")
        digest = hashlib.sha256(account.encode("utf-8", "surrogatepass")).digest()
        return KeyHolder(name_tenant(digest), is_operator), seconds

    def count_tenants(self) -> int:
        return self._options.tenants

    async def close(self) -> None:
        for call in [*self._calls.values()]:
            call.cancel()
        await self._client.aclose()


def _read_authorization(file: str | None) -> dict[str, str]:
    if file is None:
        return {}
    try:
        text = Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"plugins.options: key_store/http.authorization_file {file} cannot be read ({error}); give a file with the value of the header"
        ) from error
    if not text.isprintable() or not text:
        raise ConfigurationError(f"plugins.options: key_store/http.authorization_file {file} has more or less than one line of text")
    return {"authorization": text}
