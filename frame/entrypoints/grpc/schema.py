"""The messages of `frame.proto`: classes created at run time from its compiled description, so that
any protobuf version works. Converts messages to plain values and back. Must not know an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from frame.core.messages import Finish, TokenLogprobs
from frame.entrypoints.http.chat.media_parts import MODALITIES, check_url
from frame.entrypoints.http.chat.request_media import Chat
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.protocol.bodies import MAX_MESSAGES
from frame.entrypoints.media.media_service import MediaPart

DESCRIPTION = "frame.binpb"
PACKAGE = "frame.v1"
SERVICE = f"{PACKAGE}.Frame"


class Schema:
    """Message classes by name (`schema["GenerateReply"]`). They are in protobuf's default pool,
    where server reflection looks them up."""

    def __init__(self) -> None:
        description = descriptor_pb2.FileDescriptorSet.FromString(files("frame.entrypoints.grpc").joinpath(DESCRIPTION).read_bytes())
        pool = descriptor_pool.Default()
        for each in description.file:
            pool.AddSerializedFile(each.SerializeToString())
        file = pool.FindFileByName("frame.proto")
        self._classes = {name: message_factory.GetMessageClass(kind) for name, kind in file.message_types_by_name.items()}
        self.methods = {method.name: method for method in file.services_by_name["Frame"].methods}

    def __getitem__(self, name: str) -> Any:
        return self._classes[name]


def plain(message: Message) -> dict[str, Any]:
    """The fields that are set, by name; maps as dicts, repeated fields as lists."""
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        values[field.name] = dict(value) if is_map else value if isinstance(value, str | int | float | bool | bytes) else list(value)
    return values


def chat_of(chat: Any) -> Chat:
    """The conversation of a request. Raises ApiError."""
    if not chat.messages:
        raise ApiError(400, "messages is empty; send at least one message", "messages")
    if len(chat.messages) > MAX_MESSAGES:
        raise ApiError(400, f"messages has {len(chat.messages)} entries; it may have {MAX_MESSAGES}", "messages")
    return Chat([{"role": message.role, "content": _content(message, f"messages[{i}]")} for i, message in enumerate(chat.messages)])


def _content(message: Any, place: str) -> str | list[Any]:
    if not message.parts:
        return str(message.content)
    if message.content:
        raise ApiError(400, f"{place} has content and parts; send one of them", f"{place}.parts")
    parts: list[Any] = []
    for i, part in enumerate(message.parts):
        here = f"{place}.parts[{i}]"
        kind = part.WhichOneof("part")
        if kind is None:
            raise ApiError(400, f"{here} is neither text nor media; send one of them", here)
        parts.append({"type": "text", "text": part.text} if kind == "text" else media_of(part.media, f"{here}.media"))
    return parts


def media_of(media: Any, place: str) -> MediaPart:
    """A file of a request. Raises ApiError."""
    if media.modality not in MODALITIES:
        sentence = f"{place}.modality is {quoted(media.modality)}; it must be one of {', '.join(MODALITIES)}"
        raise ApiError(400, sentence, f"{place}.modality")
    kind = media.WhichOneof("source")
    if kind is None:
        raise ApiError(400, f"{place} has neither data nor url; send one of them", place)
    source = media.data if kind == "data" else check_url(media.url, f"{place}.url")
    return MediaPart(media.modality, source, f"{place}.{kind}")


def add_logprobs(message: Any, tokens: Iterable[TokenLogprobs]) -> Iterator[None]:
    """Add consecutive log-probabilities to a `Logprobs`, one token at a time."""
    for each in tokens:
        message.token_ids.extend(each.token_ids)
        message.logprobs.extend(float("nan") if value is None else value for value in each.logprobs)
        for top in each.top:
            message.top.add(token_ids=[token for token, _ in top], logprobs=[value for _, value in top])
            yield


def finish_of(schema: Schema, finish: Finish, status: str = "") -> Any:
    """The message for a sequence's end; `status` is the name of a gRPC status, for errors."""
    message = schema["Finish"](reason=finish.reason, error=finish.error or "", status=status)
    if isinstance(finish.matched, int):
        message.token_id = finish.matched
    elif finish.matched is not None:
        message.text = finish.matched
    return message
