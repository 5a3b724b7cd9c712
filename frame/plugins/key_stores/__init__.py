"""Manifest of the in-tree key stores: records only. Must not import the plugins."""

from __future__ import annotations

from pydantic import Field

from frame.interfaces.keys import KeyStoreCapabilities
from frame.registration import KindRegistry, PluginOptions, hookimpl


class IntrospectionOptions(PluginOptions):
    """Settings of `http`.

    `url`: the introspection endpoint. `authorization_file`: a file with the value of the header
    `Authorization` that it wants. `tenant_field`: the field of a response that names the account.
    `user_scope`, `admin_scope`: scopes that a token needs for users' and for operators' routes; "":
    none is needed, and no token is an operator's. `cache_seconds`: how long a response is used, and
    a revoked token may still be accepted. `tenants`: how many accounts share the server."""

    url: str = ""
    authorization_file: str | None = None
    tenant_field: str = "sub"
    user_scope: str = ""
    admin_scope: str = ""
    cache_seconds: float = Field(60.0, ge=0, le=3600)
    timeout: float = Field(5.0, gt=0, le=30)
    max_cached: int = Field(10_000, ge=1, le=1_000_000)
    tenants: int = Field(16, ge=1)


@hookimpl
def register_key_stores(registry: KindRegistry) -> None:
    """Add the in-tree key stores."""
    registry.add(
        "file",
        "frame.plugins.key_stores.file:FileKeyStore",
        capabilities=KeyStoreCapabilities(reads_settings=True),
        summary="The keys of server.api_key and of the file server.api_keys.",
    )
    registry.add(
        "http",
        "frame.plugins.key_stores.http:IntrospectionKeyStore",
        capabilities=KeyStoreCapabilities(has_operators=True),
        options=IntrospectionOptions,
        rank=-1,
        summary="OAuth 2.0 token introspection (RFC 7662) at a URL.",
    )
