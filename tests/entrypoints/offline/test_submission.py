"""More sequences than the engine's queue holds: each form of a call submits them as there is room
and loses none; what fails for another reason says so."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frame import Engine, SamplingParams
from frame.core.interfaces.sampling_params import SamplingParams as Params
from frame.core.ipc.transport import InProcessTransport
from frame.core.messages import Abort, Finish, Generate, Message, StepTokens
from frame.entrypoints.cli.eval import EngineBackend
from frame.entrypoints.offline.collector import Collector, Delta, Job, Output, SequenceOutput
from frame.entrypoints.tools.bench.offline import measure

QUEUE = 4
KEYS = {"max_model_len": 64, "max_total_tokens": 2048, "max_running_requests": 2, "max_queued_requests": QUEUE, "threads": 1}
PROMPTS = [[5 + number % 40, 6, 7] for number in range(40)]  # ten times what may wait
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(model=str(checkpoint), **KEYS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[int]]:
    return [engine.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]


def run(engine: Engine, form: str) -> list[Output]:
    async def collect() -> dict[int, Output]:
        return {delta.index: delta.output async for delta in engine.astream(PROMPTS, GREEDY)}

    if form == "generate":
        return engine.generate(PROMPTS, GREEDY)  # type: ignore[no-any-return]
    if form == "agenerate":
        return asyncio.run(engine.agenerate(PROMPTS, GREEDY))  # type: ignore[no-any-return]
    found = {delta.index: delta.output for delta in engine.stream(PROMPTS, GREEDY)} if form == "stream" else asyncio.run(collect())
    return [found[index] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("form", ["generate", "agenerate", "stream", "astream"])
def test_more_prompts_than_the_queue_holds(engine: Engine, expected: list[list[int]], form: str) -> None:
    outputs = run(engine, form)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    assert [output.token_ids for output in outputs] == expected


def test_more_sequences_of_one_prompt_than_the_queue_holds(engine: Engine, expected: list[list[int]]) -> None:
    output = engine.generate(PROMPTS[0], {"max_tokens": 2, "n": 30, "temperature": 0.0, "ignore_eos": True, "stop": ["\x00never"]})
    assert [each.token_ids for each in output.outputs] == [expected[0]] * 30


def test_calls_of_several_threads_share_the_queue(engine: Engine, expected: list[list[int]]) -> None:
    found: dict[int, list[Output]] = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: run(engine, "generate")})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[output.token_ids for output in found[i]] for i in range(3)] == [expected] * 3


async def test_calls_at_once_and_a_cancelled_one(engine: Engine, expected: list[list[int]]) -> None:
    calls = [asyncio.create_task(engine.agenerate(prompt, GREEDY)) for prompt in PROMPTS[:6]]
    long = asyncio.create_task(engine.agenerate(PROMPTS, {"max_tokens": 50, "ignore_eos": True}))
    calls += [asyncio.create_task(engine.agenerate(prompt, GREEDY)) for prompt in PROMPTS[6:]]
    await calls[5]  # so the first of `long` are submitted, and the others wait
    assert not long.done()
    long.cancel()
    assert [output.token_ids for output in await asyncio.gather(*calls)] == expected
    assert engine.control("server_info")["running"] == 0


def test_vectors_beyond_the_queue() -> None:
    with Engine(model="frame-tiny", model_task="embed", dtype="float32", **KEYS) as engine:
        assert engine.embed(PROMPTS).shape[0] == len(PROMPTS)


def test_no_more_than_the_queue_holds_is_submitted_and_without_a_deadline(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that waits longer than the default of a server, 600 s, would otherwise be lost."""
    sent: list[Generate] = []
    bursts: list[int] = []
    plain = InProcessTransport.send_all

    def watch(transport: InProcessTransport, messages: Any) -> None:
        generates = [message for message in messages if isinstance(message, Generate)]
        sent.extend(generates)
        bursts.append(len(generates))
        plain(transport, messages)

    monkeypatch.setattr(InProcessTransport, "send_all", watch)
    with Engine(model=str(checkpoint), **KEYS) as engine:
        engine.generate(PROMPTS, GREEDY)
    assert (len(sent), max(bursts)) == (len(PROMPTS), QUEUE)
    assert {message.deadline for message in sent} == {math.inf}
    sent.clear()
    with Engine(model=str(checkpoint), **KEYS, request_timeout=0.001) as engine:
        outputs = engine.generate(PROMPTS[:1], {"max_tokens": 50, "ignore_eos": True})
    assert outputs[0].finish_reason == "error"
    assert "took longer than its 0.001 s" in outputs[0].error


