"""`Client`: an HTTP client of a frame server with the methods, parameters and outputs of the
offline `Engine`.

with Client("http://localhost:30000") as client:
    print(client.generate("def add(a, b):", SamplingParams(max_tokens=32)).text)
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from copy import copy
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np

from frame.core.errors import did_you_mean
from frame.entrypoints.offline.collector import Delta
from frame.entrypoints.offline.prompts import EngineError, Params, Prompt, to_list
from frame.entrypoints.offline.remote_format import Job, decode_vectors, make_error, parse_line

Loras = str | Sequence[str | None] | None  # the name of an adapter for all prompts, or one for each
# command of `Engine.control` -> (method, path) at the server
COMMANDS: Mapping[str, tuple[str, str]] = {
    "flush_cache": ("POST", "/flush_cache"),
    "server_info": ("GET", "/server_info"),
    "check_integrity": ("POST", "/check_integrity"),
    "pause": ("POST", "/pause_generation"),
    "resume": ("POST", "/continue_generation"),
    "sleep": ("POST", "/release_memory_occupation"),
    "wake": ("POST", "/resume_memory_occupation"),
    "start_profile": ("POST", "/start_profile"),
    "stop_profile": ("POST", "/stop_profile"),
    "abort_request": ("POST", "/abort_request"),
}
CONNECT_TIMEOUT = 10.0  # seconds


class RemoteTokenizer:
    """The server's tokenizer, over HTTP."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._client.post("/tokenize", {"text": text, "add_special_tokens": add_special_tokens})["tokens"]
        return ids

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        ids: list[int] = self._client.post("/tokenize", {"messages": messages, "tools": tools})["tokens"]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._client.post("/detokenize", {"tokens": list(token_ids), "skip_special_tokens": skip_special_tokens})["text"])


