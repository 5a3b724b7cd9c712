"""`Gate`: checks whether a request may use a route of an access level, and returns its tenant.
`AdminGuard`: checks that a request comes from an operator. `find_holder` asks the key store.

Used by the application after a route has matched, and by the gRPC service for its operators'
methods. Must not depend on a route or a path.
"""

from __future__ import annotations

import asyncio
import logging

from frame.config.server_sections import ServerSection
from frame.core.blame import explain
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError
from frame.entrypoints.http.protocol.api_route import Access
from frame.entrypoints.http.request_context import Scope
from frame.entrypoints.keys import AdminKey, Headers, KeyAccess
from frame.entrypoints.origin import Cors, why_foreign
from frame.interfaces.keys import KeyHolder, KeyStoreError

log = logging.getLogger(__name__)

KEY_TIMEOUT = 60.0  # seconds for which a key store may look for a key


class AdminGuard:
    """Who may use operators' routes. `is_dedicated`: it serves nothing else. `has_keys`: users have
    keys."""

    def __init__(self, server: ServerSection, is_dedicated: bool, has_keys: bool) -> None:
        has_listener = server.admin_port is not None or server.admin_socket is not None
        self._is_elsewhere = has_listener and not is_dedicated
        self._key = None if server.admin_key is None else AdminKey(server.admin_key)
        self._is_open = server.admin_key is None and (is_dedicated or not has_keys)

    def opens(self, headers: Headers, holder: KeyHolder | None = None) -> bool:
        """Whether the request brings the admin key, or is of a holder who is an operator."""
        return (self._key is not None and self._key.opens(headers)) or (holder is not None and holder.is_operator)

    def check(self, headers: Headers, holder: KeyHolder | None = None) -> None:
        """Raise ApiError unless the request may go on."""
        if self._is_elsewhere:
            raise ApiError(403, "this route is for operators and is served on the admin listener only", code="admin_only")
        if self._is_open or self.opens(headers, holder):
            return
        if self._key is None:
            remedy = "serve with --admin-port, --admin-socket or --admin-key"
            raise ApiError(403, f"this route is for operators, and users' keys do not open it; {remedy}", code="admin_only")
        raise _unauthorized("this route needs the admin key; send Authorization: Bearer KEY", "invalid_admin_key")


async def find_holder(keys: KeyAccess, headers: Headers) -> KeyHolder | None:
    """The holder of a request's key. Raises ApiError 503 where it cannot be known: a server whose
    key store fails opens to no request."""
    try:
        async with asyncio.timeout(KEY_TIMEOUT):
            return await keys.find_holder(headers)
    except Exception as error:  # a plugin may raise anything
        sentence = str(error) if isinstance(error, KeyStoreError) else explain(error)
        log.warning("a key cannot be checked: %s", sentence or type(error).__name__)
        raise ApiError(503, "API keys cannot be checked at the moment; try again later", retry_after=RETRY_AFTER) from error


class Gate:
    """The access check of one listener. `keys`: of users. `is_admin`: the listener is the
    operators' own, where users' keys mean nothing. `cors`: the origins whose pages may use routes
    that are not the operators'."""

    def __init__(self, server: ServerSection, keys: KeyAccess | None, is_admin: bool, cors: Cors | None = None) -> None:
        self._cors = cors
        self._keys = None if is_admin else keys
        self._admin = AdminGuard(server, is_admin, keys is not None)
        self._is_admin = is_admin
        self._is_open_to_all = server.insecure
        self._shares_cache = server.share_cache
        self._has_operators_listener = server.admin_port is not None or server.admin_socket is not None

    async def identify(self, scope: Scope) -> None:
        """Set the scope's `holder` from the request's key, for `admit`. Raises ApiError 503."""
        scope["holder"] = None if self._keys is None else await find_holder(self._keys, scope["headers"])

    def admit(self, scope: Scope, access: Access) -> str:
        """The request's tenant, "" without keys. Raises ApiError unless it may go on."""
        headers = scope["headers"]
        if self._keys is None:
            self._check_origin(scope, access)
            if access in (Access.OWN, Access.ADMIN) or (self._is_admin and access is not Access.OPEN):
                self._admin.check(headers)
            return ""
        if access is Access.OPEN:
            return ""
        holder: KeyHolder | None = scope["holder"]
        if access is Access.USER or (access is Access.OWN and not self._admin.opens(headers, holder)):
            if holder is None:
                raise _no_key()
            return holder.tenant
        if not self._admin.opens(headers) and holder is None:
            raise _no_key()  # a client without a key cannot find out which paths exist
        self._admin.check(headers, holder)
        self._check_origin(scope, access)
        return ""

    @property
    def hides_totals(self) -> bool:
        """Whether totals of all requests would tell the holder of a key about those of others."""
        return self._keys is not None and self._keys.num_tenants > 1 and not self._shares_cache

    def check_totals(self) -> None:
        """Raise ApiError 403 where totals are hidden and operators read them on their own
        listener."""
        if self.hides_totals and self._has_operators_listener:
            sentence = "several keys share this server, so totals of all requests are on the admin listener only"
            raise ApiError(403, sentence, code="admin_only")

    def _check_origin(self, scope: Scope, access: Access) -> None:
        """Without keys, no browser may be made to act for a foreign page."""
        is_shared = self._cors is not None and access in (Access.OPEN, Access.USER) and self._cors.allows(scope["headers"])
        is_safe = is_shared or self._is_open_to_all or _is_unix(scope) or self._admin.opens(scope["headers"], scope.get("holder"))
        sentence = None if is_safe else why_foreign(scope["headers"])
        if sentence is not None:
            raise ApiError(403, sentence)


def _is_unix(scope: Scope) -> bool:
    """Whether the request came over a Unix socket, which no browser reaches."""
    server = scope.get("server")
    return server is not None and server[1] is None


def _no_key() -> ApiError:
    return _unauthorized("the API key is missing or wrong; send Authorization: Bearer KEY or x-api-key: KEY", "invalid_api_key")


def _unauthorized(sentence: str, code: str) -> ApiError:
    return ApiError(401, sentence, code=code, headers=((b"www-authenticate", b"Bearer"),))
