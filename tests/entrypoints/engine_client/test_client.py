"""`EngineClient` over a simulated link: routing, limits, failures, seeds of parallel sequences,
tokenization."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from frame.checkpoint.model_config import find_model
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import (
    Abort,
    AbortAll,
    Control,
    ControlReply,
    Fatal,
    Finish,
    Generate,
    Heartbeat,
    Message,
    StartDetokenize,
    StepText,
    StepTokens,
    Tokenize,
    TokenLogprobs,
)
from frame.entrypoints.engine_client.client import EXPIRY_GRACE, EngineClient
from frame.entrypoints.engine_client.limits import (
    ClientLimits,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    check_request,
    get_child_params,
)
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.engine_client.tokenizing import INLINE_CHARACTERS, ThreadedTokenizer, TokenizerProcesses, tokenize
from frame.text.chat_template import ChatTemplateError
from frame.text.detokenizer import Detokenizer
from frame.text.tokenizer import Tokenizer
from tests.entrypoints.submitting import Link, submit_request

LIMITS = ClientLimits(max_outstanding=4, max_context=32, vocab_size=100, capacity=64)


def make(**more: Any) -> tuple[EngineClient, Link]:
    link = Link()
    return EngineClient(link, LIMITS, **more), link


def submit(client: EngineClient, *params: SamplingParams, rid: str = "r") -> Any:
    client.reserve_sequences(sum(own.n for own in params))
    return submit_request(client, [[1, 2, 3]] * len(params), params, rid=rid)


def rids(link: Link) -> list[str]:
    return [m.rid for m in link.sent if isinstance(m, Generate)]


async def test_a_step_updates_every_request_once() -> None:
    client, link = make()
    reply = submit(client, SamplingParams(n=2), SamplingParams())
    assert rids(link) == ["r-0", "r-1", "r-2"]
    assert [m.is_further for m in link.sent if isinstance(m, Generate)] == [False, True, True]
    link.inbox = [
        StepText(rids=["r-0", "r-2", "unknown"], texts=["a", "b", "z"], token_ids=[[1], [2], [3]], num_cached_tokens={0: 2}),
        StepText(rids=["r-0"], texts=["c"], token_ids=[[4]], logprobs={0: TokenLogprobs([4], [-1.0], [[]])}),
    ]
    client.receive_messages()
    changed = await asyncio.wait_for(reply.wait(), 1)
    assert [(s.index, s.prompt_index) for s in changed] == [(0, 0), (2, 1)]
    first = changed[0]
    assert first.take_output() == ("ac", [1, 4], [TokenLogprobs([4], [-1.0], [[]])])
    assert (first.cached, first.num_tokens, first.take_output()[0]) == (2, 2, "")
    ends = {i: Finish("length") for i in range(3)}
    link.inbox = [StepText(rids=["r-0", "r-1", "r-2"], texts=["", "", ""], token_ids=[[], [], []], finishes=ends)]
    client.receive_messages()
    await asyncio.wait_for(reply.wait_until_complete(), 1)
    assert client.num_outstanding == 0
    assert client.stats.finished == {"length": 3}
    assert client.stats.generated_tokens == 3


async def test_sequences_are_limited_and_given_back() -> None:
    client, link = make()
    reply = submit(client, SamplingParams(n=3))
    client.reserve_sequences(1)
    with pytest.raises(QueueFullError, match="max_queued_requests"):
        client.reserve_sequences(1)
    with pytest.raises(InvalidRequestError, match="send fewer"):  # a retry would not help
        client.reserve_sequences(LIMITS.max_outstanding + 1)
    client.release_sequences(1)
    client.abort_request(reply)
    assert client.num_outstanding == 0
    assert link.sent[-1] == Abort(rids=["r-0", "r-1", "r-2"])
    client.abort_request(reply)  # a second call does nothing
    assert sum(isinstance(m, Abort) for m in link.sent) == 1
    assert client.stats.rejected == 1


async def test_unread_output_is_limited() -> None:
    client, link = make()
    reply = submit(client, SamplingParams(n=2, logprobs=1))
    given_up: list[str] = []
    reply.set_backpressure_limit(20, lambda: given_up.append("r"))

    def step(count: int = 1) -> None:
        link.inbox = [StepTokens(rids=["r-0", "r-1"], token_ids=[[7] * count, [8] * count])]
        client.receive_messages()

    for _ in range(50):  # output that is read at once never counts
        step(3)
        reply.take_changed()
    step()
    for _ in range(5):
        step()
    assert given_up == []  # 5 steps on top, of 2 sequences, a token and a logprob each
    step()
    assert given_up == ["r"]
    step()
    assert given_up == ["r"]


async def test_a_stop_string_aborts_in_the_engine() -> None:
    client, link = make()
    reply = submit(client, SamplingParams(stop=("x",)))
    link.inbox = [StepText(rids=["r"], texts=["a"], token_ids=[[1]], finishes={0: Finish("stop", "x")}, stopped=[0])]
    client.receive_messages()
    await asyncio.wait_for(reply.wait_until_complete(), 1)
    assert link.sent[-1] == Abort(rids=["r"], reason="stop")


async def test_text_is_made_here_or_in_another_process_or_not_at_all() -> None:
    tokenizer = Tokenizer.load(find_model("frame-tiny"))
    ids = tokenizer.encode("hello", add_special_tokens=False)
    step = StepTokens(rids=["r"], token_ids=[ids], finishes={0: Finish("length")})
    for more, expected in (({"detokenizer": Detokenizer(tokenizer)}, "hello"), ({}, "")):
        client, link = make(**more)
        reply = submit(client, SamplingParams())
        link.inbox = [step]
        client.receive_messages()
        assert reply.sequences[0].take_output()[:2] == (expected, ids)
        assert not any(isinstance(m, StartDetokenize) for m in link.sent)
    client, link = make(remote_text=True)
    submit(client, SamplingParams())
    assert [type(m) for m in link.sent] == [StartDetokenize, Generate]


async def test_an_error_in_a_step_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    detokenizer = Detokenizer(Tokenizer.load(find_model("frame-tiny")))
    client, link = make(detokenizer=detokenizer)
    first, second = submit(client, SamplingParams(), rid="a"), submit(client, SamplingParams(), rid="b")
    process = detokenizer.process_step

    def fails_on_the_first(message: StepTokens) -> StepText:
        if "a" in message.rids:
            raise RuntimeError("boom")
        return process(message)

    monkeypatch.setattr(detokenizer, "process_step", fails_on_the_first)
    link.inbox = [tokens_of(generated(link)[0], 5, finish=Finish("length")), tokens_of(generated(link)[1], 6, finish=Finish("length"))]
    client.receive_messages()
    for reply in (first, second):
        await asyncio.wait_for(reply.wait_until_complete(), 1)
    lost, fine = first.sequences[0].finish, second.sequences[0].finish
    assert lost is not None and lost.reason == "error" and "the server's log" in (lost.error or "")
    assert fine == Finish("length")
    assert link.sent[-1] == Abort(rids=["a"])
    assert client.num_outstanding == len(detokenizer) == 0


async def test_an_error_in_one_handler_does_not_stop_others(monkeypatch: pytest.MonkeyPatch) -> None:
    client, link = make()
    first, second = submit(client, SamplingParams(), rid="a"), submit(client, SamplingParams(), rid="b")

    def fails() -> None:
        raise RuntimeError("boom")

    first.on_update = fails
    link.inbox = [StepText(rids=["a", "b"], texts=["x", "y"], token_ids=[[5], [6]], finishes={0: Finish("length"), 1: Finish("length")})]
    waiting = asyncio.create_task(second.wait())
    await asyncio.sleep(0)
    client.receive_messages()
    assert [stream.rid for stream in await asyncio.wait_for(waiting, 1)] == ["b"]


async def test_the_client_ends_requests_that_the_engine_did_not_end_in_time() -> None:
    client, link = make()
    reply = submit(client, SamplingParams())
    client.expire_requests()
    reply.sequences[0].recovery.expires_at = time.monotonic() - EXPIRY_GRACE / 2
    client.expire_requests()
    assert reply.num_unfinished == 1  # the engine has some more time to end it
    reply.sequences[0].recovery.expires_at -= EXPIRY_GRACE
    client.expire_requests()
    finish = reply.sequences[0].finish
    assert finish is not None and finish.code == "deadline_exceeded" and (finish.error or "").startswith("deadline exceeded: ")
    assert link.sent[-1] == Abort(rids=["r"])
    assert client.num_outstanding == 0


async def test_a_fatal_error_ends_everything() -> None:
    client, link = make()
    reply, control = submit(client, SamplingParams()), asyncio.ensure_future(client.send_command("ping"))
    await asyncio.sleep(0)
    link.inbox = [Fatal(process="engine", error="no memory")]
    client.receive_messages()
    await asyncio.wait_for(reply.wait_until_complete(), 1)
    assert reply.sequences[0].finish == Finish("error", None, "engine failed: no memory")
    with pytest.raises(EngineDeadError):
        await control
    with pytest.raises(EngineDeadError, match="no memory"):
        client.reserve_sequences(1)


async def test_controls_and_heartbeats() -> None:
    client, link = make()
    waiting = asyncio.ensure_future(client.send_command("server_info"))
    await asyncio.sleep(0)
    sent = link.sent[-1]
    assert isinstance(sent, Control)
    beat = Heartbeat(process="engine", step=3, running=2)
    link.inbox = [ControlReply(id="other", ok=True), beat, ControlReply(id=sent.id, ok=True, data={"x": 1})]
    client.receive_messages()
    assert (await waiting).data == {"x": 1}
    assert client.load == beat


def test_seeds_of_parallel_sequences_differ() -> None:
    params = SamplingParams(n=3, seed=2**63 - 1)
    found = [get_child_params(params, i) for i in range(3)]
    assert found[0] == SamplingParams(seed=2**63 - 1)
    assert len({each.seed for each in found}) == 3
    assert not any(each.problems() for each in found)
    assert get_child_params(SamplingParams(n=2), 1).seed is None


@pytest.mark.parametrize(
    ("prompt", "params", "part"),
    [
        ([], {}, "empty"),
        ([1] * 32, {}, "shorten"),
        ([1] * 30, {"max_tokens": 3}, "lower max_tokens to 2"),
        ([100], {}, "vocabulary"),
        ([1], {"regex": "x"}, "--grammar-backend"),
        ([1], {"top_p": 0.0}, "top_p"),
    ],
)
def test_requests_that_cannot_be_served(prompt: list[int], params: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidRequestError, match=part):
        check_request(LIMITS, prompt, SamplingParams(**params))


def test_two_running_requests_cannot_share_a_name() -> None:
    client, _ = make()
    submit(client, SamplingParams())
    with pytest.raises(InvalidRequestError, match="choose another"):
        submit(client, SamplingParams())


def test_abort_names_whole_requests_and_nothing_else() -> None:
    client, link = make()
    submit(client, SamplingParams(n=2), rid="job")
    submit(client, SamplingParams(), rid="job-7")
    sent = len(link.sent)
    client.abort_requests(["unknown"])
    assert len(link.sent) == sent  # unknown names end nothing
    client.abort_requests(["job"])
    assert link.sent[-1] == Abort(rids=["job-0", "job-1"])
    client.abort_requests(["job-7"])
    assert link.sent[-1] == Abort(rids=["job-7"])
    client.abort_requests([])
    assert link.sent[-1] == AbortAll()


def test_a_request_that_cannot_be_sent_leaves_no_trace() -> None:
    client, link = make()

    def refuse(message: Message) -> None:
        if isinstance(message, Generate) and message.rid == "r-1":
            raise OverflowError("no such number on the wire")
        link.sent.append(message)

    client.link.send = refuse  # type: ignore[method-assign]
    with pytest.raises(OverflowError):
        submit(client, SamplingParams(n=2))
    client.release_sequences(2)  # the caller gives the room back
    assert client.num_outstanding == 0
    assert isinstance(link.sent[-1], Abort)
    assert "r-0" in link.sent[-1].rids


# tokenizing
# --------------------------------------------------------------------------------------------------


class Loopback:
    """Tokenizer processes, simulated in this one."""

    def __init__(self, tokenizer: Tokenizer, workers: int) -> None:
        self.asked: list[int] = []
        self.input = TokenizerProcesses(workers, self.send)
        self._tokenizer = tokenizer

    def send(self, worker: int, message: Message) -> None:
        assert isinstance(message, Tokenize)
        self.asked.append(worker)
        asyncio.get_running_loop().call_soon(self.input.receive_reply, tokenize(self._tokenizer, message))


async def test_threads_and_processes_give_the_same_ids() -> None:
    tokenizer = Tokenizer.load(Path(find_model("frame-tiny")))
    loopback = Loopback(tokenizer, 2)
    threads = ThreadedTokenizer(tokenizer)
    chats: Sequence[Any] = [[{"role": "user", "content": "x" * size}] for size in (3, INLINE_CHARACTERS + 1)]
    for text in ("short", "long " * INLINE_CHARACTERS):
        assert await threads.encode(text) == await loopback.input.encode(text) == tokenizer.encode(text)
    for chat in chats:
        expected = tokenizer.encode_chat(chat)
        assert await threads.encode_chat(chat, None, {}) == await loopback.input.encode_chat(chat, None, {}) == expected
    assert loopback.asked == [0, 1, 0, 1]
    for each in (threads, loopback.input):
        with pytest.raises(ChatTemplateError, match="unknown role"):
            await each.encode_chat([{"role": "alien", "content": "x"}], None, {})


@pytest.mark.parametrize("beside", [
    {},
    {"content": "x" * INLINE_CHARACTERS},
    {"reasoning_content": "x" * INLINE_CHARACTERS},
    {"tool_calls": [{"function": {"name": "f", "arguments": {"a": "x" * INLINE_CHARACTERS}}}]},
], ids=["nothing", "content", "thinking", "calls"])  # fmt: skip
async def test_only_short_conversations_are_encoded_on_the_loop(beside: dict[str, Any]) -> None:
    threads = []

    class Watched(Tokenizer):
        def encode_chat(self, *arguments: Any) -> list[int]:
            threads.append(threading.current_thread())
            return []

    text_input = ThreadedTokenizer(Watched.__new__(Watched))
    await text_input.encode_chat([{"role": "assistant", "content": "", **beside}], None, {})
    await text_input.encode_chat([{"role": "assistant", "content": ""}], None, {"documents": beside})
    assert [thread is threading.main_thread() for thread in threads] == [not beside, False]


# restarts
# --------------------------------------------------------------------------------------------------


def generated(link: Link) -> list[Generate]:
    return [message for message in link.sent if isinstance(message, Generate)]


def tokens_of(message: Generate, *ids: int, finish: Finish | None = None) -> StepTokens:
    return StepTokens(rids=[message.rid], token_ids=[list(ids)], finishes={} if finish is None else {0: finish})


def test_weights_that_made_no_token_are_not_named() -> None:
    sequence = SequenceState(RequestState("r", ""), 0, 0, "r", [1], SamplingParams())
    sequence.change_version("a")
    assert sequence.weight_version == "a"
    sequence.recovery.output_ids.append(5)
    sequence.change_version("b")
    assert (sequence.weight_version, sequence.weight_versions) == ("a", [(0, "a")])
    sequence.change_version("c")
    sequence.recovery.output_ids.append(6)
    assert (sequence.weight_version, sequence.weight_versions) == ("c", [(0, "a"), (1, "c")])
