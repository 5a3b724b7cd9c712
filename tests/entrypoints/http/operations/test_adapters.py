"""The routes that load and unload adapters: forms of vLLM and SGLang, uploads, and refusals."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frame.entrypoints.engine_client.adapter_spool import MAX_CONFIG
from tests.entrypoints.adapter_engine import CONFIG, make_adapter, tensors
from tests.entrypoints.inprocess import InProcess, serving

FORM = [(b"content-type", b"multipart/form-data; boundary=b")]


def on(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"adapters": {"enabled": True, "folders": [str(tmp_path)], **more}}


def form(**parts: bytes) -> bytes:
    heads = (
        b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), content) for name, content in parts.items()
    )
    return b"".join(heads) + b"--b--\r\n"


async def test_forms_of_vllm_and_sglang(tmp_path: Path) -> None:
    body = {"lora_name": "sql", "lora_path": str(make_adapter(tmp_path / "a"))}
    async with serving(on(tmp_path)) as server:
        reply = await server.post("/v1/load_lora_adapter", body)
        assert (reply.status, reply.body) == (200, b"Success: LoRA adapter 'sql' added successfully.")
        reply = await server.post("/v1/unload_lora_adapter", {"lora_name": "sql", "lora_int_id": 1})
        assert (reply.status, reply.body) == (200, b"Success: LoRA adapter 'sql' removed successfully.")
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "sql"})).status == 404
        reply = await server.post("/load_lora_adapter", {**body, "pinned": False})
        assert reply.json()["success"]
        assert list(reply.json()["loaded_adapters"]) == ["sql"]
        reply = await server.post("/unload_lora_adapter", {"lora_name": "sql", "mode": "abort"})
        assert reply.json() == {"success": True, "error_message": "", "loaded_adapters": {}}
        for wrong in ({"lora_name": "x"}, {"lora_path": "x"}, {"lora_name": "", "lora_path": "x"}, {"lora_name": "x", "lora_path": ""}):
            assert (await server.post("/v1/load_lora_adapter", wrong)).status == 400


async def test_a_folder_elsewhere_is_refused_without_a_hint(tmp_path: Path) -> None:
    secret = make_adapter(tmp_path / "secret")
    (tmp_path / "open").mkdir()
    async with serving(on(tmp_path / "open")) as server:
        messages = set()
        for path in (secret, f"{tmp_path}/open/../secret", tmp_path / "absent", "/etc"):
            reply = await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)})
            assert reply.status == 400
            messages.add(reply.json()["error"]["message"].replace("absent", "secret"))
        assert all("that this server may read" in message for message in messages)


async def test_routes_are_off_unless_configured(tmp_path: Path) -> None:
    body = {"lora_name": "sql", "lora_path": str(make_adapter(tmp_path / "a"))}
    async with serving({"adapters": {"enabled": True}}) as server:
        await server.services.adapters.load_folder("sql", body["lora_path"])  # type: ignore[union-attr]
        for path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            reply = await server.post(path, {"lora_name": "sql"})
            assert (reply.status, reply.json()["error"]["code"]) == (403, "loads_off")
        assert (await server.request("GET", "/v1/models/sql")).status == 200
        reply = await server.post("/v1/load_lora_adapter", body)
        assert (reply.status, reply.json()["error"]["code"]) == (403, "folders_off")
        reply = await server.request("PUT", "/v1/lora_adapters/x", form(config=CONFIG, tensors=tensors(b"1")), FORM)
        assert (reply.status, reply.json()["error"]["code"]) == (403, "uploads_off")


async def test_an_engines_refusal_is_a_400(tmp_path: Path) -> None:
    async with serving(on(tmp_path)) as server:
        folder = make_adapter(tmp_path / "a")
        digest = server.services.adapters.spool.copy_folder(str(folder)).digest  # type: ignore[union-attr]
        server.orders.refuses[digest] = "bias is 'all'; adapters with biases are not served"
        reply = await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(folder)})
        assert (reply.status, "bias is 'all'" in reply.body.decode()) == (400, True)
        assert len((await server.request("GET", "/v1/models")).json()["data"]) == 1


async def test_an_uploaded_configuration_that_no_format_reads_is_blamed(tmp_path: Path) -> None:
    async with serving(on(tmp_path, uploads=True)) as server:
        content = tensors(b"1")
        digest = hashlib.sha256(hashlib.sha256(b"{}").digest() + hashlib.sha256(content).digest()).hexdigest()
        server.orders.refuses[digest] = "peft_type None is read by no adapter format here, which read 'LORA'"
        reply = await put(server, "x", form(config=b"{}", tensors=content), 400, "peft_type None")
        assert reply["error"]["param"] == "config"


# uploads ------------------------------------------------------------------------------------------


async def put(server: InProcess, name: str, body: bytes, status: int, text: str = "") -> dict[str, Any]:
    reply = await server.request("PUT", f"/v1/lora_adapters/{name}", body, FORM)
    assert (reply.status, text in reply.body.decode()) == (status, True), reply.body
    return reply.json()  # type: ignore[no-any-return]


async def test_uploads_of_a_training_loop(tmp_path: Path) -> None:
    async with serving(on(tmp_path, uploads=True)) as server:
        digests = []
        for turn in range(3):
            digests.append((await put(server, "policy", form(tensors=tensors(bytes([turn]) * 300_000), config=CONFIG), 200))["digest"])
            reply = await server.post("/v1/completions", {"prompt": "a", "model": "policy"})
            assert reply.headers["x-frame-adapter"] == f"policy@{digests[-1][:12]}"
        assert len(set(digests)) == 3
        assert (await put(server, "policy", form(config=CONFIG, tensors=tensors(bytes([2]) * 300_000)), 200))["digest"] == digests[-1]
        await asyncio.sleep(0.05)
        assert server.orders.held == [digests[-1]]
        folder = server.services.adapters.spool._folder()  # type: ignore[union-attr]
        assert [path.name for path in folder.iterdir()] == [digests[-1]]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (form(config=CONFIG), 400, "the field tensors is missing"),
        (form(config=CONFIG, tensors=b"1"), 400, "cut off"),
        (form(tensors=tensors(b"1")), 400, "the field config is missing"),
        (form(config=b"[]", tensors=tensors(b"1")), 400, "not a JSON object"),
        (form(config=b" " * (MAX_CONFIG + 1), tensors=b""), 400, "larger than"),
        (form(config=CONFIG, other=b"1"), 400, "is unknown"),
        (form(config=CONFIG)[: -len(b"--b--\r\n")] + form(config=CONFIG), 400, "given twice"),
        (form(config=CONFIG)[:-4], 400, "cut off"),
        (b"", 400, "cut off"),
    ],
)
async def test_wrong_uploads(tmp_path: Path, body: bytes, status: int, text: str) -> None:
    async with serving(on(tmp_path, uploads=True)) as server:
        await put(server, "x", body, status, text)
        await put(server, "frame-tiny", form(config=CONFIG, tensors=tensors(b"1")), 400, "base model's name")
        assert not list(server.services.adapters.spool._folder().iterdir())  # type: ignore[union-attr]
        assert len((await server.request("GET", "/v1/models")).json()["data"]) == 1


async def test_a_wrong_name_is_blamed_and_not_the_folder(tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", b"1")
    async with serving(on(tmp_path)) as server:
        for name, path, field in (("a b", "a", "lora_name"), ("frame-tiny", "a", "lora_name"), ("a", "x", "lora_path")):
            reply = await server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path / path)})
            assert (reply.status, reply.json()["error"]["param"]) == (400, field)
        reply = await server.post("/v1/completions", {"prompt": "x", "model": "b"})
        assert "this server has 'frame-tiny' and the adapters that /v1/models lists" in reply.json()["error"]["message"]


async def test_uploads_are_bounded(tmp_path: Path) -> None:
    async with serving({**on(tmp_path, uploads=True), "server": {"max_body_bytes": 1024 * 1024}}) as server:
        await put(server, "x", form(config=CONFIG, tensors=tensors(bytes(2 * 1024 * 1024))), 413)
        assert not list(server.services.adapters.spool._folder().iterdir())  # type: ignore[union-attr]
        reply = await server.request("PUT", "/v1/lora_adapters/x?owner=alice", form(config=CONFIG, tensors=tensors(b"1")), FORM)
        assert (reply.status, "owner must be sha256:" in reply.body.decode()) == (400, True)


async def test_unload_during_streams(tmp_path: Path) -> None:
    async with serving(on(tmp_path)) as server:
        body = {"lora_name": "sql", "lora_path": str(make_adapter(tmp_path / "a"))}
        await server.post("/v1/load_lora_adapter", body)
        request = {"prompt": "a", "model": "sql", "max_tokens": 200, "ignore_eos": True, "stream": True}
        streams = [asyncio.create_task(server.post("/v1/completions", request)) for _ in range(8)]
        await asyncio.sleep(0.05)
        reply = await server.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert reply.status == 200
        for stream in streams:
            text = (await stream).body
            assert b'"finish_reason":"length"' in text
        assert server.orders.held == []
        await server.post("/v1/load_lora_adapter", body)
        streams = [asyncio.create_task(server.post("/v1/completions", request)) for _ in range(8)]
        await asyncio.sleep(0.05)
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "sql", "mode": "abort"})).status == 200
        for stream in streams:
            assert b'"finish_reason"' in (await stream).body
        assert server.orders.held == []
        assert msgspec.json.decode((await server.request("GET", "/server_info")).body)["adapters"] == []
