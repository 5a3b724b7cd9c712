"""The routes of OpenAI's `/v1/conversations`; the store and bounds are those of responses. Must not
depend on the engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.openai.response_objects import ItemList, StoredItem
from frame.entrypoints.http.openai.responses import NOTHING_STORED, find_conversation
from frame.entrypoints.http.openai.responses_schema import ITEMS, find_item, make_list, make_page, messages_of, to_stored_items
from frame.entrypoints.http.protocol.api_route import SMALL_BODY, Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.protocol.fields import Shape
from frame.entrypoints.http.request_body import Metadata, RequestBody
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.response_types import declare
from frame.entrypoints.http.services import Services

router = ApiRouter(access=Access.USER)

MAX_ADDED = 20  # items of one request
_encode = msgspec.json.encode

Conversation = declare("Conversation", "id created_at metadata", object="conversation")
DeletedConversation = declare("DeletedConversation", "id deleted", object="conversation.deleted")


class ConversationRequest(RequestBody):
    NESTED: ClassVar[Mapping[str, Shape]] = ITEMS

    items: list[dict[str, Any]] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(RequestBody):
    metadata: Metadata | None


class ItemsRequest(RequestBody):
    NESTED: ClassVar[Mapping[str, Shape]] = ITEMS

    items: list[dict[str, Any]]


@router.post("/v1/conversations", responses=responds_with(Conversation))
async def create(context: ContextDep, services: ServicesDep, request: ConversationRequest | None = None) -> Any:
    """Create a conversation with its first items."""
    request = request or ConversationRequest()
    if not services.responses.is_on:
        raise ApiError(400, f"a conversation must be stored; {NOTHING_STORED}")
    name = f"conv_{uuid.uuid4().hex}"
    body = {"id": name, "object": "conversation", "created_at": int(time.time()), "metadata": request.metadata or {}}
    _store(context, services, name, _encode(body), _new_items(request.items or [], name))
    return body


@router.get("/v1/conversations/{name}", responses=responds_with(Conversation))
async def retrieve(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Retrieve a conversation without its items."""
    await context.respond(find_conversation(context, services, name).body)


@router.post("/v1/conversations/{name}", dependencies=[SMALL_BODY], responses=responds_with(Conversation))
async def update(name: str, request: ConversationUpdate, context: ContextDep, services: ServicesDep) -> Any:
    """Replace a conversation's metadata."""
    stored = find_conversation(context, services, name)
    body = msgspec.json.decode(stored.body) | {"metadata": request.metadata or {}}
    _store(context, services, body["id"], _encode(body), stored.decode_items())
    return body


@router.delete("/v1/conversations/{name}", responses=responds_with(DeletedConversation))
async def delete(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Delete a conversation. Its responses stay."""
    find_conversation(context, services, name)
    services.responses.delete(name, context.tenant)
    return {"id": name, "object": "conversation.deleted", "deleted": True}


@router.post("/v1/conversations/{name}/items", responses=responds_with(ItemList))
async def add_items(request: ItemsRequest, name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Append items to a conversation."""
    stored = find_conversation(context, services, name)
    new = _new_items(request.items, name)
    _store(context, services, name, stored.body, [*stored.decode_items(), *new])
    return make_list(new)


@router.get("/v1/conversations/{name}/items", responses=responds_with(ItemList))
async def items(name: str, context: ContextDep, services: ServicesDep, limit: str = "20", order: str = "desc", after: str = "") -> Any:
    """List the items of a conversation, in pages."""
    return make_page(find_conversation(context, services, name).decode_items(), limit, order, after)


@router.get("/v1/conversations/{name}/items/{item}", responses=responds_with(StoredItem))
async def get_item(name: str, item: str, context: ContextDep, services: ServicesDep) -> Any:
    """Retrieve an item of a conversation."""
    return _item(find_conversation(context, services, name).decode_items(), item)


@router.delete("/v1/conversations/{name}/items/{item}", responses=responds_with(Conversation))
async def delete_item(name: str, item: str, context: ContextDep, services: ServicesDep) -> Any:
    """Delete an item of a conversation."""
    stored = find_conversation(context, services, name)
    items = stored.decode_items()
    gone = _item(items, item)
    _store(context, services, name, stored.body, [each for each in items if each is not gone])
    await context.respond(stored.body)


def _new_items(items: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Items in stored form. Raises ApiError 400 for items that no request could use."""
    if len(items) > MAX_ADDED:
        raise ApiError(400, f"items has {len(items)} entries; send at most {MAX_ADDED} at once", "items")
    messages_of(items, "items")
    return to_stored_items(items, name, f"{uuid.uuid4().hex[:8]}_")


def _store(context: RequestContext, services: Services, name: str, body: bytes, items: list[dict[str, Any]]) -> None:
    """Store a conversation. Raises ApiError 413 if it is larger than a key may store."""
    data = _encode(items)
    if not services.responses.fits(context.tenant, body, data):
        sentence = f"the items of the conversation would have {len(data)} bytes, more than one entry may have; delete items"
        raise ApiError(413, sentence, "items")
    services.responses.put(name, context.tenant, body, data)


def _item(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    each = find_item(items, name)
    if each is None:
        raise ApiError(404, f"there is no item {name[:100]!r} in this conversation", "item_id")
    return each
