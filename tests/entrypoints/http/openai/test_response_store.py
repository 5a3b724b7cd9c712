"""The store of responses: separate by tenant, and within its bounds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frame.entrypoints.http.openai import response_store
from frame.entrypoints.http.openai.response_objects import replay_events
from frame.entrypoints.http.openai.response_store import OVERHEAD, EventLog, ResponseStore
from frame.entrypoints.http.protocol.bodies import MAX_NODES
from tests.entrypoints.inprocess import serving


def test_another_tenant_cannot_read_or_delete() -> None:
    store = ResponseStore(4, 10_000, 60.0)
    store.put("a", "one", b"{}", b"[]")
    assert store.get("a", "two") is None
    assert not store.delete("a", "two")
    assert store.get("a", "one") is not None
    assert store.delete("a", "one")
    assert (len(store), store.num_bytes) == (0, 0)


def test_oldest_entries_are_evicted_at_the_bounds() -> None:
    store = ResponseStore(3, 3 * (OVERHEAD + 100), 60.0)
    for number in range(20):
        store.put(str(number), "", b"x" * 98, b"[]")
    assert [name for name in map(str, range(20)) if store.get(name, "")] == ["17", "18", "19"]
    store.put("large", "", b"x" * 250, b"[]")
    assert (len(store), store.get("18", ""), store.get("large", "") is None) == (2, None, False)
    store.put("too large", "", b"x" * 10_000, b"[]")
    assert store.get("too large", "") is None
    store.put("large", "", b"x", b"[]")  # replaces the entry
    assert store.num_bytes == 2 * OVERHEAD + 100 + 3


def test_running_response_is_evicted_after_the_ended_ones() -> None:
    store = ResponseStore(3, 100_000, 60.0)
    store.put("running", "", b"{}", b"[]", is_running=True)
    for number in range(10):
        store.put(str(number), "", b"{}", b"[]")
    assert store.get("running", "") is not None
    assert [name for name in map(str, range(10)) if store.get(name, "")] == ["8", "9"]
    for number in range(10):  # the number stays bounded where all of them run
        store.put(f"running {number}", "", b"{}", b"[]", is_running=True)
    assert len(store) == 3
    assert store.get("running", "") is None
    store.put("ended", "", b"{}", b"[]")
    assert store.get("ended", "") is not None
    assert len(store) == 3


def test_running_response_is_evicted_after_the_ended_ones_by_bytes_of_all_tenants() -> None:
    store = ResponseStore(100, 10 * (OVERHEAD + 100), 60.0, share=0.9)
    store.put("running", "one", b"x" * 98, b"[]", is_running=True)
    for number in range(6):
        store.put(str(number), "one", b"x" * 98, b"[]")
    for number in range(6):
        store.put(str(number), "two", b"x" * 98, b"[]")
    assert store.get("running", "one") is not None
    assert store.get("0", "one") is None
    assert store.num_bytes <= 10 * (OVERHEAD + 100)


def test_expired_entries_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(response_store.time, "monotonic", lambda: now[0])
    store = ResponseStore(4, 10_000, 60.0)
    store.put("a", "", b"{}", b"[]")
    now[0] = 30.0
    store.put("b", "", b"{}", b"[]")
    now[0] = 61.0
    assert store.get("a", "") is None
    assert store.get("b", "") is not None
    assert len(store) == 1


def test_store_without_entries_is_off() -> None:
    store = ResponseStore()
    store.put("a", "", b"{}", b"[]")
    assert (store.is_on, len(store)) == (False, 0)


def test_large_tenant_does_not_evict_entries_of_a_small_one() -> None:
    store = ResponseStore(8, 8 * (OVERHEAD + 100), 60.0, share=0.5)
    store.put("mine", "quiet", b"x" * 98, b"[]")
    for number in range(40):
        assert store.put(f"{number}", "loud", b"x" * 98, b"[]")
    assert [name for name in map(str, range(40)) if store.get(name, "loud")] == ["36", "37", "38", "39"], (
        "a tenant may fill half of the bounds"
    )
    for tenant in ("loud 2", "loud 3"):
        for number in range(40):
            assert store.put(f"{number}", tenant, b"x" * 98, b"[]")
    assert store.get("mine", "quiet") is not None, "the largest tenants lose entries"
    assert len(store) == 8
    assert store.num_bytes == 8 * (OVERHEAD + 100)


def test_entry_larger_than_the_share_is_not_stored() -> None:
    store = ResponseStore(8, 4000, 60.0, share=0.5)
    assert not store.put("a", "one", b"x" * 2000, b"[]")
    assert store.put("a", "", b"x" * 2000, b"[]"), "without keys there is one tenant"
    assert store.num_bytes == 2000 + 2 + OVERHEAD


async def test_events_count_and_are_dropped_at_the_byte_limit() -> None:
    store, log = ResponseStore(8, 4000, 60.0), EventLog()
    store.put("other", "", b"x" * 1000, b"[]")
    store.put("a", "", b"{}", b"[]", log=log)
    store.add_events("a", "", log, b"one\n\ntwo\n\nthree\n\n")
    assert await log.read(1) == [b"two\n\n", b"three\n\n"]
    assert store.num_bytes == 1000 + 2 + 4 + 2 * OVERHEAD + log.size
    store.add_events("a", "", log, b"x" * 2000 + b"\n\n")
    assert store.get("other", "") is None, "the log's own entry is the newest"
    store.add_events("a", "", log, b"x" * 2000 + b"\n\n")
    assert (log.is_lost, await log.read(3)) == (True, [])
    assert store.num_bytes == 4 + OVERHEAD
    store.delete("a", "")
    assert store.num_bytes == 0


async def test_readers_end_with_the_log_or_on_disconnect() -> None:
    log, gone = EventLog(), asyncio.Event()
    waiting, leaving = asyncio.create_task(log.read(0)), asyncio.create_task(log.read(0, gone.is_set))
    await asyncio.sleep(0)
    gone.set()
    log.wake()
    assert await leaving == []
    assert not waiting.done()
    log.add(b"one\n\n")
    log.close()
    assert (await waiting, await log.read(1)) == ([b"one\n\n"], [])


async def test_large_responses_of_one_key_do_not_evict_those_of_another(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("quiet\nloud\n")
    async with serving({"server": {"api_keys": str(keys), "response_store_bytes": 32_768}}) as served:

        async def create(key: str, text: str) -> str:
            asked = {"input": text, "max_output_tokens": 1}
            return str((await served.post("/v1/responses", asked, authorization=f"Bearer {key}")).json()["id"])

        async def status(key: str, name: str) -> int:
            headers = [(b"authorization", f"Bearer {key}".encode())]
            return (await served.request("GET", f"/v1/responses/{name}", headers=headers)).status

        mine = await create("quiet", "Hello")
        theirs = [await create("loud", "x" * 200 + str(number)) for number in range(24)]
        assert await status("quiet", mine) == 200
        assert await status("loud", theirs[-1]) == 200
        assert await status("loud", theirs[0]) == 404, "the key's own oldest response is evicted"
        assert await status("loud", mine) == 404
        assert served.services.responses.num_bytes <= 32_768


def test_items_of_an_entry_are_bounded_like_a_request_body() -> None:
    store = ResponseStore(4, 100_000_000, 60.0, max_items_bytes=2_000_000)
    assert not store.put("a", "", b"{}", b"[" + b"{}," * (MAX_NODES + 1) + b"{}]"), "decoding so many values takes too long"
    assert not store.put("a", "", b"{}", b'["' + b"x" * 2_000_000 + b'"]')
    assert store.put("a", "", b"{}", b"[]")
    assert not store.append_items("a", "", [{}] * (MAX_NODES + 1))
    assert store.get("a", "") is not None, "a refused append changes nothing"
    assert store.append_items("a", "", [{"id": "x"}])


async def test_conversations_and_references_are_separate_by_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("mine\nother\n")
    async with serving({"server": {"api_keys": str(keys)}}) as served:

        async def request(key: str, method: str, path: str, body: Any = None) -> Any:
            headers = [(b"authorization", f"Bearer {key}".encode())]
            reply = await served.request(method, path, b"" if body is None else msgspec.json.encode(body), headers)
            return reply.status, reply.json()

        items = [{"role": "user", "content": "secret"}]
        _, conversation = await request("mine", "POST", "/v1/conversations", {"items": items})
        path = f"/v1/conversations/{conversation['id']}"
        _, listed = await request("mine", "GET", path + "/items")
        name = listed["data"][0]["id"]
        reference = {"input": [{"type": "item_reference", "id": name}], "max_output_tokens": 1}
        begun = {"input": "x", "max_output_tokens": 1, "conversation": conversation["id"]}
        tries = [("GET", path, None), ("POST", path, {"metadata": {}}), ("DELETE", path, None), ("GET", path + "/items", None),
                 ("POST", path + "/items", {"items": items}), ("GET", f"{path}/items/{name}", None),
                 ("DELETE", f"{path}/items/{name}", None), ("POST", "/v1/responses", reference),
                 ("POST", "/v1/responses", begun)]  # fmt: skip
        for method, where, body in tries:
            status, response = await request("other", method, where, body)
            assert (status, "secret" in str(response)) == (404, False), (method, where)
        assert (await request("mine", "POST", "/v1/responses", reference))[0] == 200
        assert (await request("mine", "GET", f"{path}/items/{name}"))[0] == 200
        many = [{"type": "item_reference", "id": f"msg_{number:032x}_0"} for number in range(40)]
        status, reply = await request("mine", "POST", "/v1/responses", {"input": many})
        assert (status, reply["error"]["param"]) == (404, "input[0].id")
        for number in range(20):
            one = [{"role": "user", "content": str(number)}]
            many[number] = {"id": (await request("mine", "POST", "/v1/conversations", {"items": one}))[1]["id"]}
        names = [(await request("mine", "GET", f"/v1/conversations/{many[number]['id']}/items"))[1]["data"][0] for number in range(20)]
        status, reply = await request("mine", "POST", "/v1/responses", {"input": [{"id": each["id"]} for each in names]})
        assert (status, "items of more than 16" in reply["error"]["message"]) == (400, True)


async def test_a_cancelled_response_stays_cancelled() -> None:
    """The engine ends it later, and may have finished it before it reads of the cancellation."""
    request = {"model": "frame-tiny", "input": "hi", "background": True, "max_output_tokens": 20}
    async with serving() as server:
        for is_deleted in (False, True):
            await server.services.client.send_command("pause")
            name = f"/v1/responses/{(await server.post('/v1/responses', request)).json()['id']}"
            assert (await server.post(f"{name}/cancel", {})).json()["status"] == "cancelled"
            assert (await server.request("GET", name)).json()["status"] == "cancelled"
            if is_deleted:
                assert (await server.request("DELETE", name)).status == 200
            await server.services.client.send_command("continue")
            for _ in range(1000):
                if not server.services.responses._cancelled:
                    break
                await asyncio.sleep(0.01)
            found = await server.request("GET", name)
            assert found.status == 404 if is_deleted else found.json()["status"] == "cancelled"
            assert not server.services.responses._cancelled


async def test_a_response_in_progress_has_no_items_for_the_next_one() -> None:
    request = {"model": "frame-tiny", "input": "hi", "max_output_tokens": 4}
    async with serving() as server:
        await server.services.client.send_command("pause")
        first = (await server.post("/v1/responses", request | {"background": True})).json()
        refused = await server.post("/v1/responses", request | {"previous_response_id": first["id"]})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "previous_response_id")
        assert "is in progress; wait for its end" in refused.json()["error"]["message"]
        await server.services.client.send_command("resume")
        for _ in range(1000):
            if (await server.request("GET", f"/v1/responses/{first['id']}")).json()["status"] != "in_progress":
                break
            await asyncio.sleep(0.01)
        assert (await server.post("/v1/responses", request | {"previous_response_id": first["id"]})).status == 200


def test_a_replayed_failed_response_begins_without_its_error() -> None:
    body = {"id": "resp_1", "status": "failed", "error": {"code": "server_error", "message": "it failed"}, "output": []}
    events = [json.loads(event.partition(b"data: ")[2]) for event in replay_events(body).split(b"\n\n")[:-1]]
    assert [event["response"]["error"] for event in events] == [None, None, body["error"]]


def test_a_response_that_finishes_after_its_cancellation_keeps_its_items() -> None:
    store = ResponseStore(4, 10_000, 60.0)
    store.put("a", "", b"{}", b"[1]", 1)
    store.cancel("a", "", b"{ }")
    found = store.get("a", "")
    assert found is not None and (found.body, found.items, found.num_input) == (b"{ }", b"[1]", 1)
    assert store.is_cancelled("a") and not store.is_cancelled("b")
    store.forget_cancelled("a")
    assert not store.is_cancelled("a")


async def test_a_response_that_is_too_large_to_be_stored_says_so() -> None:
    many = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 1400
    asked = {"input": many, "truncation": "auto", "max_output_tokens": 1}
    async with serving() as server:
        for more in ({"store": True}, {"background": True}, {"background": True, "store": True}):
            reply = await server.post("/v1/responses", asked | more)
            error = reply.json()["error"]
            assert (reply.status, error["param"]) == (400, "input"), reply.body
            remedy = "send fewer or shorter items" + ("" if "background" in more else ", or store: false")
            assert error["message"] == f"input has 2800 items, more than one stored response may hold; {remedy}"
        assert not server.sent, "refused before the start"
        reply = await server.post("/v1/responses", asked)
        assert (reply.status, reply.json()["store"]) == (200, False)
        assert len(server.services.responses) == 0
        first = (await server.post("/v1/responses", asked | {"input": many[:2600], "store": True})).json()
        assert first["store"] is True
        more = {"input": many[:400], "previous_response_id": first["id"], "store": True}
        error = (await server.post("/v1/responses", asked | more)).json()["error"]
        assert error["param"] == "previous_response_id"
        assert error["message"].startswith("input has 400 items and the conversation before it 2601, more than one")
        assert (await server.post("/v1/responses", asked | more | {"store": None})).json()["store"] is False


async def test_log_probabilities_do_not_make_a_response_too_large() -> None:
    include = ["message.output_text.logprobs"]
    asked = {"input": "hi", "max_output_tokens": 400, "ignore_eos": True, "include": include, "top_logprobs": 20}
    async with serving() as server:
        made = (await server.post("/v1/responses", asked)).json()
        stored = (await server.request("GET", f"/v1/responses/{made['id']}")).json()
        assert made["store"] is True
        assert stored["output"] == made["output"]
        assert len(stored["output"][0]["content"][0]["logprobs"]) > 306, "107 JSON parts each"


async def test_a_response_whose_output_makes_it_too_large_is_not_said_to_be_stored() -> None:
    asked = {"input": "hi", "max_output_tokens": 400, "ignore_eos": True}
    async with serving({"server": {"response_store_bytes": 3500}}) as server:
        made = (await server.post("/v1/responses", asked)).json()
        assert made["store"] is False
        assert (await server.request("GET", f"/v1/responses/{made['id']}")).status == 404
