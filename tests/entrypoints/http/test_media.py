"""Media through every API: what the engine gets, what clients are told, and when files are given
back. The service that prepares media is a fake; sockets, tokenizer and engine are real."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from frame.core.interfaces.media import MediaItem
from frame.core.messages import Generate
from frame.entrypoints.http.chat import request_media
from frame.entrypoints.http.protocol.connections import ConnectionLimits
from frame.entrypoints.http.protocol.listening import HttpServer
from tests.entrypoints.fake_media import FakeMedia, data_url, make_folder, make_image
from tests.entrypoints.inprocess import InProcess, serving

TEN, SEVEN = make_image(10), make_image(7)
IMAGE_ID, VIDEO_ID, AUDIO_ID = 2048, 2049, 2050


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("checkpoint") / "frame-tiny")


@pytest.fixture
def media(tmp_path: Path) -> FakeMedia:
    return FakeMedia(tmp_path)


@asynccontextmanager
async def listening(server: InProcess) -> AsyncIterator[str]:
    """The URL of a socket of the application."""
    listener = socket.create_server(("127.0.0.1", 0))
    http = HttpServer(server.app, ConnectionLimits(100, 30.0), None)
    serve = asyncio.create_task(http.serve([listener]))
    await http.listening.wait()
    try:
        yield "http://{}:{}".format(*listener.getsockname())
    finally:
        http.should_exit = True
        await serve


def check_items(message: Generate, *rows: int) -> list[MediaItem]:
    """The items, whose runs are all placeholders of the prompt, in order."""
    placed = [(run.start, run.count) for item in message.media for run in item.runs]
    assert [sum(run.count for run in item.runs) for item in message.media] == list(rows)
    indices = [start + i for start, count in placed for i in range(count)]
    assert indices == [i for i, token in enumerate(message.token_ids) if token >= IMAGE_ID]
    return message.media


def chat(*content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "frame-tiny", "max_tokens": 3, "messages": [{"role": "user", "content": list(content)}], **more}


def image(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def until_released(media: FakeMedia) -> None:
    async with asyncio.timeout(20):
        while media.held:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.01)


async def test_chat_parts_become_items_in_order(folder: Path, media: FakeMedia) -> None:
    audio = b"RIFF\x00\x00\x00\x00WAVE"
    parts = [
        text("one"), image(TEN, detail="low"), text("two"), {"type": "image_url", "image_url": data_url(SEVEN), "uuid": "mine"},
        {"type": "input_audio", "input_audio": {"data": base64_of(audio), "format": "wav"}},
        {"type": "video_url", "video_url": {"url": data_url(b"12345", "video/mp4"), "fps": 2}},
        {"type": "audio_url", "audio_url": {"url": data_url(b"123", "audio/ogg")}},
        {"type": "file", "file": {"file_data": data_url(SEVEN, "application/x"), "filename": "a.bin"}},
        {"type": "file", "file": {"file_data": base64_of(audio)}},
    ]  # fmt: skip
    async with serving(folder=folder, media=media) as server:
        response = await server.post("/v1/chat/completions", chat(*parts))
        assert response.status == 200, response.body
        items = check_items(server.sent[-1], 10, 7, 12, 10, 3, 7, 12)
        assert [item.modality for item in items] == ["image", "image", "audio", "video", "audio", "image", "audio"]
        assert [run.grid for run in items[0].runs] == [(1, 1, 10)]
        assert len(items[3].runs) == 2
        assert [part.options for part in media.asked[:2]] == [{"detail": "low"}, {}]
        assert media.asked[3].options == {"fps": 2}
        usage = response.json()["usage"]
        assert usage["prompt_tokens"] == len(server.sent[-1].token_ids)
        details = usage["prompt_tokens_details"]
        assert (details["image_tokens"], details["video_tokens"], details["audio_tokens"]) == (24, 10, 27)
        await until_released(media)


async def test_text_requests_have_no_media(folder: Path, media: FakeMedia) -> None:
    async with serving(folder=folder, media=media) as server:
        response = await server.post("/v1/chat/completions", chat(text("hello")))
        assert response.status == 200
        assert server.sent[-1].media == []
        assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_images_of_earlier_turns_and_of_tools(folder: Path, media: FakeMedia) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [text("a"), image(TEN)]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [image(SEVEN), text("seen")]},
        {"role": "user", "content": [image(TEN)]},
    ]
    async with serving(folder=folder, media=media) as server:
        response = await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        assert response.status == 200, response.body
        items = check_items(server.sent[-1], 10, 7, 10)
        assert items[0].digest == items[2].digest != items[1].digest


async def test_openai_library(folder: Path, media: FakeMedia) -> None:
    async with serving(folder=folder, media=media) as server, listening(server) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        body: Any = chat(text("what?"), image(TEN))
        whole = await client.chat.completions.create(**body, n=2)
        assert len(whole.choices) == 2
        check_items(server.sent[-1], 10)
        events = [event async for event in await client.chat.completions.create(**body, stream=True)]
        assert events
        item = {"type": "input_image", "image_url": data_url(SEVEN), "detail": "auto"}
        recording = {"type": "input_audio", "input_audio": {"data": base64_of(b"1234"), "format": "mp3"}}
        content: Any = [{"role": "user", "content": [{"type": "input_text", "text": "what?"}, item, recording]}]
        first = await client.responses.create(model="frame-tiny", input=content, max_output_tokens=2)
        check_items(server.sent[-1], 7, 4)
        await client.responses.create(
            model="frame-tiny", input="and now?", previous_response_id=first.id, max_output_tokens=2
        )  # with the image of the turn before
        check_items(server.sent[-1], 7, 4)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**chat(text("what?"), image(b"BAD")))
        assert caught.value.param == "messages[0].content[1].image_url.url"
        await client.close()
        await until_released(media)


@pytest.mark.slow
async def test_anthropic_library(folder: Path, media: FakeMedia) -> None:
    import anthropic

    media.files["https://example.com/a.png"] = SEVEN
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(TEN)}
    seen = [{"type": "text", "text": "seen"}, {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}]
    messages: Any = [
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": seen}]},
    ]
    async with serving(folder=folder, media=media) as server, listening(server) as url:
        client = anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0)
        message = await client.messages.create(model="frame-tiny", max_tokens=2, messages=messages)
        check_items(server.sent[-1], 10, 7)
        counted = await client.messages.count_tokens(model="frame-tiny", messages=messages)
        assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        messages[2]["content"][0]["content"][1]["source"]["url"] = "https://example.com/other.png"
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[2\].content\[0\].content\[1\].source.url: this address"):
            await client.messages.create(model="frame-tiny", max_tokens=2, messages=messages)
        document: Any = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
        with pytest.raises(anthropic.BadRequestError, match="PDF, which is not supported"):
            await client.messages.create(model="frame-tiny", max_tokens=2, messages=[{"role": "user", "content": [document]}])
        await client.close()
        await until_released(media)


async def test_ollama(folder: Path, media: FakeMedia) -> None:
    async with serving(folder=folder, media=media) as server:
        options = {"num_predict": 2}
        message = {"role": "user", "content": "what?", "images": [base64_of(TEN), base64_of(SEVEN)]}
        response = await server.post("/api/chat", {"model": "frame-tiny", "messages": [message], "stream": False, "options": options})
        assert response.status == 200, response.body
        check_items(server.sent[-1], 10, 7)
        for body in ({"prompt": "what?"}, {"prompt": "<|image|>what?", "raw": True}):
            response = await server.post("/api/generate", {"model": "frame-tiny", "images": [base64_of(TEN)], "options": options, **body})
            assert response.status == 200, response.body
            check_items(server.sent[-1], 10)
        message["images"] = ["a", 3]
        response = await server.post("/api/chat", {"model": "frame-tiny", "messages": [message]})
        assert response.status == 400
        assert response.json()["error"].startswith("messages[0].images[1] is")
        response = await server.post("/api/show", {"model": "frame-tiny"})
        assert "vision" in response.json()["capabilities"]


async def test_generate(folder: Path, media: FakeMedia) -> None:
    params = {"max_new_tokens": 2}
    one, two = "<|image|> and <|audio|>", "<|image|><|image|>"
    async with serving(folder=folder, media=media) as server:
        body: dict[str, Any] = {"text": one, "image_data": data_url(TEN), "audio_data": [base64_of(b"12")], "sampling_params": params}
        assert (await server.post("/generate", body)).status == 200
        check_items(server.sent[-1], 10, 2)
        body = {"text": [one, "plain", two], "image_data": [base64_of(TEN), None, [base64_of(SEVEN), base64_of(TEN)]]}
        body |= {"audio_data": [base64_of(b"12"), None, None], "sampling_params": params}
        response = await server.post("/generate", body)
        assert response.status == 200, response.body
        first, plain, last = list(server.sent)[-3:]
        check_items(first, 10, 2)
        check_items(plain)
        check_items(last, 7, 10)
        assert [run.start for item in last.media for run in item.runs] == [1, 8]  # one after the other, as sent
        for wrong, param in (
            ({"text": "no place", "image_data": base64_of(TEN)}, "text"),
            ({"text": two, "image_data": [base64_of(TEN)]}, "text"),
            ({"text": one, "image_data": [{"format": "processor_output"}]}, "image_data[0]"),
            ({"input_ids": [1, 2], "image_data": base64_of(TEN)}, "image_data"),
            ({"text": [one, two], "image_data": [base64_of(TEN)]}, "image_data"),
            ({"text": one, "image_data": 3}, "image_data"),
        ):
            response = await server.post("/generate", wrong)
            assert response.status == 400, (wrong, response.body)
            assert response.json()["error"]["param"] == param, (wrong, response.body)
        info = (await server.request("GET", "/get_model_info")).json()
        assert info["has_image_understanding"] and info["has_audio_understanding"]
        await until_released(media)


WRONG = [
    (image(b"BAD"), "image_url.url"),
    ({"type": "image_url", "image_url": {}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "ftp://a/b"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": data_url(TEN), "crop": [1]}}, "image_url.crop"),
    ({"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": ""}}, "image_url.url"),
    ({"type": "image_url"}, "image_url"),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data"),
    ({"type": "file", "file": {"file_id": "file-1"}}, "file.file_id"),
    ({"type": "file", "file": {"file_data": base64_of(b"%PDF-1.7 and more")}}, "file.file_data"),
    ({"type": "file", "file": {"file_data": base64_of(b"MZ an executable")}}, "file.file_data"),
    ({"type": "image_embeds", "image_embeds": "abc"}, "type"),
]


@pytest.mark.parametrize(("part", "place"), WRONG)
async def test_wrong_parts_are_named(folder: Path, media: FakeMedia, part: dict[str, Any], place: str) -> None:
    async with serving(folder=folder, media=media) as server:
        response = await server.post("/v1/chat/completions", chat(text("a"), image(TEN), part))
        assert response.status == 400
        error = response.json()["error"]
        assert error["param"] == f"messages[0].content[2].{place}"
        assert error["message"].startswith(error["param"].removesuffix(".type") if place != "type" else error["param"])
        assert "is a string" not in error["message"]
        assert not media.held


async def test_a_model_without_encoders_refuses(folder: Path, tmp_path: Path) -> None:
    async with serving(folder=folder) as server:
        response = await server.post("/v1/chat/completions", chat(text("a"), image(TEN)))
        assert (response.status, response.json()["error"]["param"]) == (400, "messages[0].content[1].image_url.url")
        assert "takes text only" in response.json()["error"]["message"]
    async with serving(folder=folder, media=FakeMedia(tmp_path, ["image"])) as server:
        response = await server.post("/v1/chat/completions", chat({"type": "audio_url", "audio_url": {"url": data_url(b"12")}}))
        assert response.status == 400
        assert "this model reads text, image, and this part is audio" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "written",
    [
        {"messages": [{"role": "user", "content": [text("see <|image|>"), image(TEN)]}]},
        {"messages": [{"role": "user", "content": [text("see <|ima"), text("ge|>"), image(TEN)]}]},
        {"messages": [{"role": "system", "content": "<|image|>"}, {"role": "user", "content": [image(TEN)]}]},
        {
            "messages": [{"role": "user", "content": [image(TEN)]}],
            "tools": [{"type": "function", "function": {"name": "f", "description": "<|image|>"}}],
        },
    ],
)
async def test_placeholders_written_by_clients_are_refused(folder: Path, media: FakeMedia, written: dict[str, Any]) -> None:
    async with serving(folder=folder, media=media) as server:
        response = await server.post("/v1/chat/completions", {"max_tokens": 2, **written})
        assert (response.status, response.json()["error"]["param"]) == (400, "messages")
        assert "<|image|>" in response.json()["error"]["message"]
        await until_released(media)


async def test_bounds_count_the_rows(folder: Path, media: FakeMedia) -> None:
    async with serving(folder=folder, media=media) as server:  # a context of 512 tokens
        response = await server.post("/v1/chat/completions", chat(image(make_image(600))))
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "the media alone take 600 tokens" in response.json()["error"]["message"]
        response = await server.post("/v1/chat/completions", chat(image(make_image(400)), max_tokens=200))
        assert response.json()["error"]["param"] == "max_tokens"
        response = await server.post("/v1/chat/completions", chat(image(make_image(400)), truncate_prompt_tokens=50))
        assert response.json()["error"]["param"] == "truncate_prompt_tokens"
        body = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url(make_image(600))}]}]}
        response = await server.post("/v1/responses", {**body, "truncation": "auto"})
        assert (response.status, response.json()["error"]["param"]) == (400, "input")
        await until_released(media)


async def test_prompts_are_counted_without_a_request(folder: Path, media: FakeMedia) -> None:
    async with serving(folder=folder, media=media) as server:
        body = chat(text("a"), image(TEN))
        count = (await server.post("/tokenize", {"messages": body["messages"]})).json()["count"]
        rendered = (await server.post("/v1/chat/completions/render", body)).json()["token_ids"]
        assert len(rendered) == count
        assert rendered.count(IMAGE_ID) == 10
        assert not media.held
        assert not server.sent


async def test_a_string_template_gets_placeholders_in_the_text(tmp_path: Path, media: FakeMedia) -> None:
    template = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    async with serving(folder=make_folder(tmp_path / "frame-tiny", template), media=media) as server:
        response = await server.post("/v1/chat/completions", chat(text("one"), image(TEN), text("two"), image(SEVEN)))
        assert response.status == 200, response.body
        check_items(server.sent[-1], 10, 7)
        written = server.services.need_tokenizer().decode(server.sent[-1].token_ids, skip_special_tokens=False)
        assert written == f"<|user|>one{'<|image|>' * 10}\ntwo{'<|image|>' * 7}\n"


async def test_a_template_that_leaves_an_item_out_is_refused(tmp_path: Path, media: FakeMedia) -> None:
    template = "{% for message in messages[-1:] %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    async with serving(folder=make_folder(tmp_path / "frame-tiny", template), media=media) as server:
        messages = [{"role": "user", "content": [image(TEN)]}, {"role": "user", "content": "and?"}]
        response = await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        assert response.status == 400
        assert "0 times '<|image|>' for 1 parts" in response.json()["error"]["message"]


async def test_files_are_kept_until_the_last_sequence_ends(folder: Path, media: FakeMedia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_media, "LINGER", 0.2)
    async with serving(folder=folder, media=media) as server, listening(server) as url, httpx.AsyncClient(base_url=url) as client:
        body = chat(image(TEN), max_tokens=400, ignore_eos=True, stream=True, n=3, rid="mine")
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert await anext(response.aiter_lines())
            assert len(media.held) == 1  # once for all sequences
            assert media.list_files() == list(media.held)
            assert all(message.media == server.sent[-1].media for message in list(server.sent)[-3:])
        await until_released(media)  # the client has left
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            assert await anext(lines)
            assert len(media.held) == 1
            await client.post("/abort_request", json={"rid": "mine"})
            assert [line async for line in lines]
        await until_released(media)
        assert not media.list_files()


async def test_files_are_given_back_where_the_start_fails(folder: Path, media: FakeMedia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_media, "LINGER", 0.2)
    async with serving(folder=folder, media=media) as server:
        body = chat(text("<|image|>"), image(TEN))
        assert (await server.post("/v1/chat/completions", body)).status == 400
        assert not media.held
        conversations = [chat(image(TEN))["messages"], chat(image(b"BAD"))["messages"]]
        response = await server.post("/v1/chat/completions/batch", {"messages": conversations, "max_tokens": 2})
        assert response.status == 400
        assert not media.held
        conversations[1] = chat(image(SEVEN), image(SEVEN))["messages"]
        response = await server.post("/v1/chat/completions/batch", {"messages": conversations, "max_tokens": 2})
        assert response.status == 200, response.body
        check_items(list(server.sent)[-2], 10)
        check_items(list(server.sent)[-1], 7, 7)
        await until_released(media)
        assert server.services.client.num_outstanding == 0


async def test_a_recovered_request_keeps_its_media(folder: Path, media: FakeMedia) -> None:
    async with serving(folder=folder, media=media) as server:
        body = chat(image(TEN), max_tokens=300, ignore_eos=True)
        work = asyncio.create_task(server.post("/v1/chat/completions", body))
        while not server.sent:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        server.services.client.begin_recovery("the engine is restarted", {})
        server.services.client.resume_requests()
        assert (await work).status == 200
        first, again = server.sent
        assert again.rid != first.rid
        assert again.media == first.media
        await until_released(media)


async def test_media_belong_to_their_tenant(folder: Path, media: FakeMedia, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-alice\nkey-of-bob\n")
    sections = {"server": {"api_keys": str(keys)}}
    async with serving(sections, folder=folder, media=media) as server:
        media.gate.clear()
        works = [
            asyncio.create_task(server.post("/v1/chat/completions", chat(image(TEN)), authorization=f"Bearer key-of-{name}"))
            for name in ("alice", "bob")
        ]
        while len(media.held) < 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        owners = set(media.held.values())
        assert len(owners) == 2
        media.gate.set()
        assert [(await work).status for work in works] == [200, 200]
        assert {message.namespace.partition(":")[0] for message in server.sent} == owners


async def test_metrics_count_files(folder: Path, media: FakeMedia) -> None:
    async with serving(folder=folder, media=media) as server:
        assert (await server.post("/v1/chat/completions", chat(image(TEN), image(SEVEN)))).status == 200
        lines = (await server.request("GET", "/metrics")).body.decode().splitlines()
        assert any(line.startswith("frame_media_items_total{") and 'modality="image"' in line and line.endswith(" 2.0") for line in lines)
        assert any(line.startswith("frame_media_bytes_total") and line.endswith(" 17.0") for line in lines)
        info = (await server.request("GET", "/server_info")).json()
        assert info["media"]["modalities"] == ["image", "video", "audio"]
        assert info["media"]["items"] == {"image": 2}
