"""The table of docs/security.md: each known vulnerability of other servers has a test that
exists."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np
import pytest

from frame.core.interfaces.cache import PrefixCacheContext
from frame.plugins.loader import load_registry
from frame.plugins.prefix_caches.radix import RadixCache
from frame.testing.contexts import EVICTION
from frame.testing.scheduler_rig import OldestFirst
from tests.architecture.source import ROOT, is_under, package
from tests.entrypoints.inprocess import serving
from tests.entrypoints.published import ROUTES

KNOWN = (
    "2024-8768", "2024-8939", "2025-24357", "2025-25183", "2025-29770", "2025-29783", "2025-32444", "2025-30165", "2025-30202",
    "2025-46560", "2025-46570", "2025-46722", "2025-47277", "2025-48887", "2025-48942", "2025-48943", "2025-48944", "2025-48956",
    "2025-9141", "2025-6242", "2025-59425", "2025-61620", "2025-62426", "2025-62164", "2025-66448", "2026-22807", "2026-27893",
    "2026-22773", "2026-22778", "2026-54236", "2026-24779", "2026-34753", "2026-34756", "2026-5497", "2026-47155", "2026-48746",
    "2026-53923", "2026-55514", "2026-55646", "2026-9540", "2025-10164", "2026-3059", "2026-3060", "2026-3989", "2026-5760",
    "2026-7301", "2026-7302", "2026-7304", "2026-7669", "2025-23254", "2024-50050",
)  # fmt: skip
ROW = re.compile(r"^\| ((?:CVE|GHSA)[^|]+)\|[^|]+\|[^|]+\| `([\w/]+\.py)::(\w+)` \|$", re.MULTILINE)
MESSAGES = [{"role": "user", "content": "x"}]


def rows() -> list[tuple[str, str, str]]:
    return ROW.findall((ROOT / "docs" / "security.md").read_text())


def test_every_known_vulnerability_has_a_row() -> None:
    named = " ".join(ids for ids, _, _ in rows())
    assert [number for number in KNOWN if f"CVE-{number}" not in named] == []


@pytest.mark.parametrize(("file", "name"), sorted({(file, name) for _, file, name in rows()}))
def test_every_row_names_a_test(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in tree.body)


async def test_empty_prompts() -> None:
    async with serving() as server:
        for path, body in (
            ("/v1/completions", {"prompt": []}),
            ("/v1/completions", {"prompt": [[]]}),
            ("/v1/completions", {"prompt": "", "add_special_tokens": False}),
            ("/generate", {"input_ids": []}),
            ("/v1/chat/completions", {"messages": []}),
        ):
            reply = await server.post(path, {**body, "max_tokens": 1} if path != "/generate" else body)
            assert (reply.status, "is empty" in reply.json()["error"]["message"]) == (400, True)
        begins = (await server.post("/tokenize", {"prompt": ""})).json()["count"]  # with the token that begins a text
        for path, body in (("/v1/completions", {"prompt": "", "max_tokens": 1}), ("/generate", {"text": ""})):
            assert (await server.post(path, body)).status == (200 if begins else 400)
        assert (await server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})).status == 200


async def test_best_of() -> None:
    async with serving() as server:
        for best_of in (10**9, 2, -1):
            assert (await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "best_of": best_of})).status == 400


def test_prefixes_are_compared_by_token() -> None:
    """Tokens with equal hashes (-1 and -2 in CPython) or equal sums are different prefixes."""
    cache = RadixCache(PrefixCacheContext(2, 4096, OldestFirst(EVICTION)))
    for number, tokens in enumerate(([1, 4], [4, 1], [2, 3], [2**31 - 1, 0])):
        given = np.array(tokens, np.int32)
        found = cache.match(given)
        assert found.num_tokens == 0
        cache.insert(given, np.array([number + 1], np.int32), "")
        assert cache.match(given).num_tokens == 2
        assert cache.match(given, "another").num_tokens == 0


PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "video_url", "video_url": {"url": "http://127.0.0.1:1/x.mp4"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "file", "file": {"file_data": "AAAA"}},
    {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}},
    {"type": "input_image", "image_url": "http://127.0.0.1:1/x.png"},
]


@pytest.mark.parametrize("part", PARTS, ids=[f"{part['type']}-{i}" for i, part in enumerate(PARTS)])
async def test_media_is_refused(part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "x"}, part]
    message = {"role": "user", "content": content}
    async with serving() as server:
        for path, body in (
            ("/v1/chat/completions", {"messages": [message], "max_tokens": 1}),
            ("/v1/messages", {"model": "frame-tiny", "messages": [message], "max_tokens": 1}),
            ("/v1/responses", {"input": [message], "max_output_tokens": 1}),
            ("/tokenize", {"messages": [message]}),
        ):
            assert (await server.post(path, body)).status == 400, path


async def test_no_route_takes_tensors() -> None:
    fields = {name for route in ROUTES if route.body_model for name in route.body_model.model_fields}
    fields -= {"tensors", "serialized_named_tensors"}  # of operators' updates: a list of typed fields, and a form that is refused
    assert not {name for name in fields if "embeds" in name or "tensor" in name or "pickle" in name or "media" in name}


FETCHING = ("requests", "urllib.request", "http.client", "aiohttp", "httpx", "ftplib", "huggingface_hub")
# programs and libraries that connect to a server
TALKERS = ("cli", "hub", "tools.server_calls", "tools.eval", "tools.bench", "offline.remote_client", "router")
CLIENTS = (
    *("frame.testing", "frame.lang", "frame.rl", "frame_ray.replicas", *(f"frame.entrypoints.{name}" for name in TALKERS)),
    "frame.plugins.key_stores.http",  # asks the operator's address about a key
)


@pytest.mark.slow
def test_the_server_fetches_nothing() -> None:
    found = [
        f"{each.name} imports {use.target}"
        for each in package()
        if not is_under(each.name, *CLIENTS)
        and any(name.partition(".")[0] in each.text for name in FETCHING)  # the others need not be parsed
        for use in each.imports
        if is_under(use.target, *FETCHING)
    ]
    assert found == []


def test_remote_code_is_off_by_default() -> None:
    found = [
        each.at(node)
        for each in package()
        if "trust_remote_code" in each.text  # the others need not be parsed
        for node in ast.walk(each.tree)
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and isinstance(node.value, ast.Constant) and node.value.value
    ]
    assert found == []


async def test_paths_lead_nowhere() -> None:
    async with serving() as server:
        for path in ("/page/../../../../etc/passwd", "/page/..%2f..%2fetc%2fpasswd", "/page/app.py", "/page/%2e%2e/app.py",
                     "/v1/models/../../etc", "/v1/responses/../../x", "/page/..\\..\\x"):  # fmt: skip
            reply = await server.request("GET", path)
            assert reply.status == (400 if "%2f" in path else 404), path
            assert b"root:" not in reply.body


def test_formats_are_few() -> None:
    assert {record.name for record in load_registry(installed=False).records("weight_source")} == {"safetensors", "dummy"}
