"""The page at `/`: static files of `page_assets`, and what they show as JSON: load, prefix cache,
plugins, configuration. `/openapi.json`, the description of all routes, and `/docs`, its page.

The files hold no secret and need no key; the data do. Nothing is loaded from elsewhere, which the
content security policy enforces.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import Request

from frame.config.resolve_plugins import KEYS
from frame.core.interfaces.kinds import KINDS
from frame.entrypoints.configuration.explain import as_data, explain_all
from frame.entrypoints.configuration.prepare import Prepared
from frame.entrypoints.configuration.sources import LoadedConfig
from frame.entrypoints.engine_client.client import EngineDeadError
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, without_folders
from frame.entrypoints.http.operations.admin import EngineLoad
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.response_types import array, declare

public_router = ApiRouter(access=Access.OPEN)
router = ApiRouter(access=Access.USER)

TYPES = {".html": b"text/html; charset=utf-8", ".css": b"text/css", ".js": b"text/javascript", ".svg": b"image/svg+xml"}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none';"
    b" frame-ancestors 'none'"
)
GUARDS = ((b"content-security-policy", POLICY), (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
CACHE_RUNS = 300  # nodes of the prefix cache that are drawn

LiveLoad = declare("LiveLoad", "device_memory", base=EngineLoad)
LiveStatus = declare(
    "LiveStatus",
    "time problem",
    "`time` in seconds since the epoch. `finished`: number of sequences by finish reason.\n"
    "All but the first two are null for the holder of one of several keys.",
    load=LiveLoad | None,
    **dict.fromkeys(("outstanding", "prompt_tokens", "cached_tokens", "generated_tokens", "rejected"), int | None),
    finished=dict[str, int] | None,
)
CachedRunInfo = declare(
    "CachedRunInfo",
    "parent locks hits age hidden namespace text",
    "A run of the prefix cache. `parent`: its place in the list, -1 for none; `age` in uses of the\n"
    "cache; `groups`: its pages of further cache groups.",
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
    """Gauges and counters of this moment; the page makes rates of them. Null for the holder of one
    of several keys, whom they would tell about the requests of others."""
    client, load = services.client, services.client.load
    if context.scope["app"].gate.hides_totals:
        return {**dict.fromkeys(LiveStatus.__annotations__), "time": time.time(), "problem": client.dead_reason}
    stats = client.stats
    return {
        "time": time.time(),
        "problem": client.dead_reason,
        "outstanding": client.num_outstanding,
        "load": None if load is None else {name: getattr(load, name) for name in load.__struct_fields__ if name != "process"},
        **{name: getattr(stats, name) for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "rejected", "finished")},
    }


@router.get("/page/cache.json", responses=responds_with(CacheOutline))
async def prefix_cache(context: ContextDep, services: ServicesDep) -> Any:
    """The most recently used runs of the prefix cache. A user's key reads no text of them, since
    prompts belong to their senders."""
    try:
        reply = await services.client.send_command("outline_cache", limit=CACHE_RUNS)
    except (EngineDeadError, TimeoutError):
        raise ApiError(503, "the engine does not answer", retry_after=RETRY_AFTER) from None
    tenant = context.tenant
    has_text = services.tokenizer is not None and not tenant
    reply.data["runs"] = [run for run in reply.data["runs"] if run["namespace"].startswith(tenant)]  # a tenant reads its own runs only
    names = {name: place for place, name in enumerate(dict.fromkeys(run["namespace"] for run in reply.data["runs"]))}
    for run in reply.data["runs"]:
        first = run.pop("first_ids")
        run["namespace"] = names[run["namespace"]]
        run["text"] = services.need_tokenizer().decode(first, False) if has_text else ""
    return reply.data


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
