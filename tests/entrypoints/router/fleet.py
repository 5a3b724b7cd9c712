"""A router in front of servers of the embedded model in float32 that share a fleet key, and streams
whose content is compared with that of one server. Used by the tests of streams that move."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from frame.checkpoint.model_config import find_model
from tests.entrypoints.serving import RunningRouter, RunningServer

KEY = {"FRAME_FLEET_KEY": "the fleet key of these tests"}
FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--max-total-tokens", "32768", "--log-level", "info")
PATIENCE = 240.0  # seconds
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                                               "required": ["a", "b"], "additionalProperties": False}},
}  # fmt: skip


def start_server(port: int = 0, *flags: str, key: dict[str, str] | None = None) -> RunningServer:
    return RunningServer(Path(find_model("frame-tiny")), *FLAGS, *flags, *(("--port", str(port)) if port else ()), fake=False,
                         env=KEY if key is None else key)  # fmt: skip


class FleetRouter(RunningRouter):
    """`frame router` with these flags and the fleet key."""

    def __init__(self, *flags: str, key: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "frame", "router", "--port", "0", "--health-interval", "0.2", *flags]
        self._start(command, KEY if key is None else key, True)

    def moves(self, cause: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.search(rf'frame_router_moved_streams_total{{cause="{cause}"}} (\S+)', text)
        return float(found[1]) if found else 0.0


class Score(float):
    """A log-probability, which depends a little on what else is in the batch."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Stream:
    """One streamed request. `events`: what came, decoded; `pause`: the longest time between two of
    them, in seconds."""

    path: str
    body: dict[str, Any]
    events: list[Any] = field(default_factory=list)
    pause: float = 0.0

    def read(self, url: str, on_event: Callable[[], None] = lambda: None) -> Stream:
        self.events, self.pause, last = [], 0.0, 0.0
        with httpx.stream("POST", url + self.path, json=self.body, timeout=PATIENCE) as reply:
            assert reply.status_code == 200, (self.path, self.body, reply.read())
            assert "x-frame-handoff" not in reply.headers
            for line in reply.iter_lines():
                if self.add_line(line):
                    now = time.monotonic()
                    self.pause, last = max(self.pause, now - last if last else 0.0), now
                    on_event()
        return self

    def add_line(self, line: str) -> bool:
        """Add a line of the response. -> whether it is an event."""
        data = line.removeprefix("data: ")
        if not data or line.startswith("event:"):
            return False
        self.events.append(data if data == "[DONE]" else json.loads(data))
        return True

    def with_bytes(self, data: bytes) -> Stream:
        """The same request with this response."""
        stream = Stream(self.path, self.body)
        for line in data.decode().split("\n"):
            stream.add_line(line)
        return stream

    @property
    def content(self) -> Any:
        """What has to be equal however the stream was cut into events, by whichever server."""
        reader = _READERS[self.path]
        if any(isinstance(event, dict) and (event.get("error") or event.get("type") == "error") for event in self.events):
            return {"error": self.events[-1]}
        return reader([event for event in self.events if event != "[DONE]"]) | {"done": self.events[-1] == "[DONE]"}


def _read_openai(events: list[Any]) -> dict[str, Any]:
    assert len({event["id"] for event in events}) == len({event["created"] for event in events}) == 1
    found: dict[str, Any] = {"usage": None, "roles": 0}
    for event in events:
        if event.get("usage"):
            found["usage"] = {**event["usage"], "prompt_tokens_details": None}  # what another request left in the cache
            details = found["usage"].pop("completion_tokens_details", {})
            found["usage"]["reasoning_tokens"] = details.get("reasoning_tokens", 0)  # others count drafts
        for choice in event["choices"]:
            mine = found.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "calls": {}, "finish": [], "reasoning": ""})
            delta = choice.get("delta", {"content": choice.get("text")})
            found["roles"] += "role" in delta
            mine["text"] += delta.get("content") or ""
            mine["reasoning"] += delta.get("reasoning_content") or ""
            mine["ids"] += choice.get("token_ids") or []
            for call in delta.get("tool_calls") or ():
                known = mine["calls"].setdefault(call["index"], {"names": [], "ids": 0, "arguments": ""})
                known["names"] += [call["function"]["name"]] if "name" in call["function"] else []
                known["ids"] += "id" in call
                known["arguments"] += call["function"].get("arguments") or ""
            if (logprobs := choice.get("logprobs")) is not None:
                scores = logprobs.get("content") or [
                    {"token": t, "logprob": p, "offset": o}
                    for t, p, o in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True)
                ]
                mine["logprobs"] += [(each["token"], Score(each["logprob"] or 0), each.get("offset")) for each in scores]
            if choice["finish_reason"]:
                mine["finish"].append((choice["finish_reason"], choice.get("stop_reason")))
    return found


