"""Routes for operators that load and unload adapters, with the bodies of vLLM and SGLang. Off
unless adapters are on. Must not depend on the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack
from typing import Any, Literal, TypeVar

from frame.entrypoints.engine_client.adapter_registry import AdapterNameError, AdapterRegistry, UnknownAdapterError
from frame.entrypoints.engine_client.adapter_spool import CONFIG, TENSORS, AdapterUpload
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.http.errors import CLOSE, RETRY_AFTER, ApiError, public, quoted
from frame.entrypoints.http.protocol.api_route import FILE_BODY, SMALL_BODY, Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_body import FormReader, RequestBody
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.response_types import declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.keys import tenant_of
from frame.interfaces.adapter import AdapterError

router = ApiRouter(access=Access.ADMIN)

T = TypeVar("T")
TEXT = (b"content-type", b"text/plain; charset=utf-8")
PARTS = {"config": CONFIG, "tensors": TENSORS}  # fields of an upload
OFF = "this server has no adapters; start it with --enable-lora"

AdapterChange = declare(
    "AdapterChange", "success error_message", "SGLang's shape. `loaded_adapters`: name -> digest.", loaded_adapters=dict[str, str]
)
AdapterUploaded = declare("AdapterUploaded", "success lora_name digest", "`digest`: SHA-256 of configuration and tensors.")


class AdapterBody(RequestBody):
    """`owner`: `sha256:HEX` of the API key whose requests alone may use the adapter; default: all.
    Names are told apart by owner."""

    lora_name: str
    owner: str = ""

    def tenant(self) -> str:
        return read_owner(self.owner)


class LoadBody(AdapterBody):
    """`load_inplace`, of vLLM, changes nothing: a name that is loaded again gets a new version."""

    lora_path: str
    load_inplace: bool = True


class UnloadBody(AdapterBody):
    mode: Literal["drain", "abort"] = "drain"


@router.post("/v1/load_lora_adapter", dependencies=[SMALL_BODY], responses=responds_with(str, media_type="text/plain"))
async def load(request: LoadBody, context: ContextDep, services: ServicesDep) -> Any:
    """Load an adapter from a folder below `adapters.folders`; the answer comes when all engines
    have it."""
    await _load(services, request)
    await _say(context, request.lora_name, "added")


@router.post("/load_lora_adapter", dependencies=[SMALL_BODY], responses=responds_with(AdapterChange))
async def load_as_sglang(request: LoadBody, services: ServicesDep) -> Any:
    """As `/v1/load_lora_adapter`."""
    return _change(await _load(services, request), request.tenant())


@router.post("/v1/unload_lora_adapter", dependencies=[SMALL_BODY], responses=responds_with(str, media_type="text/plain"))
async def unload(request: UnloadBody, context: ContextDep, services: ServicesDep) -> Any:
    """Unload an adapter. With `mode` `drain` its requests end first, with `abort` they are
    aborted."""
    await _unload(services, request)
    await _say(context, request.lora_name, "removed")


@router.post("/unload_lora_adapter", dependencies=[SMALL_BODY], responses=responds_with(AdapterChange))
async def unload_as_sglang(request: UnloadBody, services: ServicesDep) -> Any:
    """As `/v1/unload_lora_adapter`."""
    return _change(await _unload(services, request), request.tenant())


@router.put("/v1/lora_adapters/{name:path}", dependencies=[FILE_BODY], responses=responds_with(AdapterUploaded))
async def upload(name: str, context: ContextDep, services: ServicesDep, owner: str = "") -> Any:
    """Load an adapter from a multipart/form-data body: `config`, the content of
    adapter_config.json, and `tensors`, that of adapter_model.safetensors."""
    try:
        registry = _registry(services)
        if not services.resolved.user.adapters.uploads:
            raise ApiError(403, "this server takes no adapters as bodies; start it with --lora-uploads", code="uploads_off")
        tenant = read_owner(owner)
        return await _attempt(_receive(registry, context, name, tenant), "tensors")
    except ApiError as error:
        error.headers = CLOSE
        raise


async def _receive(registry: AdapterRegistry, context: RequestContext, name: str, tenant: str) -> dict[str, Any]:
    """Load an upload, which is written to disk as it arrives. Raises ApiError, AdapterError."""
    registry.check_name(name, tenant)
    reader, sent = FormReader(context.header(b"content-type") or "", "config and tensors"), set[str]()
    stack = ExitStack()
    try:
        output: AdapterUpload = await asyncio.to_thread(stack.enter_context, registry.spool.open_upload())
        async for piece in context.pieces():
            for part, content in reader.feed(piece):  # the first content of each part is empty
                if part.name not in PARTS or (not content and part.name in sent):
                    why = "is given twice" if part.name in sent else "is unknown"
                    raise ApiError(400, f"the field {quoted(part.name)} {why}; send config and tensors", part.name[:50] or None)
                sent.add(part.name)
                if content:
                    await asyncio.to_thread(output.write, PARTS[part.name], content)
        reader.close()
        if missing := [part for part in PARTS if part not in sent]:
            raise ApiError(400, f"the field {missing[0]} is missing; send config and tensors", missing[0])
        files = await asyncio.to_thread(output.finish)
    finally:
        await asyncio.to_thread(stack.close)  # deletes what was not finished
    named = await registry.load_files(name, files, tenant)
    return {"success": True, "lora_name": name, "digest": named.version.digest}


async def _load(services: Services, request: LoadBody) -> AdapterRegistry:
    registry, folders = _registry(services), services.resolved.user.adapters.folders
    if not folders:
        sentence = "this server reads no folder of adapters; start it with --lora-folders FOLDER"
        raise ApiError(403, sentence, "lora_path", "folders_off")
    if not request.lora_name or not request.lora_path:
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if request.lora_name else "lora_name")
    await _attempt(registry.load_folder(request.lora_name, request.lora_path, request.tenant(), folders))
    return registry


async def _unload(services: Services, request: UnloadBody) -> AdapterRegistry:
    registry, settings = _registry(services), services.resolved.user.adapters
    if not settings.folders and not settings.uploads:
        raise ApiError(403, "this server's adapters are fixed; start it with --lora-folders FOLDER or --lora-uploads", code="loads_off")
    try:
        await registry.unload(request.lora_name, request.tenant(), request.mode == "abort")
    except UnknownAdapterError:
        raise ApiError(404, f"The lora adapter {quoted(request.lora_name)} cannot be found.", "lora_name") from None
    return registry


def _registry(services: Services) -> AdapterRegistry:
    if services.adapters is None:
        raise ApiError(404, OFF)
    return services.adapters


async def _attempt(work: Awaitable[T], field: str = "lora_path") -> T:
    """The result of a load. field: of the request, which names or is the adapter."""
    try:
        return await work
    except AdapterError as error:
        if isinstance(error, AdapterNameError):
            field = "lora_name"
        elif field == "tensors" and str(error).startswith((CONFIG, "peft_type")):
            field = "config"
        raise ApiError(400, public(str(error)), field) from None
    except (EngineDeadError, TimeoutError) as error:
        raise ApiError(503, str(error), retry_after=RETRY_AFTER) from None
    except OSError as error:
        raise ApiError(503, f"the adapter cannot be written: {error.strerror}") from None


def read_owner(owner: str) -> str:
    """The tenant of `sha256:HEX`; "" for "". Raises ApiError."""
    try:
        return tenant_of(owner) if owner else ""
    except ValueError:
        raise ApiError(400, "owner must be sha256: and the 64 hex digits of an API key's SHA-256", "owner") from None


async def _say(context: RequestContext, name: str, done: str) -> None:
    text = f"Success: LoRA adapter '{name}' {done} successfully.".encode()  # as vLLM, whose clients may look at it
    await context.respond(text, headers=(TEXT,))


def _change(registry: AdapterRegistry, tenant: str) -> dict[str, Any]:
    adapters = {named.name: named.version.digest for named in registry.list_adapters(tenant)}
    return {"success": True, "error_message": "", "loaded_adapters": adapters}
