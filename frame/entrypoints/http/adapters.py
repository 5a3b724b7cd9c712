"""Which adapters a request asks for, and that engines have them when it starts. Used by
`request_starter`. Must not depend on a dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from frame.entrypoints.engine_client.adapter_registry import UnknownAdapterError
from frame.entrypoints.engine_client.adapter_spool import AdapterUse
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.request_body import RequestOptions
from frame.entrypoints.http.services import Services
from frame.interfaces.adapter import AdapterError

OFF = "this server has no adapters; leave lora_path out, or start the server with --enable-lora"


def choose_adapters(services: Services, tenant: str, options: RequestOptions, count: int) -> Sequence[str]:
    """The name of the adapter of each of `count` prompts, "" for none: of `lora_path`, else of
    `model`. Raises ApiError."""
    model = getattr(options, "model", "")
    if services.adapters is not None:
        services.check_model(model, tenant)  # again: an adapter that was unloaded meanwhile is not the base model
    name = services.adapter_of(model, tenant) or ""
    sent = options.lora_path
    if not sent:
        return [name] * count
    if services.adapters is None:
        raise ApiError(400, OFF, "lora_path")
    names = [sent] * count if isinstance(sent, str) else [each or "" for each in sent]
    if len(names) != count:
        raise ApiError(400, f"there are {count} prompts but {len(names)} lora_path; send one name, or one for each prompt", "lora_path")
    for each in dict.fromkeys(filter(None, names)):
        if services.adapters.find(each, tenant) is None:
            raise unknown_adapter(each)
    if name and set(names) != {name}:
        raise ApiError(400, "model and lora_path name different adapters; send one of them", "lora_path")
    return names


def unknown_adapter(name: str) -> ApiError:
    return ApiError(404, f"the adapter {quoted(name)} does not exist; /v1/models lists what there is", "lora_path", "model_not_found")


@asynccontextmanager
async def hold_adapters(services: Services, tenant: str, names: Sequence[str], seconds: float) -> AsyncIterator[Mapping[str, AdapterUse]]:
    """The versions of these names, in the engines' host memory during the block; sequences that
    start in it keep them there. Raises ApiError."""
    distinct = dict.fromkeys(filter(None, names))
    if services.adapters is None or not distinct:
        yield {}
        return
    try:
        async with asyncio.timeout(seconds):
            uses = await services.adapters.acquire(distinct, tenant)
    except UnknownAdapterError as error:  # unloaded meanwhile
        raise unknown_adapter(str(error)) from None
    except AdapterError as error:
        raise ApiError(500, f"the adapter cannot be used: {error}", code="adapter_failed") from None
    except TimeoutError:
        raise ApiError(504, f"no adapter gave its room in host memory within {seconds:g} s", code="deadline_exceeded") from None
    try:
        yield uses
    finally:
        for use in uses.values():
            use.version.release()