def _read_generate(events: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for event in events:
        meta = event["meta_info"]
        before = found.get(event.get("index", 0), {"ids": []})["ids"]
        assert event["output_ids"][: len(before)] == before  # nothing is taken back, or repeated
        scores = [(Score(score), token) for score, token, *_ in meta.get("output_token_logprobs", ())]
        prompt = [(Score(score or 0), token) for score, token, *_ in meta.get("input_token_logprobs", ())]
        found[event.get("index", 0)] = {"text": event["text"], "ids": event["output_ids"], "scores": scores, "prompt": prompt,
                                        "finish": meta["finish_reason"],
                                        "usage": (meta["prompt_tokens"], meta["completion_tokens"])}  # fmt: skip
    return found


def _read_anthropic(events: list[Any]) -> dict[str, Any]:
    kinds = [event["type"] for event in events]
    blocks: dict[int, list[Any]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] not in blocks
            blocks[event["index"]] = [event["content_block"]["type"], event["content_block"].get("name"), ""]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]][2] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
    last = events[-2]
    return {"starts": kinds.count("message_start"), "blocks": blocks, "stop": last["delta"], "output": last["usage"]["output_tokens"]}


def _read_ollama(events: list[Any]) -> dict[str, Any]:
    text = "".join(event.get("response") or event.get("message", {}).get("content") or "" for event in events)
    last = events[-1]
    return {"text": text, "done": [event["done"] for event in events].count(True), "reason": last["done_reason"],
            "counts": (last.get("prompt_eval_count"), last.get("eval_count"))}  # fmt: skip


def _read_cohere(events: list[Any]) -> dict[str, Any]:
    text = "".join(event["delta"]["message"]["content"].get("text", "") for event in events if event["type"] == "content-delta")
    starts = [event["type"] for event in events].count("message-start")
    return {"text": text, "starts": starts, "end": events[-1]["delta"]["finish_reason"]}


_READERS = {
    "/v1/chat/completions": _read_openai, "/v1/completions": _read_openai, "/generate": _read_generate, "/v1/messages": _read_anthropic,
    "/api/generate": _read_ollama, "/api/chat": _read_ollama, "/v2/chat": _read_cohere,
}  # fmt: skip


def make_streams(count: int, length: int = 96) -> list[Stream]:
    """Streams of all routes that move, with each feature in turn."""
    made = []
    for number in range(count):
        messages = [{"role": "user", "content": f"Count from {number} and say why, please"}]
        chat: dict[str, Any] = {"messages": messages, "stream": True, "max_tokens": length, "ignore_eos": True, "seed": number,
                                "temperature": 1.0, "stream_options": {"include_usage": True}}  # fmt: skip
        text: dict[str, Any] = {"prompt": f"{number} apples and", "stream": True, "max_tokens": length, "ignore_eos": True, "seed": number,
                                "temperature": 0.9, "stream_options": {"include_usage": True}}  # fmt: skip
        ids = {"input_ids": [5, 6, 40 + number], "stream": True,
               "sampling_params": {"max_new_tokens": length, "ignore_eos": True, "sampling_seed": number, "temperature": 1.0}}  # fmt: skip
        kinds: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {**chat, "return_token_ids": True}),
            ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}),
            ("/v1/chat/completions", {**chat, "n": 4, "max_tokens": length // 2}),
            ("/v1/chat/completions", {**chat, "tools": [TOOL], "tool_choice": "required", "ignore_eos": False}),
            (
                "/v1/chat/completions",
                {
                    **chat,
                    "ignore_eos": False,
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {
                            "name": "x",
                            "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 60},
                        },
                    },
                },
            ),
            ("/v1/completions", {**text, "return_token_ids": True}),
            ("/v1/completions", {**text, "logprobs": 1, "echo": True}),
            ("/v1/completions", {**text, "stop": ["\n\n\n", "qzx", " the"], "include_stop_str_in_output": True}),
            ("/v1/completions", {**text, "prompt": [f"{number} pears", f"{number} plums"], "n": 2, "max_tokens": length // 2}),
            ("/v1/completions", {**text, "n": 4, "stop": ["e", "1"]}),  # its sequences end one after the other
            ("/generate", ids),
            ("/generate", {**ids, "return_logprob": True, "logprob_start_len": 0}),
            ("/v1/messages", {"model": "frame_tiny", "messages": messages, "max_tokens": length, "stream": True, "temperature": 0.0}),
            ("/api/generate", {"model": "frame_tiny", "prompt": f"{number} nuts", "options": {"num_predict": length, "seed": number}}),
            ("/api/chat", {"model": "frame_tiny", "messages": messages, "options": {"num_predict": length, "seed": number}}),
            ("/v2/chat", {"model": "frame_tiny", "messages": messages, "max_tokens": length, "stream": True, "temperature": 0.0}),
        ]
        made.append(Stream(*kinds[number % len(kinds)]))
    return made


def read_all(streams: list[Stream], url: str) -> list[Any]:
    """The contents of streams that are read at once."""
    with ThreadPoolExecutor(len(streams)) as pool:
        return [stream.content for stream in pool.map(lambda stream: stream.read(url), streams)]
