"""What the holder of a key reads about the server: no totals of other keys' requests, no paths."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.http.operations.page import describe
from frame.entrypoints.http.protocol.api_route import Access
from tests.entrypoints.inprocess import CPU, serving
from tests.entrypoints.published import ROUTES

BOB = [(b"authorization", b"Bearer bob-key")]


def keys(folder: Path, *names: str, **more: Any) -> dict[str, Any]:
    file = folder / "keys"
    file.write_text("\n".join(names))
    return {"server": {"api_keys": str(file), **more}}


async def test_live_numbers_tell_nothing_about_other_keys(tmp_path: Path) -> None:
    async with serving(keys(tmp_path, "alice-key", "bob-key")) as server:
        before = (await server.request("GET", "/page/live.json", b"", BOB)).json()
        body = {"text": "a prompt", "sampling_params": {"max_new_tokens": 2}}
        assert (await server.post("/generate", body, authorization="Bearer alice-key")).status == 200
        after = (await server.request("GET", "/page/live.json", b"", BOB)).json()
        assert {**after, "time": before["time"]} == before
        assert {name for name, value in after.items() if value is not None} == {"time"}
        assert (await server.request("GET", "/metrics", b"", BOB)).status == 200  # as documented without an admin listener


@pytest.mark.parametrize(("names", "more"), [(["bob-key"], {}), (["alice-key", "bob-key"], {"share_cache": True})])
async def test_keys_of_one_owner_read_totals(tmp_path: Path, names: list[str], more: dict[str, Any]) -> None:
    async with serving(keys(tmp_path, *names, admin_port=1, **more)) as server:
        assert (await server.request("GET", "/page/live.json", b"", BOB)).json()["prompt_tokens"] == 0
        assert (await server.request("GET", "/metrics", b"", BOB)).status == 200


async def test_metrics_of_several_keys_are_on_the_admin_listener(tmp_path: Path) -> None:
    async with serving(keys(tmp_path, "alice-key", "bob-key", admin_port=1)) as server:
        reply = await server.request("GET", "/metrics", b"", BOB)
        assert (reply.status, reply.json()["error"]["code"]) == (403, "admin_only")


async def test_no_response_has_a_path_of_the_server(tmp_path: Path) -> None:
    """Each route that needs no arguments, and the descriptions of plugins that cannot be used."""
    sections = keys(tmp_path, "alice-key", "bob-key")
    prepared = prepare(FrameConfig.model_validate({**sections, "model": {"path": "frame-tiny", "max_context": 512}}), CPU, is_served=True)
    async with serving(sections) as server:
        server.services.about = describe(prepared, {})
        for route in ROUTES:
            if "GET" not in (route.methods or ()) or "{" in route.path or route.access is Access.ADMIN:
                continue
            body = (await server.request("GET", route.path, b"", BOB)).body.decode()
            for folder in (sys.prefix, str(Path.cwd()), str(tmp_path)):
                assert f"{folder}/" not in body, route.path
