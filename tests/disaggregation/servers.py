"""A prefill server, a decode server and a router as processes, and a server that computes whole
requests, all of the same model. For the tests of this folder."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from frame.checkpoint.model_config import find_model
from frame.host.authenticated_link import KEY_VARIABLE
from tests.entrypoints.serving import RunningServer, free_port, wait_until
from tests.kv_tiers import faulty_plugin

PATIENCE = 120.0
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--threads", "1", "--page-size", "4"),
    *("--max-model-len", "512", "--max-total-tokens", "65536"),
)
SECRET = {KEY_VARIABLE: "0123456789abcdef0123456789abcdef"}
PARTS = (
    "--min-load-tokens",
    "8",
    "--set",
    "plugins.options.kv_tier/nixl.size_gib=0.25",
    "--set",
    "plugins.options.kv_tier/nixl.lease_seconds=5",
)


class DividingRouter(RunningServer):
    """`frame router` in front of prefill and decode servers."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        flags = [flag for name, urls in (("--prefill", prefill), ("--decode", decode)) for url in urls for flag in (name, url)]
        self._start([sys.executable, "-m", "frame", "router", *flags, "--port", "0", "--health-interval", "0.5"], None, True)


@dataclass
class Deployment:
    """The servers. `port`: of the prefill server's blocks."""

    whole: RunningServer
    prefill: RunningServer
    decode: RunningServer
    router: DividingRouter
    port: int
    stack: ExitStack

    fault: Path | None

    def start(self, mode: str, *flags: str) -> RunningServer:
        return self.stack.enter_context(start(mode, self.port, self.fault, *flags))


def start(mode: str, port: int, fault: Path | None, *flags: str) -> RunningServer:
    more: tuple[str, ...] = () if mode == "whole" else ("--disaggregation-mode", mode, "--disaggregation-port", str(port), *PARTS)
    env = SECRET
    if mode == "decode" and fault is not None:
        more = tuple(flag.replace("kv_tier/nixl", "kv_tier/faulty_nixl") for flag in more)
        more += ("--plugin", str(faulty_plugin.__file__), "--cache-tiers", "faulty_nixl")
        env = {**SECRET, "FAULT_FILE": str(fault)}
    return RunningServer(Path(find_model("frame-tiny")), *FLAGS, *more, *flags, fake=False, env=env)


@contextlib.contextmanager
def deploy(fault: Path | None = None) -> Iterator[Deployment]:
    """fault: the file that says how the decode server's tier fails; see `faulty_tiers`."""
    port = free_port()
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        started = [pool.submit(start, mode, port, fault) for mode in ("whole", "prefill", "decode")]
        whole, prefill, decode = (stack.enter_context(each.result()) for each in started)
        router = stack.enter_context(DividingRouter([prefill.url], [decode.url]))
        yield Deployment(whole, prefill, decode, router, port, stack, fault)


def make_body(number: int, **changes: Any) -> dict[str, Any]:
    """A request whose prompt no other number shares a block with."""
    size = 10 + (number * 37) % 180
    prompt = [7 + (number * 131 + index * index * 3 + index * number) % 900 for index in range(size)]
    temperature = number % 2
    return {"prompt": prompt, "max_tokens": 2 + number % 7, "temperature": temperature, "seed": number, "return_token_ids": True, **changes}


def ask(server: RunningServer, body: dict[str, Any], *, path: str = "/v1/completions") -> tuple[Any, ...]:
    """(text, token ids, finish reason, usage) of a response, streamed or not; (status, error)
    of a failure."""
    if not body.get("stream"):
        response = httpx.post(server.url + path, json=body, timeout=PATIENCE)
        value = response.json()
        if response.status_code != 200:
            return response.status_code, value["error"]["message"]
        choice = value["choices"][0]
        return choice.get("text") or choice["message"]["content"], choice["token_ids"], choice["finish_reason"], value["usage"]
    text, ids, finish, usage = "", [], None, None
    with httpx.stream("POST", server.url + path, json={**body, "stream_options": {"include_usage": True}}, timeout=PATIENCE) as response:
        if response.status_code != 200:
            return response.status_code, json.loads(response.read())["error"]["message"]
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return event["error"]["code"], event["error"]["message"]
            usage = event["usage"] or usage
            for choice in event["choices"]:
                text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                ids += choice.get("token_ids") or []
                finish = choice["finish_reason"] or finish
    return text, ids, finish, usage


def wait_empty(server: RunningServer) -> None:
    """Wait until a prefill server keeps nothing for others."""
    wait_until(lambda: server.metric("frame_kv_leases") == 0 and server.metric("frame_kv_leased_blocks") == 0, 60.0)