@pytest.mark.slow
def test_a_sequence_that_fails_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    grammar = SamplingParams(max_tokens=4, regex="(")
    with caplog.at_level(logging.WARNING):
        good, bad = engine.generate(PROMPTS[:2], [GREEDY, grammar])
    assert (good.error, bad.finish_reason) == (None, "error")
    assert f"1 of 2 sequences ended with an error; the first: {bad.error}" in caplog.text

    class Failing:
        async def agenerate(self, *_: object) -> Output:
            return bad

        def generate(self, *_: object) -> list[Output]:
            return [bad]

    with pytest.raises(RuntimeError, match=r"regex|grammar"):  # `frame eval` counts it as an error
        asyncio.run(EngineBackend(Failing()).complete("x", 4))
    with pytest.raises(RuntimeError, match="the figures would be wrong"):  # `frame bench offline`
        measure(Failing(), [])


class FakeEngine:
    """Refuses all but `room` sequences at once; each ends when the test says so."""

    def __init__(self, room: int, limit: int) -> None:
        self.room, self.held, self.refusals, self.aborted = room, list[Generate](), 0, list[str]()
        self.collector = Collector(None)
        self.collector.connect(self.receive, limit, None)
        self.refused: list[str] = []

    def receive(self, messages: Any) -> None:
        message: Message
        for message in messages:
            if isinstance(message, Abort):
                self.aborted += message.rids
            elif isinstance(message, Generate) and len(self.held) < self.room:
                self.held.append(message)
            elif isinstance(message, Generate):
                self.refused.append(message.rid)

    def refuse(self) -> None:
        """Report what was refused."""
        rids, self.refused = self.refused, []
        self.refusals += len(rids)
        full = Finish("error", error="queue full: no room; try again later", code="queue_full")
        self.collector.handle_message(StepTokens(rids=rids, token_ids=[[] for _ in rids], finishes=dict.fromkeys(range(len(rids)), full)))

    def end_first(self) -> None:
        rid = self.held.pop(0).rid
        self.collector.handle_message(StepTokens(rids=[rid], token_ids=[[9]], finishes={0: Finish("length")}))


def make_job(count: int, on_delta: Any = None) -> tuple[Job, threading.Event]:
    done = threading.Event()
    job = Job(done.set, on_delta)
    for number in range(count):
        job.sequences.append(SequenceOutput(job, f"r{number}", [number], Params(max_tokens=1)))
    return job, done


def test_refused_sequences_are_sent_again_when_others_end() -> None:
    deltas: list[Delta] = []
    engine, (job, done) = FakeEngine(room=2, limit=6), make_job(20, deltas.append)
    engine.collector.add_job(job)
    assert len(engine.refused) == 4
    while not done.is_set():
        engine.refuse()
        assert engine.held, "nothing is sent again"
        engine.end_first()
    assert [sequence.output.token_ids for sequence in job.sequences] == [[9]] * 20
    assert {delta.index for delta in deltas} == set(range(20))
    assert engine.refusals <= 4 + 20  # the first burst, then at most one for each that ends


def test_a_sequence_refused_alone_ends_with_the_error() -> None:
    engine, (job, done) = FakeEngine(room=0, limit=6), make_job(1)
    engine.collector.add_job(job)
    engine.refuse()
    assert done.is_set()
    assert (job.sequences[0].output.finish_reason, job.sequences[0].output.error) == ("error", "queue full: no room; try again later")


def test_a_removed_job_leaves_its_room_to_others() -> None:
    engine, (first, _), (second, done) = FakeEngine(room=9, limit=2), make_job(5), make_job(1)
    second.sequences[0].rid = "other"
    engine.collector.add_job(first)
    engine.collector.add_job(second)
    assert [message.rid for message in engine.held] == ["r0", "r1"]
    engine.collector.remove_job(first)
    assert engine.aborted == ["r0", "r1"]
    assert [message.rid for message in engine.held[2:]] == ["other"]
    engine.held = engine.held[2:]
    engine.end_first()
    assert done.is_set()
