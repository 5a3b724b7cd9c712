"""`/v1/conversations`: OpenAI's conversations, which are stored beside the responses and within the same bounds. Knows no engine."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.openai.items import item_of, list_of, page_of, stored_items
from frame.entrypoints.http.openai.response_store import Stored
from frame.entrypoints.http.openai.responses import NOTHING_STORED, stored_of
from frame.entrypoints.http.openai.responses_schema import messages_of
from frame.entrypoints.http.request_context import Call
from frame.entrypoints.http.request_options import Metadata
from frame.entrypoints.http.services import Access, Operation, Routes, Services

MOST_ADDED = 20  # items of one request
_encode = msgspec.json.encode


class ConversationRequest(msgspec.Struct, kw_only=True):
    items: list[dict[str, Any]] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(msgspec.Struct, kw_only=True):
    metadata: Metadata | None


class ItemsRequest(msgspec.Struct, kw_only=True):
    items: list[dict[str, Any]]


_create_decoder = msgspec.json.Decoder(ConversationRequest)
_update_decoder = msgspec.json.Decoder(ConversationUpdate)
_items_decoder = msgspec.json.Decoder(ItemsRequest)


async def create(call: Call, services: Services) -> None:
    """A new conversation, with its first items."""
    request = await call.json(_create_decoder, empty=ConversationRequest())
    if not services.responses.is_on:
        raise ApiError(400, f"a conversation has to be stored; {NOTHING_STORED}")
    name = f"conv_{uuid.uuid4().hex}"
    body = {"id": name, "object": "conversation", "created_at": int(time.time()), "metadata": request.metadata or {}}
    _store(call, services, name, _encode(body), _new_items(request.items or [], name))
    await call.respond_json(body)


async def retrieve(call: Call, services: Services) -> None:
    """A conversation, without its items."""
    await call.respond(_stored(call, services).body)


async def update(call: Call, services: Services) -> None:
    """Replace a conversation's metadata."""
    request = await call.json(_update_decoder)
    stored = _stored(call, services)
    body = msgspec.json.decode(stored.body) | {"metadata": request.metadata or {}}
    _store(call, services, body["id"], _encode(body), stored.conversation())
    await call.respond_json(body)


async def delete(call: Call, services: Services) -> None:
    """Forget a conversation; responses of it stay."""
    _stored(call, services)
    name = call.scope["path_params"]["name"]
    services.responses.delete(name, call.tenant)
    await call.respond_json({"id": name, "object": "conversation.deleted", "deleted": True})


async def add_items(call: Call, services: Services) -> None:
    """Append items to a conversation."""
    request = await call.json(_items_decoder)
    stored = _stored(call, services)
    name = call.scope["path_params"]["name"]
    new = _new_items(request.items, name)
    _store(call, services, name, stored.body, [*stored.conversation(), *new])
    await call.respond_json(list_of(new))


async def items(call: Call, services: Services) -> None:
    """The items of a conversation, page by page."""
    await call.respond_json(page_of(call, _stored(call, services).conversation()))


async def item(call: Call, services: Services) -> None:
    """One item of a conversation."""
    await call.respond_json(_item(call, _stored(call, services).conversation()))


async def delete_item(call: Call, services: Services) -> None:
    """Remove an item from a conversation."""
    stored = _stored(call, services)
    found = stored.conversation()
    gone = _item(call, found)
    _store(call, services, call.scope["path_params"]["name"], stored.body, [each for each in found if each is not gone])
    await call.respond(stored.body)


def _new_items(given: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Items as they are stored. Raises ApiError for those that no request could use."""
    if len(given) > MOST_ADDED:
        raise ApiError(400, f"items has {len(given)} entries; at most {MOST_ADDED} are added at once", "items")
    messages_of(given, "items")
    return stored_items(given, name, f"{uuid.uuid4().hex[:8]}_")


def _store(call: Call, services: Services, name: str, body: bytes, found: list[dict[str, Any]]) -> None:
    """Raise ApiError where the conversation is larger than a key may store."""
    data = _encode(found)
    if not services.responses.fits(call.tenant, body, data):
        sentence = f"the conversation would have {len(data)} bytes, more than this key may store or a request may bring; delete items"
        raise ApiError(413, sentence, "items")
    services.responses.put(name, call.tenant, body, data)


def _stored(call: Call, services: Services) -> Stored:
    return stored_of(call, services, call.scope["path_params"]["name"], "conversation_id")


def _item(call: Call, found: list[dict[str, Any]]) -> dict[str, Any]:
    name = call.scope["path_params"]["item"]
    each = item_of(found, name)
    if each is None:
        raise ApiError(404, f"there is no item {name[:100]!r} in this conversation", "item_id")
    return each


ROUTES: Routes = (
    Operation("/v1/conversations", ("POST",), Access.USER, create, ConversationRequest),
    Operation("/v1/conversations/{name}", ("GET",), Access.USER, retrieve),
    Operation("/v1/conversations/{name}", ("POST",), Access.USER, update, ConversationUpdate, body="small"),
    Operation("/v1/conversations/{name}", ("DELETE",), Access.USER, delete),
    Operation("/v1/conversations/{name}/items", ("POST",), Access.USER, add_items, ItemsRequest),
    Operation("/v1/conversations/{name}/items", ("GET",), Access.USER, items, query=("limit", "order", "after")),
    Operation("/v1/conversations/{name}/items/{item}", ("GET",), Access.USER, item),
    Operation("/v1/conversations/{name}/items/{item}", ("DELETE",), Access.USER, delete_item),
)
