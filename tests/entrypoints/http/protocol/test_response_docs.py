"""Real responses match the schemas that `/openapi.json` publishes: whole responses, events of
streams and errors. Routes of pooling models are checked in their own tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from frame.interfaces.parsing import ParserContext, ReasoningDelta, ReasoningParser, ToolCallDelta, ToolCallParser, ToolDelta
from tests.entrypoints.adapter_engine import CONFIG, make_adapter, tensors
from tests.entrypoints.inprocess import JSON_TYPE, InProcess, serving
from tests.entrypoints.published import ROUTES, check_response, description

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": TOOL}]
CHAT = {"messages": HI, "max_tokens": 6, "ignore_eos": True}
ALL_CHAT = CHAT | {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1, "n": 2}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PLAIN = {"prompt_logprobs": None}  # they cannot be streamed
TEXT = {"prompt": "hi", "max_tokens": 3, "ignore_eos": True}
ALL_TEXT = TEXT | {"logprobs": 2, "echo": True, "return_token_ids": True, "prompt_logprobs": 1, "n": 2}
RESPONSE = {"input": "hi", "max_output_tokens": 6, "ignore_eos": True}
ALL_RESPONSE = RESPONSE | {"tools": [{"type": "function", **TOOL}], "include": ["message.output_text.logprobs"], "top_logprobs": 1}
ANTHROPIC_TOOLS = {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}
MESSAGE = {"model": "frame-tiny", "messages": HI, "max_tokens": 6}
GENERATE = {"text": "hi", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
ALL_GENERATE = GENERATE | {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}
OLLAMA = {"model": "frame-tiny", "options": {"num_predict": 6}}
JSONL = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 1}}\n'

REQUESTS: list[tuple[str, str, Any]] = [
    *(("POST", "/v1/chat/completions", body) for body in (CHAT, ALL_CHAT, CHAT | STREAM, ALL_CHAT | STREAM | PLAIN)),
    *(("POST", "/v1/chat/completions", CHAT | {"tools": TOOLS} | more) for more in ({}, STREAM)),
    *(("POST", "/v1/chat/completions", CHAT | {"functions": [TOOL]} | more) for more in ({}, STREAM)),
    *(("POST", "/v1/completions", body) for body in (TEXT, ALL_TEXT, TEXT | STREAM, ALL_TEXT | STREAM | PLAIN)),
    *(("POST", "/v1/messages", body) for body in (MESSAGE, MESSAGE | {"stream": True})),
    *(("POST", "/v1/messages", MESSAGE | ANTHROPIC_TOOLS | more) for more in ({}, {"stream": True})),
    ("POST", "/v1/messages/count_tokens", {"model": "frame-tiny", "messages": HI}),
    *(("POST", "/v1/responses", body | more) for body in (RESPONSE, ALL_RESPONSE) for more in ({}, {"stream": True})),
    ("POST", "/v1/responses/input_tokens", {"input": "hi"}),
    ("POST", "/v1/responses/compact", {"input": "hi"}),
    *(("POST", "/generate", body | more) for body in (GENERATE, ALL_GENERATE, GENERATE | {"text": ["a", "b"]})
      for more in ({}, {"stream": True})),
    *(("POST", path, {"text": "hi", "return_token_strs": True}) for path in ("/tokenize", "/v1/tokenize")),
    *(("POST", path, {"tokens": [5, 6]}) for path in ("/detokenize", "/v1/detokenize")),
    ("POST", "/v1/chat/completions/batch", CHAT | {"messages": [HI, HI]}),
    ("POST", "/v1/chat/completions/render", CHAT),
    ("POST", "/v1/completions/render", TEXT),
    *(("POST", "/api/chat", OLLAMA | {"messages": HI} | more) for more in ({}, {"stream": False}, {"tools": TOOLS}, {"messages": []})),
    *(("POST", "/api/generate", OLLAMA | {"prompt": "hi"} | more) for more in ({}, {"stream": False}, {"raw": True}, {"prompt": ""})),
    ("POST", "/api/show", {"model": "frame-tiny"}),
    ("POST", "/separate_reasoning", {"text": "thought"}),
    ("POST", "/parse_function_call", {"text": "call", "tools": TOOLS}),
    *(("POST", "/invocations", body) for body in (CHAT, TEXT | {"stream": True}, GENERATE)),
    ("POST", "/ping", None),
    *(("POST", path, None) for path in (
        "/flush_cache", "/reset_prefix_cache", "/check_integrity", "/pause_generation", "/continue_generation",
        "/get_weight_version", "/pause", "/resume",
    )),
    ("POST", "/abort_request", {"abort_all": True}),
    ("POST", "/open_session", {"capacity_of_str_len": 100, "session_id": "s"}),
    ("POST", "/close_session", {"session_id": "s"}),
    *(("GET", path, None) for path in (
        "/health", "/health/ready", "/readyz", "/health/live", "/livez", "/health_generate", "/ping", "/metrics", "/v1/models",
        "/v1/models/frame-tiny", "/version", "/load", "/tokenizer_info", "/model_info", "/get_model_info", "/server_info",
        "/get_server_info", "/get_weight_version", "/page/live.json", "/page/history.json", "/page/cache.json", "/page/about.json", "/",
        "/page/page.js", "/docs",
        "/openapi.json", "/is_paused", "/is_sleeping", "/get_load", "/api/tags", "/api/ps", "/api/version",
    )),
    # Errors, each in the shape of its API
    ("POST", "/v1/chat/completions", {"messages": 3}),
    ("POST", "/v1/completions", TEXT | {"model": "other"}),
    ("POST", "/v1/messages", {"messages": HI}),
    ("POST", "/v1/responses", {"input": 3}),
    ("GET", "/v1/responses/resp_x", None),
    ("POST", "/api/chat", {"model": "other", "messages": HI}),
    ("POST", "/start_profile", None),
    ("POST", "/stop_profile", None),
    *(("POST", path, {"inputs": 3}) for path in ("/embed", "/v2/embed", "/rerank", "/v1/embeddings", "/pooling", "/v1/moderations")),
    ("POST", "/embed_all", {"inputs": 3}),
    *(("POST", "/v2/chat", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": each}) for each in (False, True)),
    *(("POST", "/v1/chat", {"message": "hi", "max_tokens": 4, "stream": each}) for each in (False, True)),
    ("GET", "/info", None),
    *(("POST", path, {}) for path in ("/v1/rerank", "/v2/rerank", "/v1/score", "/score", "/v1/classify", "/classify", "/api/embed")),
]  # fmt: skip
# Bodies of 200 that need a pooling or speech model, whose tests check them, or a device
ELSEWHERE = {"/embed", "/v2/embed", "/rerank", "/v1/embeddings", "/pooling", "/v1/moderations", "/v1/rerank", "/v2/rerank", "/v1/score",
             "/score", "/v1/classify", "/classify", "/api/embed", "/api/embeddings", "/v1/embed", "/", "/predict", "/similarity",
             "/embed_all", "/start_profile", "/stop_profile", "/update_weights_from_disk",
             "/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation", "/transfer_weights",
             "/init_weights_update_group", "/destroy_weights_update_group", "/update_weights_from_distributed",
             "/update_weights_from_tensor", "/begin_weight_update", "/end_weight_update", "/finish_weight_update",
             "/cancel_weight_update", "/get_world_size", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
             "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"}  # fmt: skip


class Thinks(ReasoningParser):
    """The first piece of the text is reasoning."""

    is_over = False

    def feed(self, text: str) -> ReasoningDelta:
        was_over, self.is_over = self.is_over, self.is_over or bool(text)
        return ReasoningDelta(content=text) if was_over else ReasoningDelta(text)

    def finish(self) -> ReasoningDelta:
        return ReasoningDelta(content="said")


class Calls(ToolCallParser):
    """All text is content, and a call follows."""

    def feed(self, text: str) -> ToolDelta:
        return ToolDelta(text)

    def finish(self) -> ToolDelta:
        return ToolDelta("", (ToolCallDelta(0, "f"), ToolCallDelta(0, None, "{}")))


async def ask(server: InProcess, method: str, path: str, body: Any = None, kind: tuple[bytes, bytes] = JSON_TYPE) -> tuple[str, Any]:
    data = body if isinstance(body, bytes) else b"" if body is None else msgspec.json.encode(body)
    found = await server.request(method, path, data, (kind,))
    shown = check_response(method, path.partition("?")[0], found.status, found.headers["content-type"], found.body)
    return shown, found.json() if found.headers["content-type"] == "application/json" else None


async def stored(server: InProcess) -> set[str]:
    """Responses, conversations, files and batches, which later requests name."""
    seen = set()

    async def go(method: str, path: str, body: Any = None, **more: Any) -> Any:
        shown, found = await ask(server, method, path, body, **more)
        seen.add(shown)
        return found

    name = f"/v1/responses/{(await go('POST', '/v1/responses', RESPONSE))['id']}"
    for path in ("", "/input_items"):
        await go("GET", name + path)
    await go("GET", f"{name}?stream=true")
    await go("DELETE", name)
    waiting = await go("POST", "/v1/responses", RESPONSE | {"background": True, "max_output_tokens": 200})
    await go("POST", f"/v1/responses/{waiting['id']}/cancel")
    conversation = await go("POST", "/v1/conversations", {"items": [{"role": "user", "content": "hi"}]})
    name = f"/v1/conversations/{conversation['id']}"
    await go("GET", name)
    await go("POST", name, {"metadata": {"a": "b"}})
    item = (await go("POST", name + "/items", {"items": [{"role": "assistant", "content": "yes"}]}))["data"][0]["id"]
    for method, path in (("GET", "/items"), ("GET", f"/items/{item}"), ("DELETE", f"/items/{item}"), ("DELETE", "")):
        await go(method, name + path)
    form = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    form += b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + JSONL + b"\r\n--x--\r\n"
    file = (await go("POST", "/v1/files", form, kind=(b"content-type", b"multipart/form-data; boundary=x")))["id"]
    batch = (await go("POST", "/v1/batches", {"input_file_id": file, "endpoint": "/v1/completions"}))["id"]
    for path in ("/v1/files", f"/v1/files/{file}", f"/v1/files/{file}/content", "/v1/batches", f"/v1/batches/{batch}"):
        await go("GET", path)
    await go("POST", f"/v1/batches/{batch}/cancel")
    await go("DELETE", f"/v1/files/{file}")
    return seen


async def adapted(server: InProcess, folder: Path) -> set[str]:
    """Adapters come and go."""
    body = {"lora_name": "a", "lora_path": str(make_adapter(folder / "a"))}
    form = b'--x\r\ncontent-disposition: form-data; name="config"\r\n\r\n' + CONFIG
    form += b'\r\n--x\r\ncontent-disposition: form-data; name="tensors"\r\n\r\n' + tensors(b"1") + b"\r\n--x--\r\n"
    seen = {(await ask(server, "PUT", "/v1/lora_adapters/a", form, (b"content-type", b"multipart/form-data; boundary=x")))[0]}
    for path in ("/v1/models", "/server_info"):
        seen.add((await ask(server, "GET", path))[0])
    for prefix in ("", "/v1"):
        seen.add((await ask(server, "POST", f"{prefix}/load_lora_adapter", body))[0])
        seen.add((await ask(server, "POST", f"{prefix}/unload_lora_adapter", {"lora_name": "a"}))[0])
    return seen


@pytest.mark.slow
async def test_responses_match_the_published_schemas(tmp_path: Path) -> None:
    adapters = {"enabled": True, "folders": [str(tmp_path)], "uploads": True}
    async with serving({"batches": {"folder": str(tmp_path)}, "adapters": adapters}) as server:
        context = ParserContext()
        server.services.reasoning, server.services.tool_calls = lambda: Thinks(context), lambda: Calls(context)
        seen = {(await ask(server, *request))[0] for request in REQUESTS} | await stored(server) | await adapted(server, tmp_path)
        server.services.reasoning = server.services.tool_calls = None
        seen |= {(await ask(server, *request))[0] for request in REQUESTS[:4]}
    published = {
        f"{method} {route.path} {media_type}".replace("*/*", "text/javascript")
        for route in ROUTES
        if route.path not in ELSEWHERE
        for method in route.methods
        for media_type in description()["paths"][route.path_format][method.lower()]["responses"]["200"]["content"]
    }
    assert published - seen == set()


def test_every_route_publishes_its_responses() -> None:
    for path, methods in description()["paths"].items():
        for operation in methods.values():
            assert {"200", "4XX", "5XX"} <= operation["responses"].keys(), path
            for response in operation["responses"].values():
                assert all(body["schema"] for body in response["content"].values()), path
