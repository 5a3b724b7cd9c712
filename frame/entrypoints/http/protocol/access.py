"""`Gate`: checks whether a request may use a route of an access level, and returns its tenant.
`AdminGuard`: checks that a request comes from an operator.

Used by the application after a route has matched, and by the gRPC service for its operators'
methods. Must not depend on a route or a path.
"""

from __future__ import annotations

from collections.abc import Sequence

from frame.config.server_sections import ServerSection
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.api_route import Access
from frame.entrypoints.http.request_context import Scope
from frame.entrypoints.keys import KeyRing, load_keys, ring_of
from frame.entrypoints.origin import Cors, why_foreign


class AdminGuard:
    """Who may use operators' routes. `is_dedicated`: it serves nothing else."""

    def __init__(self, server: ServerSection, is_dedicated: bool) -> None:
        has_listener = server.admin_port is not None or server.admin_socket is not None
        self._is_elsewhere = has_listener and not is_dedicated
        self._keys: KeyRing | None = None if server.admin_key is None else ring_of(server.admin_key, "server.admin_key")
        self._is_open = server.admin_key is None and (is_dedicated or load_keys(server) is None)

    def opens(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether the request brings the admin key."""
        return self._keys is not None and self._keys.tenant(headers) is not None

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raise ApiError unless the request may go on."""
        if self._is_elsewhere:
            raise ApiError(403, "this route is for operators and is served on the admin listener only", code="admin_only")
        if self._is_open:
            return
        if self._keys is None:
            remedy = "serve with --admin-port, --admin-socket or --admin-key"
            raise ApiError(403, f"this route is for operators, and users' keys do not open it; {remedy}", code="admin_only")
        if not self.opens(headers):
            raise _unauthorized("this route needs the admin key; send Authorization: Bearer KEY", "invalid_admin_key")


class Gate:
    """The access check of one listener. `is_admin`: the listener is the operators' own, where
    users' keys mean nothing. `cors`: the origins whose pages may use routes that are not the
    operators'."""

    def __init__(self, server: ServerSection, is_admin: bool, cors: Cors | None = None) -> None:
        self._cors = cors
        self.keys = None if is_admin else load_keys(server)
        self._admin = AdminGuard(server, is_admin)
        self._is_admin = is_admin
        self._is_open_to_all = server.insecure
        self._shares_cache = server.share_cache
        self._has_operators_listener = server.admin_port is not None or server.admin_socket is not None

    def admit(self, scope: Scope, access: Access) -> str:
        """The request's tenant, "" without keys. Raises ApiError unless it may go on."""
        headers = scope["headers"]
        if self.keys is None:
            self._check_origin(scope, access)
            if access in (Access.OWN, Access.ADMIN) or (self._is_admin and access is not Access.OPEN):
                self._admin.check(headers)
            return ""
        if access is Access.OPEN:
            return ""
        if access is Access.USER or (access is Access.OWN and not self._admin.opens(headers)):
            tenant = self.keys.tenant(headers)
            if tenant is None:
                raise _no_key()
            return tenant
        if not self._admin.opens(headers) and self.keys.tenant(headers) is None:
            raise _no_key()  # a client without a key cannot find out which paths exist
        self._admin.check(headers)
        self._check_origin(scope, access)
        return ""

    @property
    def hides_totals(self) -> bool:
        """Whether totals of all requests would tell the holder of a key about those of others."""
        return self.keys is not None and len(self.keys) > 1 and not self._shares_cache

    def check_totals(self) -> None:
        """Raise ApiError 403 where totals are hidden and operators read them on their own
        listener."""
        if self.hides_totals and self._has_operators_listener:
            sentence = "several keys share this server, so totals of all requests are on the admin listener only"
            raise ApiError(403, sentence, code="admin_only")

    def _check_origin(self, scope: Scope, access: Access) -> None:
        """Without keys, no browser may be made to act for a foreign page."""
        is_shared = self._cors is not None and access in (Access.OPEN, Access.USER) and self._cors.allows(scope["headers"])
        is_safe = is_shared or self._is_open_to_all or _is_unix(scope) or self._admin.opens(scope["headers"])
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
