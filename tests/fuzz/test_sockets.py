"""Random and mutated MessagePack into each process's socket: it is logged and dropped, and the
process serves on."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from frame.checkpoint.model_config import find_model
from frame.core.engine import Engine, EngineOptions
from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.transport import ZmqTransport
from frame.core.messages import (
    Abort,
    AbortAll,
    Control,
    ControlReply,
    Finish,
    Generate,
    Heartbeat,
    StartDetokenize,
    StepText,
    StepTokens,
    Tokenize,
    Tokenized,
    TokenLogprobs,
    encode,
)
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import ClientLimits
from frame.entrypoints.engine_client.tokenizing import tokenize
from frame.entrypoints.processes import worker
from frame.entrypoints.processes.build_scheduler import assemble_scheduler
from frame.loading.engine_states import EngineStates
from frame.parallel.rank_channels import BatchReceiver
from frame.plugins.loader import load_registry
from frame.plugins.prefix_caches.radix import RadixCache
from frame.testing.contexts import EVICTION, SCHEDULING
from frame.testing.fake_runner import FakeRunner
from frame.testing.page_allocators import make_allocator
from frame.testing.scheduler_rig import OldestFirst
from frame.text.detokenizer import Detokenizer
from frame.text.tokenizer import Tokenizer
from tests.entrypoints.submitting import submit_request
from tests.fuzz.mutations import mutated, spoiled

VOCAB = 64
PARAMS = SamplingParams(max_tokens=3, temperature=0.5, seed=1, stop=("a",), logit_bias={5: 1.0}, logprobs=1)
LOGPROBS = TokenLogprobs([5], [-1.0], [[(5, -1.0)]])
ENDS = {0: Finish("stop", 5)}
TOKENS: dict[str, Any] = {"rids": ["r"], "token_ids": [[5]], "finishes": ENDS, "num_cached_tokens": {0: 1}, "logprobs": {0: LOGPROBS}}
SEEDS = (
    Generate(rid="g", token_ids=[5, 6, 7], params=PARAMS, output_len=1, priority=1, namespace="n", deadline=1.0),
    Abort(rids=["g"]),
    AbortAll(),
    Control(id="c", action="server_info"),
    Control(id="c", action="flush_cache", arguments={"a": 1}),
    ControlReply(id="c", ok=True, data={"a": 1}),
    Heartbeat(process="engine", step=1),
    StepTokens(**TOKENS),
    StepText(texts=["x"], stopped=[0], **TOKENS),
    StartDetokenize(rid="r", params=PARAMS, prompt_tail=[5]),
    Tokenize(id="t", text="x"),
    Tokenize(id="t", messages=[{"role": "user", "content": "x"}], tools=[{"a": 1}], template_arguments={"b": 2}),
    Tokenized(id="t", token_ids=[5]),
)


def packets(seed: int, count: int) -> Iterator[bytes]:
    """A third each: spoiled bytes, changed values, noise. Nothing that asks a process to stop or to
    pause."""
    rng = random.Random(seed)
    for _ in range(count):
        data = encode(rng.choice(SEEDS))
        kind = rng.randrange(3)
        if kind == 0:
            data = spoiled(rng, data)
        elif kind == 1:
            given = msgspec.msgpack.decode(data)
            for _ in range(rng.choice((1, 1, 2))):
                given = mutated(rng, given)
            try:
                data = msgspec.msgpack.encode(given)
            except (OverflowError, RecursionError, UnicodeEncodeError, ValueError):  # what MessagePack cannot hold
                continue
        else:
            data = rng.randbytes(rng.randrange(200))
        if not any(word in data for word in (b"shutdown", b"pause")):
            yield data


@contextmanager
def pushing(address: str) -> Iterator[Any]:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close(linger=5000)
        context.term()


def attack_engine(folder: Path, seed: int, count: int) -> None:
    inbox, outbox = f"ipc://{folder}/engine", f"ipc://{folder}/client"
    config = SchedulerConfig(page_size=4, num_pages=65, max_running=4, token_budget=32, max_context=100, vocab_size=VOCAB, max_queued=50)
    registry = load_registry(installed=False)
    policy = registry.load(registry.get("scheduling_policy", "fcfs"))(SCHEDULING)
    scheduler = assemble_scheduler(config, RadixCache(PrefixCacheContext(4, 4096, OldestFirst(EVICTION))), make_allocator(65), policy)
    runner = FakeRunner(65, 4, 4, config.max_pages, VOCAB)
    engine = Engine(scheduler, runner, ZmqTransport(inbox, outbox), EngineOptions(check_integrity="fatal", make_states=EngineStates))
    thread = threading.Thread(target=engine.run)
    client = ZmqTransport(outbox, inbox)
    thread.start()
    with pushing(inbox) as socket:
        for data in packets(seed, count):
            socket.send(data)
    client.send(AbortAll())
    client.send(Generate(rid="well", token_ids=[5, 6], params=SamplingParams(max_tokens=2, temperature=0.0)))
    client.send(Control(id="whole", action="check_integrity"))
    waiting = {"well", "whole"}
    while waiting and thread.is_alive():
        for message in client.receive(1.0):
            if isinstance(message, StepTokens):
                waiting -= {message.rids[place] for place in message.finishes}
            elif isinstance(message, ControlReply) and message.id == "whole":
                assert message.ok, message.error
                waiting.discard("whole")
    assert thread.is_alive(), "the engine died"
    client.send(Control(id="end", action="shutdown"))
    thread.join(30)
    engine.transport.close()
    client.close()


def test_engine(tmp_path: Path) -> None:
    attack_engine(tmp_path, 1, 1500)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_engine_for_long(tmp_path: Path, seed: int) -> None:
    attack_engine(tmp_path, seed, 20_000)


async def attack_texts(folder: Path, seed: int, count: int) -> None:
    """The client, the detokenizer's and the tokenizer's work, each behind a socket of its own."""
    inbox = f"ipc://{folder}/any"
    transport = ZmqTransport(inbox, None)
    text = Tokenizer.load(find_model("frame-tiny"))
    detokenizer = Detokenizer(text)
    limits = ClientLimits(max_outstanding=8, max_context=64, vocab_size=VOCAB, capacity=256)
    kinds = ((None, False), (Detokenizer(text), False), (None, True))
    clients = [EngineClient(transport, limits, local, is_remote) for local, is_remote in kinds]
    replies = []
    for client in clients:
        client.reserve_sequences(1)
        replies.append(submit_request(client, [[5]], [SamplingParams(max_tokens=50)], rid="r"))
    sent = list(packets(seed, count))
    with pushing(inbox) as socket:
        for data in sent:
            socket.send(data)
        socket.send(encode(Heartbeat(process="last", step=7)))
    arrived: list[Any] = []
    while not any(isinstance(message, Heartbeat) and message.process == "last" for message in arrived):
        arrived += transport.receive(1.0)
    for message in arrived:
        for client in clients:
            client.handle_messages([message])
        worker.detokenize_message(detokenizer, message)
        if isinstance(message, Tokenize):
            tokenize(text, message)
    for client, reply in zip(clients, replies, strict=True):
        client.abort_request(reply)
        assert client.num_outstanding == 0
    transport.close()


async def test_client_and_texts(tmp_path: Path) -> None:
    await attack_texts(tmp_path, 1, 1500)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
async def test_client_and_texts_for_long(tmp_path: Path, seed: int) -> None:
    await attack_texts(tmp_path, seed, 20_000)


def test_batches_of_other_ranks(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/batches"
    receiver = BatchReceiver(address, 1, f"ipc://{tmp_path}/replies")
    with pushing(address) as socket:
        for data in packets(1, 300):
            if data:  # an empty one means stop
                socket.send(data)
        socket.send(b"")
    assert receiver.receive() is None
    receiver.close()
