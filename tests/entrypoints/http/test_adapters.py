"""Requests that name an adapter, by every API: which version runs, and what a response says."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frame.core.messages import Heartbeat
from tests.entrypoints.adapter_engine import make_adapter
from tests.entrypoints.inprocess import InProcess, Response, serving

HEADER = "x-frame-adapter"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@asynccontextmanager
async def adapters_of(tmp_path: Path, *names: str, **sections: Any) -> AsyncIterator[InProcess]:
    """A server with adapters of these names."""
    async with serving({"adapters": {"enabled": True}, **sections}) as server:
        assert server.services.adapters is not None
        for number, name in enumerate(names):
            await server.services.adapters.load_folder(name, str(make_adapter(tmp_path / name, bytes([number]))))
        yield server


def digest_of(server: InProcess, name: str, tenant: str = "") -> str:
    named = server.services.adapters and server.services.adapters.find(name, tenant)
    assert named
    return named.version.digest


def ran(server: InProcess) -> set[str]:
    """The digests of all requests that the engine got."""
    return {message.adapter for message in server.sent}


ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": CHAT,
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
    "/api/chat": {"messages": CHAT["messages"], "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]] * 2, "max_tokens": 2},
    "/invocations": CHAT,
}


@pytest.mark.parametrize("path", ROUTES)
async def test_every_route_takes_a_name(tmp_path: Path, path: str) -> None:
    async with adapters_of(tmp_path, "sql") as server:
        for model in ("sql", "frame-tiny:sql"):
            reply = await server.post(path, {**ROUTES[path], "model": model})
            assert reply.status == 200, reply.body
            assert reply.headers[HEADER] == f"sql@{digest_of(server, 'sql')[:12]}"
            assert reply.json().get("model", model) == model
        assert ran(server) == {digest_of(server, "sql")}
        plain = await server.post(path, {**ROUTES[path], "model": "frame-tiny"})
        assert HEADER not in plain.headers
        assert plain.json().get("model", "frame-tiny") == "frame-tiny"
        assert ran(server) == {digest_of(server, "sql"), ""}
        for model in ("other", "frame-tiny:other", "other:sql", "sql:sql", "frame-tiny:"):
            reply = await server.post(path, {**ROUTES[path], "model": model})
            assert reply.status == 404, model
            assert b"does not exist" in reply.body
        assert server.services.adapters is not None
        assert [version.num_users for version in server.services.adapters.list_versions()] == [0]


async def test_streams_and_several_sequences(tmp_path: Path) -> None:
    async with adapters_of(tmp_path, "sql") as server:
        reply = await server.post("/v1/chat/completions", {**CHAT, "model": "sql", "n": 3, "stream": True})
        assert reply.headers[HEADER].startswith("sql@")
        events = [msgspec.json.decode(line[6:]) for line in reply.body.split(b"\n\n") if line.startswith(b"data: {")]
        assert {event["model"] for event in events} == {"sql"}
        assert len(server.sent) == 3
        for stream in (False, True):
            background = {"input": "hi", "model": "sql", "max_output_tokens": 2, "background": True, "stream": stream}
            assert (await server.post("/v1/responses", background)).headers[HEADER] == reply.headers[HEADER]
        assert ran(server) == {digest_of(server, "sql")}


# lora_path ----------------------------------------------------------------------------------------


async def test_lora_path_of_generate(tmp_path: Path) -> None:
    async with adapters_of(tmp_path, "a", "b") as server:
        params = {"sampling_params": {"max_new_tokens": 2}}
        reply = await server.post("/generate", {"text": ["1", "2", "3"], "lora_path": ["a", None, "b"], **params})
        assert len(reply.json()) == 3
        labels = [f"{name}@{digest_of(server, name)[:12]}" for name in "ab"]
        assert reply.headers[HEADER] == ", ".join(labels)
        assert [message.adapter for message in server.sent] == [digest_of(server, "a"), "", digest_of(server, "b")]
        assert (await server.post("/generate", {"text": ["1", "2"], "lora_path": "a", **params})).headers[HEADER] == labels[0]
        assert HEADER not in (await server.post("/generate", {"text": "1", "lora_path": None, **params})).headers
        assert (await server.post("/v1/completions", {"prompt": "x", "lora_path": "b", "max_tokens": 1})).headers[HEADER] == labels[1]

        async def fails(body: dict[str, Any], status: int, text: str) -> None:
            reply = await server.post("/generate", {"text": ["1", "2"], **body})
            assert (reply.status, text in reply.body.decode()) == (status, True), reply.body

        await fails({"lora_path": ["a"]}, 400, "there are 2 prompts but 1 lora_path")
        await fails({"lora_path": ["a", "c"]}, 404, "the adapter 'c' does not exist")
        await fails({"lora_path": ["a", 5]}, 400, "lora_path")
        await fails({"lora_path": "a", "model": "b"}, 400, "name different adapters")
        assert {version.num_users for version in server.services.adapters.list_versions()} == {0}  # type: ignore[union-attr]


async def test_adapters_are_off_by_default() -> None:
    async with serving() as server:
        reply = await server.post("/generate", {"text": "x", "lora_path": "a"})
        assert reply.status == 400
        assert "this server has no adapters" in reply.json()["error"]["message"]
        assert (await server.post("/generate", {"text": "x", "lora_path": None})).status == 200
        assert (await server.post("/v1/completions", {"prompt": "x", "lora_path": []})).status == 200
        assert (await server.post("/v1/completions", {"prompt": "x", "lora_id": "a"})).status == 400
        assert (await server.post("/v1/completions", {"prompt": "x", "model": "a"})).status == 404
        assert (await server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/x"})).status == 404


# models -------------------------------------------------------------------------------------------


async def test_models_have_a_parent(tmp_path: Path) -> None:
    async with adapters_of(tmp_path, "sql") as server:
        base, card = (await server.request("GET", "/v1/models")).json()["data"]
        assert (base["id"], base["parent"], base["root"]) == ("frame-tiny", None, "frame-tiny")
        assert (card["id"], card["parent"], card["root"]) == ("sql", "frame-tiny", digest_of(server, "sql"))
        assert (await server.request("GET", "/v1/models/sql")).json() == card
        assert (await server.request("GET", "/v1/models/frame-tiny:sql")).json() == card
        assert (await server.request("GET", "/v1/models/none")).status == 404
        anthropic = await server.request("GET", "/v1/models", headers=[(b"anthropic-version", b"1")])
        assert [each["id"] for each in anthropic.json()["data"]] == ["frame-tiny", "sql"]


async def test_metrics_and_information(tmp_path: Path) -> None:
    async with adapters_of(tmp_path, "sql", server={"metrics_aliases": ["vllm"]}) as server:
        await server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "model": "sql", "ignore_eos": True})
        server.services.client.load = Heartbeat("engine", adapters_on_device=3, adapters_running=2, adapter_copies=5)  # type: ignore[misc]
        text = (await server.request("GET", "/metrics")).body.decode()
        name = 'model_name="frame-tiny"'
        assert f'frame_adapter_generation_tokens_total{{adapter="sql",{name}}} 3.0' in text
        assert f'frame_adapter_requests{{adapter="sql",{name}}} 0.0' in text
        assert f"frame_adapter_loads_total{{{name}}} 1.0" in text
        assert f"frame_adapters_on_device{{{name}}} 3.0" in text
        assert f"frame_adapters_running{{{name}}} 2.0" in text
        assert f"frame_adapter_copies_total{{{name}}} 5.0" in text
        assert f"frame_adapters_loaded{{{name}}} 1.0" in text
        assert 'vllm:lora_requests_info{engine="0",max_lora="8",' in text
        (adapter,) = (await server.request("GET", "/server_info")).json()["adapters"]
        assert (adapter["name"], adapter["digest"], adapter["rank"], adapter["loaded"]) == ("sql", digest_of(server, "sql"), 8, True)


# tenants ------------------------------------------------------------------------------------------


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def test_the_adapter_of_another_tenant_does_not_exist(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice\nbob\n")
    sections: dict[str, Any] = {
        "server": {"api_keys": str(keys), "admin_key": "op"},
        "adapters": {"enabled": True, "folders": [str(tmp_path)]},
    }
    owner = f"sha256:{hashlib.sha256(b'alice').hexdigest()}"
    async with serving(sections) as server:
        make_adapter(tmp_path / "secret", b"s")
        body = {"lora_name": "secret", "lora_path": str(tmp_path / "secret"), "owner": owner}
        assert (await server.post("/v1/load_lora_adapter", body, **key("op"))).status == 200
        for path, request in ROUTES.items():
            assert (await server.post(path, {**request, "model": "secret"}, **key("alice"))).status == 200, path
            replies: list[Response] = []
            for name in ("secret", "absent"):
                replies.append(await server.post(path, {**request, "model": name}, **key("bob")))
            assert [reply.status for reply in replies] == [404, 404]
            assert replies[0].body.replace(b"secret", b"absent") == replies[1].body
        for path, request in (
            ("/tokenize", {"text": "a"}),
            ("/detokenize", {"tokens": [1]}),
            ("/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
        ):
            assert (await server.post(path, {**request, "model": "secret"}, **key("bob"))).status == 404, path
            assert (await server.post(path, {**request, "model": "secret"}, **key("alice"))).status == 200, path
        assert (await server.post("/generate", {"text": "a", "lora_path": "secret"}, **key("bob"))).status == 404
        for name, count in (("alice", 2), ("bob", 1)):
            headers = [(k.encode(), v.encode()) for k, v in key(name).items()]
            assert len((await server.request("GET", "/v1/models", headers=headers)).json()["data"]) == count
            assert (await server.request("GET", "/v1/models/secret", headers=headers)).status == (200 if name == "alice" else 404)
            assert b"secret" not in (await server.request("GET", "/metrics", headers=headers)).body
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter", "/unload_lora_adapter"):
            assert (await server.post(path, body, **key("alice"))).status in (401, 403)
            assert (await server.post(path, body)).status == 401
        headers = [(k.encode(), v.encode()) for k, v in key("alice").items()]
        assert (await server.request("PUT", "/v1/lora_adapters/x", b"", headers)).status in (401, 403)
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "secret"}, **key("op"))).status == 404
        assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "secret", "owner": owner}, **key("op"))).status == 200


# waiting ------------------------------------------------------------------------------------------


async def test_a_request_waits_for_its_adapter_no_longer_than_it_may(tmp_path: Path) -> None:
    async with adapters_of(tmp_path, "a", "b", adapters={"enabled": True, "max_loaded": 1}) as server:
        assert server.services.adapters is not None
        uses = await server.services.adapters.acquire(["b"], "")
        reply = await server.post("/v1/completions", {"prompt": "x", "model": "a", "timeout": 0.1})
        assert reply.status == 504
        waiting = asyncio.create_task(server.post("/v1/completions", {"prompt": "x", "model": "a"}))
        await asyncio.sleep(0.05)
        assert (await server.post("/v1/completions", {"prompt": "x"})).status == 200  # others do not wait
        uses["b"].version.release()
        assert (await waiting).status == 200
        assert server.services.client.num_outstanding == 0
        refused = await server.post("/generate", {"text": ["x", "y"], "lora_path": ["a", "b"]})
        assert refused.status == 400
        assert "names 2 adapters, and the server holds 1" in refused.json()["error"]["message"]


async def test_an_adapter_that_goes_while_a_request_is_prepared(tmp_path: Path) -> None:
    async with adapters_of(tmp_path, "a", "b", "c", adapters={"enabled": True, "max_loaded": 1}) as server:
        assert server.services.adapters is not None
        uses = await server.services.adapters.acquire(["c"], "")
        waiting = [asyncio.create_task(server.post("/v1/completions", {"prompt": "x", "model": name})) for name in "ab"]
        await asyncio.sleep(0.05)
        unloading = [asyncio.create_task(server.services.adapters.unload(name)) for name in "ab"]
        await asyncio.sleep(0.01)
        digest = [
            version.digest for version in server.services.adapters.list_versions() if version.num_users and version is not uses["c"].version
        ]
        uses["c"].version.release()
        assert [(await each).status for each in waiting] == [200, 404]  # the first one's turn had come
        await asyncio.gather(*unloading)
        assert ran(server) == set(digest)


async def test_batch_lines_have_adapters(tmp_path: Path) -> None:
    async with adapters_of(tmp_path, "sql", batches={"folder": str(tmp_path / "batches")}) as server:
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1, "model": model}}
            for i, model in enumerate(("sql", "frame-tiny", "none"))
        ]
        content = b"\n".join(map(msgspec.json.encode, lines))
        head = b"--b\r\ncontent-disposition: form-data; name="
        form = head + b"purpose\r\n\r\nbatch\r\n" + head + b"file; filename=f\r\n\r\n" + content + b"\r\n--b--\r\n"
        headers = [(b"content-type", b"multipart/form-data; boundary=b")]
        file = (await server.request("POST", "/v1/files", form, headers)).json()
        batch = (await server.post("/v1/batches", {"input_file_id": file["id"], "endpoint": "/v1/completions"})).json()
        while batch["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.02)
            batch = (await server.request("GET", f"/v1/batches/{batch['id']}")).json()
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert ran(server) == {digest_of(server, "sql"), ""}
