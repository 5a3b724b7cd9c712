"""An open-loop HTTP client: requests are sent at their arrival times, whether or not earlier ones
have been answered.

Sends token ids to `/v1/completions`, which other servers accept too. It parses responses itself,
because general HTTP clients spend more time per event than a server.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from frame.entrypoints.tools.bench.summary import Timing
from frame.entrypoints.tools.bench.workload import Job
from frame.entrypoints.tools.server_calls import make_headers
from frame.host.progress import show_progress

DONE = b"[DONE]"
TIMEOUT = 600.0  # timeout of a response in seconds


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test. extra: fields that are merged into each request body."""

    base_url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] | None = None

    def route(self, job: Job) -> str:
        """The route that a job is sent to."""
        return "/v1/completions"

    def body(self, job: Job) -> bytes:
        """A streamed completion of exactly `job.output` tokens that ends with the usage."""
        return msgspec.json.encode(
            {
                "model": self.model,
                "prompt": job.prompt,
                "max_tokens": job.output,
                "temperature": job.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **(self.extra or {}),
            }
        )


class EventReader(asyncio.Protocol):
    """Reads one response: records the arrival times of events, and the usage in the last one.
    `done` is set at the end of the response or on an error."""

    def __init__(self, timing: Timing) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self._timing = timing
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the response is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection was closed before the response ended")

    def on_body(self, body: bytes) -> None:
        """Called by the parser with a part of the body."""
        now = time.perf_counter()
        events = (self._rest + body).split(b"\n\n")
        self._rest = events.pop()
        if self._parser.get_status_code() == 200:
            for event in events:
                self._event(event.removeprefix(b"data:").strip(), now)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the response."""
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"{status}: {self._rest[:300].decode(errors='replace')}")
        else:
            self._end("" if self._timing.tokens else "the response has no usage, so its number of tokens is unknown")

    def _event(self, data: bytes, now: float) -> None:
        if not data or data == DONE:
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            self._end(str(event["error"].get("message", event["error"])))
        elif choices := event.get("choices"):
            self._timing.events.append(now)
            self._timing.ids.extend(choices[0].get("token_ids") or ())
        elif "output_ids" in event:  # of /generate, with all tokens so far
            self._timing.events.append(now)
            self._timing.ids, self._timing.tokens = array("i", event["output_ids"]), event["meta_info"]["completion_tokens"]
        if event.get("usage"):
            self._timing.tokens = event["usage"]["completion_tokens"]

    def _end(self, error: str) -> None:
        if not self.done.done():
            self._timing.error = error or ("" if self._timing.events else "the response is empty")
            self.done.set_result(None)


async def run(target: Target, jobs: Sequence[Job], max_concurrency: int | None = None, title: str = "requests") -> list[Timing]:
    """Send every job at its arrival time, and show the progress under `title`. max_concurrency:
    maximum number of concurrent requests; None: no limit. -> one timing per job."""
    start = time.perf_counter()
    gate = asyncio.Semaphore(max_concurrency or len(jobs))
    timings = [Timing(start + job.at, len(job.prompt)) for job in jobs]

    async def one(job: Job, timing: Timing, request: bytes) -> None:
        await asyncio.sleep(max(0.0, timing.due - time.perf_counter()))
        async with gate:
            try:
                async with asyncio.timeout(TIMEOUT):
                    await _send(target, timing, request)
            except TimeoutError:
                timing.error = f"no response within {TIMEOUT:g} s"
            except OSError as error:
                timing.error = f"cannot connect: {error.strerror or error}"
        advance(1)

    requests = [_request(target, job) for job in jobs]
    with show_progress(title, len(jobs)) as advance:
        await asyncio.gather(*map(one, jobs, timings, requests))
    return timings


def _request(target: Target, job: Job) -> bytes:
    url, body = urlsplit(target.base_url), target.body(job)
    key = "".join(f"{name}: {value}\r\n" for name, value in make_headers(target.api_key).items())
    path = url.path.rstrip("/").removesuffix("/v1")
    head = f"POST {path}{target.route(job)} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n{key}"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def _send(target: Target, timing: Timing, request: bytes) -> None:
    url = urlsplit(target.base_url)
    is_https = url.scheme == "https"
    loop = asyncio.get_running_loop()
    timing.sent = time.perf_counter()
    connection, reader = await loop.create_connection(
        lambda: EventReader(timing), url.hostname or "", url.port or (443 if is_https else 80), ssl=is_https or None
    )
    try:
        connection.write(request)
        await reader.done
    finally:
        connection.close()
