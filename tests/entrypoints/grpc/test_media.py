"""Media over gRPC: in chats, in texts, and what clients are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from frame.entrypoints.grpc.schema import SERVICE, Schema
from frame.entrypoints.grpc.server import GrpcServer
from tests.entrypoints.fake_media import FakeMedia, make_folder, make_image
from tests.entrypoints.inprocess import InProcess, serving

S = Schema()
TEN = {"modality": "image", "data": make_image(10)}
CLIP = {"modality": "video", "data": b"12345"}


@asynccontextmanager
async def connected(tmp_path: Path) -> AsyncIterator[tuple[InProcess, FakeMedia, Any]]:
    media = FakeMedia(tmp_path)
    async with serving(folder=make_folder(tmp_path / "frame-tiny"), media=media) as server:
        grpc_server = GrpcServer(server.services, "127.0.0.1", 0, server.app.bodies)
        await grpc_server.start()
        try:
            async with grpc.aio.insecure_channel(grpc_server.address) as channel:
                yield server, media, channel
        finally:
            await grpc_server.stop()


def generate(channel: Any, **request: Any) -> Any:
    call = channel.unary_stream(
        f"/{SERVICE}/Generate", S["GenerateRequest"].SerializeToString, response_deserializer=S["GenerateReply"].FromString
    )
    return call(S["GenerateRequest"](sampling_params={"max_tokens": 2}, **request))


def chat(*parts: dict[str, Any], **message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "parts": list(parts), **message}]}


async def test_media_of_chats_and_texts(tmp_path: Path) -> None:
    async with connected(tmp_path) as (server, media, channel):
        assert [reply async for reply in generate(channel, chat=chat({"text": "a"}, {"media": TEN}, {"media": CLIP}))]
        assert [item.num_rows for item in server.sent[-1].media] == [10, 10]
        assert [reply async for reply in generate(channel, text="<|video|> and <|image|>", media=[TEN, CLIP])]
        assert [(item.modality, item.num_rows) for item in server.sent[-1].media] == [("video", 10), ("image", 10)]  # of the prompt
        tokenize = channel.unary_unary(f"/{SERVICE}/Tokenize", S["TokenizeRequest"].SerializeToString, S["TokenizeReply"].FromString)
        reply = await tokenize(S["TokenizeRequest"](chat=chat({"media": TEN})))
        assert list(reply.token_ids).count(2048) == 10
        assert not media.held


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"chat": chat({"media": {"modality": "image", "data": b"BAD"}})}, "messages[0].parts[0].media.data"),
        ({"chat": chat({"media": {"modality": "image"}})}, "messages[0].parts[0].media has neither"),
        ({"chat": chat({"media": {"modality": "scent", "data": b"a"}})}, "messages[0].parts[0].media.modality"),
        ({"chat": chat({"media": {"modality": "image", "url": "a/b"}})}, "messages[0].parts[0].media.url"),
        ({"chat": chat({}, content="")}, "messages[0].parts[0] is neither"),
        ({"chat": chat({"text": "a"}, content="b")}, "messages[0] has content and parts"),
        ({"chat": chat({"text": "a"}), "media": [TEN]}, "media needs text"),
        ({"text": "no place", "media": [TEN]}, "0 times"),
    ],
)
async def test_wrong_media_are_named(tmp_path: Path, request_: dict[str, Any], sentence: str) -> None:
    async with connected(tmp_path) as (_, media, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [reply async for reply in generate(channel, **request_)]
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in caught.value.details()
        assert not media.held
