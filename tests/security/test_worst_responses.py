"""The largest responses of each form: the event loop stays responsive while they are made.

Time is that of the event loop's thread between two of its passes, so that other processes and the
engine's thread do not count. Responses without many log-probabilities or numbers are small.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, TokenLogprobs
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.grpc.schema import SERVICE, Schema
from frame.entrypoints.grpc.server import GrpcServer
from tests.entrypoints.inprocess import InProcess, serving
from tests.security.test_worst_bodies import NOMINAL, TRIES

STALL = 0.05  # seconds of CPU time, on an idle machine
SLACK = 1.5  # for a machine whose cores are shared
TOP = 20
PROMPT = 4096  # tokens
TOKENS = 3072
CHOICES = 2
WIDTH = 4096  # of a vector
INPUTS = 384
AT_ONCE = 3  # equal requests
S = Schema()


class Replies:
    """Takes the place of the engine: a request has all its output soon after it was prepared."""

    def __init__(self) -> None:
        self.width = 0
        self.tokens_at_once = TOKENS

    def prepare(self, prompts: Any, params: Any, rid: str, owner: str, second_text_starts: Any = ()) -> RequestState:
        state = RequestState(rid, owner, second_text_starts=second_text_starts)
        for place, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            for _ in range(own.n):
                state.sequences.append(SequenceState(state, len(state.sequences), place, f"{rid}-{len(state.sequences)}", prompt, own))
        state.num_unfinished = len(state.sequences)
        asyncio.get_running_loop().call_soon(self.fill, state, 0)
        return state

    def fill(self, state: RequestState, place: int) -> None:
        """One sequence at a time, so that this takes no long time of the event loop either."""
        if place < len(state.sequences) and not self.width:
            self.fill_sequence(state.sequences[place])
            state.changed = [*state.changed[:place], state.sequences[place]]
            if state.sequences[place].finish is None:
                state.notify()
            asyncio.get_running_loop().call_soon(self.fill, state, place + (state.sequences[place].finish is not None))
            return
        if self.width:
            row = np.linspace(-1, 1, self.width, dtype="<f4").tobytes()
            state.vectors = {sequence.index: row for sequence in state.sequences}
            for sequence in state.sequences:
                sequence.finish = Finish("stop")
        state.num_unfinished, state.changed = 0, list(state.sequences)
        state.notify()

    def fill_sequence(self, sequence: SequenceState) -> None:
        params: SamplingParams = sequence.params
        ids = [5 + i % 90 for i in range(min(self.tokens_at_once, (params.max_tokens or 1) - sequence.num_tokens))]
        sequence.token_ids += ids
        sequence.recovery.output_ids.extend(ids)
        sequence.texts.append("x" * len(ids))
        top = [(7 + i, -1.5) for i in range(TOP)]
        if params.logprobs is not None:
            sequence.logprobs += [TokenLogprobs([i], [-0.5], [top[: params.logprobs]]) for i in ids]
        if params.prompt_logprobs is not None:
            known = [None, *[-0.5] * (len(sequence.prompt) - 1)]
            tops = [[], *[top[: params.prompt_logprobs]] * (len(sequence.prompt) - 1)]
            sequence.prompt_logprobs = TokenLogprobs(list(sequence.prompt), known, tops, [None, *[1] * (len(known) - 1)])
        if sequence.num_tokens == params.max_tokens:
            sequence.finish = Finish("length")


def yardstick() -> float:
    """CPU seconds that the interpreter takes for a fixed amount of work."""
    started = time.thread_time()
    sum(i % 7 for i in range(60_000))
    return time.thread_time() - started


async def stall_of(work: Callable[[], Awaitable[None]]) -> float:
    """The longest CPU time of one pass of the event loop during the work, as on an idle machine."""
    max_length, done = 0.0, False

    async def beat() -> None:
        nonlocal max_length
        last = time.thread_time()
        while not done:
            await asyncio.sleep(0)
            now = time.thread_time()
            max_length, last = max(max_length, now - last), now

    first = yardstick()
    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    await work()
    done = True
    await beating
    return max_length / max(1.0, SLACK * first / NOMINAL, SLACK * yardstick() / NOMINAL)


LOGPROBS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"logprobs": True, "top_logprobs": TOP, "n": CHOICES}),
    "chat stream": ("/v1/chat/completions", {"logprobs": True, "top_logprobs": TOP, "n": CHOICES, "stream": True}),
    "chat prompt": ("/v1/chat/completions", {"prompt_logprobs": TOP, "max_tokens": 1}),
    "completion": ("/v1/completions", {"logprobs": TOP, "n": CHOICES, "prompt": [5, 6]}),
    "completion stream": ("/v1/completions", {"logprobs": TOP, "n": CHOICES, "prompt": [5, 6], "stream": True}),
    "echo": ("/v1/completions", {"logprobs": TOP, "echo": True, "max_tokens": 1}),
    "echo stream": ("/v1/completions", {"logprobs": TOP, "echo": True, "max_tokens": 1, "stream": True}),
    "completion prompt": ("/v1/completions", {"prompt_logprobs": TOP, "max_tokens": 1}),
    "many light choices": ("/v1/completions", {"logprobs": 1, "n": 128, "prompt": [[5, 6]] * 8, "max_tokens": 24}),
    "invocation": ("/invocations", {"prompt_logprobs": TOP, "max_tokens": 1}),
    "generate": ("/generate", {"return_logprob": True, "top_logprobs_num": TOP, "input_ids": [5, 6],
                               "sampling_params": {"n": CHOICES, "max_new_tokens": TOKENS}}),
    "generate prompt": ("/generate", {"return_logprob": True, "top_logprobs_num": TOP, "logprob_start_len": 0,
                                      "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 1}}),
    "generate stream": ("/generate", {"return_logprob": True, "top_logprobs_num": TOP, "logprob_start_len": 0, "stream": True,
                                      "input_ids": [5] * 2000, "sampling_params": {"max_new_tokens": 1}}),
}  # fmt: skip
FEW = ("chat", "completion stream", "echo", "many light choices", "generate stream")  # of each route, streamed and not
FEW_POOLED = ("embeddings", "base64", "cohere")
POOLED: dict[str, tuple[str, dict[str, Any]]] = {
    "embeddings": ("/v1/embeddings", {}),
    "base64": ("/v1/embeddings", {"encoding_format": "base64"}),
    "pooling": ("/pooling", {}),
    "tei": ("/embed", {}),
    "cohere": ("/v2/embed", {"embedding_types": ["float", "base64"]}),
    "ollama": ("/api/embed", {}),
}


FIELDS = {"/v1/embeddings": "input", "/pooling": "input", "/embed": "inputs", "/v2/embed": "texts", "/api/embed": "input"}


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    if path == "/generate":
        return {"input_ids": [5] * PROMPT, **fields}
    if path == "/v1/chat/completions":
        return {"messages": [{"role": "user", "content": "hello world " * (PROMPT // 6)}], "max_tokens": TOKENS, **fields}
    if path == "/v1/responses":
        return fields
    if path in FIELDS:
        return {FIELDS[path]: ["hi"] * INPUTS, "model": "", **fields}
    return {"prompt": [5] * PROMPT, "max_tokens": TOKENS, **fields}


async def stalls_of(server: InProcess, cases: dict[str, tuple[str, dict[str, Any]]], minimum: int) -> dict[str, float]:
    """The cases whose responses, several at once, block the event loop for too long; in ms."""
    found: dict[str, float] = {}
    for name, (path, fields) in cases.items():
        body = body_of(path, fields)

        async def ask(path: str = path, body: dict[str, Any] = body) -> None:
            for response in await asyncio.gather(*(server.post(path, body) for _ in range(AT_ONCE))):
                assert response.status == 200, (path, response.body[:300])
                assert len(response.body) >= minimum, path

        for _ in range(TRIES):  # the best counts
            if (stall := await stall_of(ask)) <= STALL:
                break
        else:
            found[name] = round(1e3 * stall)
        print(f"{path} {name}: {stall * 1e3:.0f} ms")
    return found


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replies]:
    fake = Replies()
    monkeypatch.setattr(EngineClient, "prepare_request", lambda client, *given: fake.prepare(*given))
    monkeypatch.setattr(EngineClient, "start_sequence", lambda client, *given: None)
    monkeypatch.setattr(EngineClient, "abort_request", lambda client, state: client.release_sequences(len(state.sequences)))
    gc.collect()
    gc.freeze()  # as the server does once it is ready
    yield fake
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(LOGPROBS), marks=pytest.mark.exhaustive)], ids=["few", "all"])
async def test_log_probabilities(replies: Replies, names: tuple[str, ...]) -> None:
    async with serving({"model": {"max_context": 2 * PROMPT}, "cache": {"max_total_tokens": 4 * PROMPT}}) as server:
        assert await stalls_of(server, {name: LOGPROBS[name] for name in names}, 500_000) == {}
        whole = (await server.post(*with_body("chat"))).json()
        assert len(whole["choices"]) == CHOICES and whole["usage"]["completion_tokens"] == CHOICES * TOKENS
        tops = whole["choices"][-1]["logprobs"]["content"][-1]["top_logprobs"]
        assert len(tops) == TOP and tops[0]["logprob"] == -1.5


def with_body(name: str) -> tuple[str, dict[str, Any]]:
    path, fields = LOGPROBS[name]
    return path, body_of(path, fields)


async def test_responses_and_their_store(replies: Replies) -> None:
    replies.tokens_at_once = 64
    body = {"input": "hi", "max_output_tokens": TOKENS, "top_logprobs": TOP, "include": ["message.output_text.logprobs"]}
    cases = {"response": ("/v1/responses", body)}
    async with serving({"model": {"max_context": 2 * PROMPT}, "cache": {"max_total_tokens": 4 * PROMPT}}) as server:
        assert await stalls_of(server, cases, 500_000) == {}


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW_POOLED, pytest.param(tuple(POOLED), marks=pytest.mark.exhaustive)], ids=["few", "all"])
async def test_vectors(replies: Replies, names: tuple[str, ...]) -> None:
    replies.width = WIDTH
    async with serving({"model": {"task": "embed"}}) as server:
        assert await stalls_of(server, {name: POOLED[name] for name in names}, 4 * INPUTS * WIDTH) == {}
        reply = (await server.post("/v1/embeddings", body_of(*POOLED["embeddings"]))).json()
        assert [len(each["embedding"]) for each in reply["data"]] == [WIDTH] * INPUTS


@pytest.mark.slow
async def test_grpc_replies(replies: Replies) -> None:
    params = {"logprobs": TOP, "prompt_logprobs": TOP, "max_tokens": TOKENS}
    requests = {
        "Generate": S["GenerateRequest"](token_ids={"ids": [5] * PROMPT}, sampling_params=params),
        "Embed": S["EmbedRequest"](token_ids=[{"ids": [5, 6]}] * INPUTS),
    }
    for name, request in requests.items():
        replies.width = WIDTH if name == "Embed" else 0
        task = {"task": "embed"} if name == "Embed" else {}
        async with serving({"model": {"max_context": 2 * PROMPT, **task}, "cache": {"max_total_tokens": 4 * PROMPT}}) as server:
            grpc_server = GrpcServer(server.services, "127.0.0.1", 0, server.app.bodies)
            await grpc_server.start()
            client = await asyncio.create_subprocess_exec(
                sys.executable, __file__, grpc_server.address, name, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert client.stdin is not None and client.stdout is not None
            client.stdin.write(len(request.SerializeToString()).to_bytes(4, "big") + request.SerializeToString())

            async def ask(client: Any = client) -> None:
                client.stdin.write(b"\n")
                assert int(await client.stdout.readline()) > 500_000

            for _ in range(TRIES):
                if (stall := await stall_of(ask)) <= STALL:
                    break
            client.stdin.close()
            await client.wait()
            await grpc_server.stop()
            print(f"{name}: {stall * 1e3:.0f} ms")
            assert stall <= STALL, f"{name} blocked the event loop for {stall * 1e3:.0f} ms"


def main(address: str, name: str) -> None:
    """A gRPC client in its own process: sends the request for each line, and prints the bytes of
    the replies."""
    request = sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(4), "big"))
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.unary_stream(f"/{SERVICE}/{name}")
        for _ in sys.stdin.buffer:
            print(sum(map(len, call(request))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