class Client:
    """A client of a frame server. Prompts, parameters and outputs are those of `Engine`, sync,
    async and streaming.

    `timeout`: seconds for a response, or between two events of a stream. Raises InvalidRequestError
    (a ValueError) for an invalid request, EngineError when the server cannot be reached, is
    overloaded or fails. Threads may share a client; its async methods serve one event loop at a
    time.
    """

    def __init__(self, base_url: str = "http://127.0.0.1:30000", *, api_key: str | None = None, timeout: float = 600.0) -> None:
        self._settings: dict[str, Any] = {
            "base_url": base_url.rstrip("/").removesuffix("/v1"),
            "headers": {} if api_key is None else {"authorization": f"Bearer {api_key}"},
            "timeout": httpx.Timeout(timeout, connect=CONNECT_TIMEOUT),
            "verify": ssl.create_default_context(),  # read once for all connections, which takes 20 ms
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=64),
        }
        self._http = httpx.Client(**self._settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._async_http: httpx.AsyncClient | None = None

    def copy(self) -> Client:
        """A client that shares all but the connections of the async methods, for another event
        loop."""
        other = copy(self)
        other._async_http = other._loop = None  # noqa: SLF001 - of the same class
        return other

    @property
    def tokenizer(self) -> RemoteTokenizer:
        return RemoteTokenizer(self)

    @property
    def info(self) -> dict[str, Any]:
        """The resolved configuration, the size of the KV cache, and the load (see `control`)."""
        return self.control("server_info")

    # generate -------------------------------------------------------------------------------------

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None, *, lora: Loras = None) -> Any:
        """Generate until every sequence has ended. Returns an `Output`, or a list of them for a
        list of prompts."""
        job = self._job(prompts, params, lora)
        return job.parse_results(self.post("/generate", job.body) if job.count else [])

    async def agenerate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None, *, lora: Loras = None
    ) -> Any:
        """`generate` for an event loop; cancelling it aborts the requests."""
        job = await asyncio.to_thread(self._job, prompts, params, lora)
        if not job.count:
            return job.parse_results([])
        try:
            response = await self._async().post("/generate", json=job.body)
        except httpx.HTTPError as error:
            raise _unreachable(self._settings["base_url"], error) from error
        return job.parse_results(_parse_response(response))

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None, *, lora: Loras = None
    ) -> Iterator[Delta]:
        """Yield what each step adds, sequences interleaved. Leaving the loop early aborts the
        requests."""
        job = self._job(prompts, params, lora)
        if not job.count:
            return
        try:
            with self._http.stream("POST", "/generate", json={**job.body, "stream": True}) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    _parse_response(response)
                for line in response.iter_lines():
                    if (event := parse_line(line)) is not None:
                        yield job.parse_event(event)
        except httpx.HTTPError as error:
            raise _unreachable(self._settings["base_url"], error) from error

    async def astream(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None = None, *, lora: Loras = None
    ) -> AsyncIterator[Delta]:
        """`stream` for an event loop."""
        job = await asyncio.to_thread(self._job, prompts, params, lora)
        if not job.count:
            return
        try:
            async with self._async().stream("POST", "/generate", json={**job.body, "stream": True}) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    _parse_response(response)
                async for line in response.aiter_lines():
                    if (event := parse_line(line)) is not None:
                        yield job.parse_event(event)
        except httpx.HTTPError as error:
            raise _unreachable(self._settings["base_url"], error) from error

    # vectors --------------------------------------------------------------------------------------

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        lora: str | None = None,
        per_token: bool = False,
    ) -> Any:
        """Embeddings of texts or token ids, float32 [inputs, width]; [width] for one input.
        `per_token`: the hidden states of each input, [tokens, width]."""
        is_single, several = to_list(inputs)
        body = {"input": several, "dimensions": dimensions, "prompt_name": prompt_name, "encoding_format": "base64"}
        body |= _options(truncate, lora)
        vectors: Any
        if per_token:
            rows = self.post("/pooling", body | {"task": "token_embed", "normalize": False})["data"]
            vectors = [decode_vectors([{"embedding": each} for each in row["data"]]) for row in rows]
        else:
            vectors = decode_vectors(self.post("/v1/embeddings", body)["data"])
        return vectors[0] if is_single else vectors

    def classify(self, inputs: str | Sequence[str], *, truncate: bool = False, lora: str | None = None) -> Any:
        """The probability of each class, by its label; a list of these for a list of inputs."""
        several = [inputs] if isinstance(inputs, str) else list(inputs)
        reply = self.post("/v1/classify", {"input": several, **_options(truncate, lora)})
        rows = [dict(zip(reply["labels"], row["probs"], strict=True)) for row in reply["data"]]
        return rows[0] if isinstance(inputs, str) else rows

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        lora: str | None = None,
    ) -> np.ndarray:
        """Relevance of pairs of texts, float32 [pairs]. One first text is paired with every second
        one, or two lists of equal length are paired in order."""
        texts = [side if isinstance(side, str) else list(side) for side in (first, second)]
        body = {"text_1": texts[0], "text_2": texts[1], "instruction": instruction, **_options(truncate, lora)}
        return np.array([row["score"] for row in self.post("/v1/score", body)["data"]], np.float32)

    # control --------------------------------------------------------------------------------------

    def flush_cache(self) -> None:
        """Empty the prefix cache."""
        self.control("flush_cache")

    def control(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Run a command (`server_info`, `check_integrity`, …) and return its data. Commands are for
        operators: `api_key` must be the admin key, and `base_url` the admin listener, where the
        server has these."""
        if action not in COMMANDS:
            raise EngineError(f"there is no command {action!r}{did_you_mean(action, COMMANDS)}")
        method, path = COMMANDS[action]
        if action == "pause":
            arguments = {"mode": "keep", **arguments}  # the default of the offline engine
        try:
            data: dict[str, Any] = self._request(method, path, arguments if method == "POST" else None)
        except ValueError as error:
            raise EngineError(str(error)) from None
        return data

    def load_lora_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder of the server's machine; for operators."""
        self.post("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter once the requests that use it have ended; for operators."""
        self.post("/unload_lora_adapter", {"lora_name": name})

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON response of any route to a JSON body."""
        return self._request("POST", path, body)

    def close(self) -> None:
        """Close the connections. A second call does nothing."""
        self._http.close()
        self._async_http = self._loop = None

    async def aclose(self) -> None:
        """`close`, in the event loop that used the async methods."""
        await self.close_async()
        self.close()

    async def close_async(self) -> None:
        """Give back the connections of the async methods, in the event loop that used them."""
        if self._async_http is not None:
            await self._async_http.aclose()
            self._async_http = self._loop = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # parts ----------------------------------------------------------------------------------------

    def _job(self, prompts: Any, params: Params | Sequence[Params] | None, lora: Loras) -> Job:
        job = Job(prompts, params, self.tokenizer.encode, self.tokenizer.encode_chat)
        if lora is not None:
            job.body["lora_path"] = [lora] * job.count if isinstance(lora, str) else list(lora)
        return job

    def _async(self) -> httpx.AsyncClient:
        """The connections of the running event loop; they serve no other."""
        loop = asyncio.get_running_loop()
        if self._async_http is None or self._loop is not loop:
            self._async_http, self._loop = httpx.AsyncClient(**self._settings), loop
        return self._async_http

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise _unreachable(self._settings["base_url"], error) from error
        except RuntimeError as error:  # httpx raises it for a closed client
            raise EngineError(str(error)) from None
        return _parse_response(response)


def _parse_response(response: httpx.Response) -> Any:
    if response.status_code == httpx.codes.OK:
        return response.json()
    try:
        body = response.json()
    except ValueError:
        body = None
    raise make_error(body, response.status_code)


def _unreachable(url: str, error: Exception) -> EngineError:
    return EngineError(f"the server at {url} did not answer ({type(error).__name__}: {error}); is it running there?")


def _options(truncate: bool, lora: str | None) -> dict[str, Any]:
    return {**({"truncate_prompt_tokens": -1} if truncate else {}), **({} if lora is None else {"model": lora})}
