"""The page at `/`: static files of `page_assets`, and what they show as JSON: load, prefix cache,
plugins, configuration. `/openapi.json`, the description of all routes, and `/docs`, its page.

The files hold no secret and need no key; the data do. Nothing is loaded from elsewhere, which the
content security policy enforces.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import Request

from frame.config.resolution.plugins import KEYS
from frame.entrypoints.configuration.explain import as_data, explain_all
from frame.entrypoints.configuration.prepare import Prepared
from frame.entrypoints.configuration.sources import LoadedConfig
from frame.entrypoints.engine_client.client import EngineDeadError
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, without_folders
from frame.entrypoints.http.operations.live_types import History, LiveStatus
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.interfaces.kinds import KINDS

if TYPE_CHECKING:
    from frame.entrypoints.http.operations.live_feed import LiveFeed

public_router = ApiRouter(access=Access.OPEN)
router = ApiRouter(access=Access.USER)

TYPES = {".html": b"text/html; charset=utf-8", ".css": b"text/css", ".js": b"text/javascript", ".svg": b"image/svg+xml"}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none';"
    b" frame-ancestors 'none'"
)
GUARDS = ((b"content-security-policy", POLICY), (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))

CachedRunInfo = declare(
    "CachedRunInfo",
    "parent locks hits age hidden namespace tenant text",
    "A run of the prefix cache. `parent`: its place in the list, -1 for none; `age` in uses of the\n"
    "cache; `groups`: its pages of further cache groups. `tenant` and `text` are empty for the\n"
    "holder of a key.",
    start=int,
    tokens=int,
    groups=dict[str, int],
)
CacheOutline = declare("CacheOutline", "page_size", runs=array(CachedRunInfo))
ServerDescription = declare(
    "ServerDescription",
    "info? plugins? broken? settings?",
    "What the server runs: start information, plugins, plugins that failed to load, settings.",
)


@cache
def _assets() -> dict[str, tuple[bytes, bytes, bytes]]:
    """name -> (content, type, tag)."""
    assets = {}
    for path in (files("frame.entrypoints.http.operations") / "page_assets").iterdir():
        suffix = "." + path.name.rpartition(".")[2]
        if suffix in TYPES:
            content = path.read_bytes()
            assets[path.name] = (content, TYPES[suffix], b'"' + hashlib.sha256(content).hexdigest()[:16].encode() + b'"')
    return assets


@public_router.get("/", responses=responds_with(str, media_type="text/html"))
async def index(context: ContextDep) -> Any:
    """The page for people: a playground, and what the server does and why."""
    await send_asset(context, "index.html")


@public_router.get("/page/{name}", responses=responds_with(str, media_type="*/*"))
async def asset(name: str, context: ContextDep) -> Any:
    """A file of the page."""
    await send_asset(context, name)


async def send_asset(context: RequestContext, name: str) -> None:
    if name not in _assets():
        raise ApiError(404, "the page has no such file; it starts at /")
    content, kind, tag = _assets()[name]
    headers = ((b"content-type", kind), (b"etag", tag), (b"cache-control", b"no-cache"), *GUARDS)
    known = next((value for key, value in context.scope["headers"] if key == b"if-none-match"), b"")
    if known == tag:
        await context.respond(b"", 304, headers)
    else:
        await context.respond(content, headers=headers)


@router.get("/page/live.json", responses=responds_with(LiveStatus))
async def live(context: ContextDep, services: ServicesDep) -> Any:
    """What the server does at this moment. Null for the holder of one of several keys, whom it
    would tell about the requests of others; to no holder of a key does it name requests."""
    feed = _feed(services)
    hides = context.scope["app"].gate.hides_totals
    await context.respond(feed.hide_live() if hides else await feed.read_live(has_names=not context.tenant))


@router.get("/page/history.json", responses=responds_with(History))
async def history(context: ContextDep, services: ServicesDep) -> Any:
    """The last hour in samples of a few seconds; no rows for the holder of one of several keys."""
    feed = _feed(services)
    await context.respond(feed.empty_history if context.scope["app"].gate.hides_totals else feed.read_history())


def _feed(services: Services) -> LiveFeed:
    """Imported and made for the first page."""
    if services.history is None:
        raise ApiError(503, "this server keeps no history", retry_after=RETRY_AFTER)
    if services.feed is None:
        from frame.entrypoints.http.operations.live_feed import LiveFeed

        services.feed = LiveFeed(services, services.history)
    return services.feed


@router.get("/page/cache.json", responses=responds_with(CacheOutline))
async def prefix_cache(context: ContextDep, services: ServicesDep) -> Any:
    """The most recently used runs of the prefix cache. A user's key reads no text of them, since
    prompts belong to their senders."""
    try:
        body = await _feed(services).cache.read_cache(context.tenant)
    except (EngineDeadError, TimeoutError):
        raise ApiError(503, "the engine does not answer", retry_after=RETRY_AFTER) from None
    await context.respond(body)


@router.get("/page/about.json", responses=responds_with(ServerDescription))
async def about(context: ContextDep, services: ServicesDep) -> Any:
    """What runs here and why: fixed from the start on. Settings, which name paths, are not for
    holders of keys."""
    return {**services.about, "settings": []} if context.tenant else services.about


@public_router.get("/docs", responses=responds_with(str, media_type="text/html"))
async def docs(context: ContextDep) -> Any:
    """A page for people that shows the routes and their schemas."""
    await send_asset(context, "docs.html")


@router.get("/openapi.json", responses=responds_with(dict[str, Any]))
async def openapi(request: Request, context: ContextDep) -> Any:
    """This description, as OpenAPI 3.1."""
    await context.respond(await request.app.encode_openapi())


def describe(prepared: Prepared, info: dict[str, Any]) -> dict[str, Any]:
    """The plain data of `/page/about.json`."""
    resolved, registry = prepared.resolved, prepared.registry
    chosen = {(kind, choice.name) for kind, choices in resolved.plugins.items() for choice in choices}
    plugins = [as_data(record) for kind in KINDS for record in registry.records(kind)]
    for plugin in plugins:
        plugin.pop("options")
        plugin["is_chosen"] = (plugin["kind"], plugin["name"]) in chosen
        plugin["rejected"] = resolved.rejected.get(KEYS.get(plugin["kind"], ""), {}).get(plugin["name"], [])
    settings = explain_all(LoadedConfig(resolved.user, prepared.sources), resolved)
    return {
        "info": info,
        "plugins": without_folders(plugins),
        "broken": without_folders([dataclasses.asdict(each) for each in registry.broken]),
        "settings": without_folders([dataclasses.asdict(each) for each in settings]),
    }
