"""The client while the engine or a text process restarts: requests continue from their last token
or end with an error."""

from __future__ import annotations

import asyncio

import pytest

from frame.checkpoint.model_config import find_model
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.inflight_file import hash_request
from frame.core.messages import (
    Abort,
    Control,
    ControlReply,
    Finish,
    Generate,
    StartDetokenize,
    StepText,
    StepTokens,
    Tokenized,
    TokenLogprobs,
)
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import (
    ClientLimits,
    EngineDeadError,
    InvalidRequestError,
)
from frame.entrypoints.engine_client.tokenizing import TokenizerProcesses
from frame.text.detokenizer import Detokenizer
from frame.text.incremental_decoder import TextStream
from frame.text.tokenizer import Tokenizer
from tests.entrypoints.engine_client.test_client import LIMITS, Link, generated, make, submit, tokens_of
from tests.entrypoints.submitting import submit_request


async def test_requests_continue_after_an_engine_crash() -> None:
    client, link = make()
    reply = submit(client, SamplingParams(max_tokens=9, temperature=1.0, prompt_logprobs=1))
    first = generated(link)[0]
    assert first.params.seed is not None  # a recovered request draws the same tokens
    scored = TokenLogprobs([1, 2, 3], [None, -1.0, -2.0], [[], [], []])
    link.inbox = [StepTokens(rids=["r"], token_ids=[[7, 8]], prompt_logprobs={0: scored})]
    client.receive_messages()
    reply.take_changed()
    assert reply.sequences[0].take_output()[1] == [7, 8]  # sent to the user already
    client.begin_recovery("it crashed", {})
    assert client.unavailable_reason == "it crashed"
    late = tokens_of(first, 99)
    link.inbox = [late]
    client.receive_messages()
    client.reserve_sequences(1)
    waiting = submit_request(client, [[5]], [SamplingParams()], rid="new")
    waiting.sequences[0].recovery.expires_at -= LIMITS.request_timeout - 10.0  # the request has waited so long
    assert len(generated(link)) == 1
    client.resume_requests()
    again, new = generated(link)[1:]
    assert (again.token_ids, again.output_len, again.params.seed) == ([1, 2, 3, 7, 8], 2, first.params.seed)
    assert again.params.prompt_logprobs is None  # the client has them
    assert again.rid != first.rid
    assert 0 < (again.deadline or 0) <= LIMITS.request_timeout
    assert (new.rid, new.output_len) == ("new", 0)
    assert 0 < (new.deadline or 0) <= 10.0  # less the time that it waited
    link.inbox = [late, tokens_of(again, 9, finish=Finish("length")), tokens_of(new, finish=Finish("length"))]
    client.receive_messages()
    assert reply.sequences[0].take_output()[1] == [9]
    assert (reply.sequences[0].rid, reply.sequences[0].num_tokens, waiting.num_unfinished) == ("r", 3, 0)
    assert (client.num_outstanding, client.stats.recovered) == (0, 1)


async def test_text_continues_in_the_middle_of_a_character() -> None:
    tokenizer = Tokenizer.load(find_model("frame-tiny"))
    ids = tokenizer.encode("né\u4e2d\U0001f600!", add_special_tokens=False)
    for cut in range(len(ids)):
        client, link = make(detokenizer=Detokenizer(tokenizer))
        reply = submit(client, SamplingParams())
        link.inbox = [tokens_of(generated(link)[0], *ids[:cut])]
        client.receive_messages()
        client.begin_recovery("it crashed", {})
        client.resume_requests()
        link.inbox = [tokens_of(generated(link)[-1], *ids[cut:], finish=Finish("length"))]
        client.receive_messages()
        assert reply.sequences[0].take_output()[0] == "né\u4e2d\U0001f600!"


async def test_a_detokenizer_failure_on_recovery_ends_that_request_only() -> None:
    class Broken:
        def feed(self, token_id: int) -> str:
            raise RuntimeError("no such piece")

        def flush(self) -> str:
            return ""

    detokenizer = Detokenizer(Tokenizer.load(find_model("frame-tiny")))
    client, link = make(detokenizer=detokenizer)
    bad, good = submit(client, SamplingParams(), rid="bad"), submit(client, SamplingParams(), rid="good")
    link.inbox = [StepTokens(rids=["bad", "good"], token_ids=[[70], [70]])]
    client.receive_messages()
    client.begin_recovery("it crashed", {})
    made = detokenizer.create_stream
    detokenizer.create_stream = lambda params, tail=(): TextStream(Broken(), params) if len(detokenizer) == 0 else made(params, tail)  # type: ignore[method-assign]
    client.resume_requests()
    finish = bad.sequences[0].finish
    assert finish is not None and "the detokenizer failed on this request" in (finish.error or "")
    first, told, second = link.sent[-3:]
    assert isinstance(first, Generate) and isinstance(second, Generate)
    assert told == Abort(rids=[first.rid], reason="stop")
    link.inbox = [tokens_of(first, finish=Finish("stop")), tokens_of(second, 71, finish=Finish("length"))]
    client.receive_messages()
    assert (good.num_unfinished, client.num_outstanding) == (0, 0)


async def test_requests_end_while_the_engine_restarts() -> None:
    limits = ClientLimits(max_outstanding=8, max_context=32, vocab_size=100, capacity=64, request_timeout=0.0)
    link = Link()
    client = EngineClient(link, limits)
    replies = {rid: submit(client, SamplingParams(), rid=rid) for rid in ("told", "left", "named", "late")}
    client.abort_requests(["told"])  # the engine crashes before it takes effect
    client.begin_recovery("it crashed", {})
    assert replies["told"].sequences[0].finish == Finish("abort")
    client.abort_request(replies["left"])
    client.abort_requests(["named"])
    assert replies["named"].sequences[0].finish == Finish("abort")
    client.expire_requests()
    assert "deadline exceeded" in (replies["late"].sequences[0].finish.error or "")  # type: ignore[union-attr]
    assert client.num_outstanding == 0
    client.resume_requests()
    assert len(generated(link)) == 4
    assert client.stats.finished == {"abort": 3, "error": 1}


async def test_a_restarted_detokenizer_gets_the_tokens_so_far() -> None:
    client, link = make(remote_text=True)
    reply = submit(client, SamplingParams())
    link.inbox = [StepText(rids=["r"], texts=["ab"], token_ids=[[7, 8]])]
    client.receive_messages()
    client.begin_recovery("it crashed")
    assert link.sent[-1] == Abort(rids=["r"])  # the engine runs on, with a new rid
    link.inbox = [StepText(rids=["r"], texts=["lost"], token_ids=[[9]])]
    client.receive_messages()
    client.resume_requests()
    start, again = link.sent[-2:]
    assert isinstance(start, StartDetokenize) and isinstance(again, Generate)
    assert (start.rid, start.token_ids, again.token_ids) == (again.rid, [7, 8], [1, 2, 3, 7, 8])
    assert reply.sequences[0].take_output() == ("ab", [7, 8], [])


async def test_a_restarted_engine_stays_paused_and_pending_commands_fail() -> None:
    client, link = make()
    pausing = asyncio.ensure_future(client.send_command("pause"))
    await asyncio.sleep(0)
    link.inbox = [ControlReply(id=link.sent[-1].id, ok=True)]  # type: ignore[attr-defined]
    client.receive_messages()
    await pausing
    waiting = asyncio.ensure_future(client.send_command("server_info"))
    await asyncio.sleep(0)
    client.begin_recovery("it crashed", {})
    with pytest.raises(EngineDeadError, match="it crashed"):
        await waiting
    with pytest.raises(EngineDeadError, match="it crashed"):
        await client.send_command("server_info")
    client.resume_requests()
    assert isinstance(link.sent[-1], Control) and link.sent[-1].action == "pause"


async def test_a_request_that_crashes_the_engine_is_refused() -> None:
    client, link = make()
    reply, other = submit(client, SamplingParams(), rid="a"), submit(client, SamplingParams(), rid="b")
    for _ in range(2):
        client.begin_recovery("it crashed", {hash_request(message.rid): 0 for message in generated(link)[-2:]})
        client.resume_requests()
    assert len(generated(link)) == 5  # both twice, then the first alone
    client.begin_recovery("it crashed", {hash_request(generated(link)[-1].rid): 0})
    finish = reply.sequences[0].finish
    assert finish is not None and "crashed the engine 3 times" in (finish.error or "")
    client.resume_requests()
    assert (generated(link)[-1].token_ids, other.num_unfinished) == ([1, 2, 3], 1)


async def test_a_restarted_tokenizer_gets_its_open_requests_again() -> None:
    asked: list[tuple[int, str]] = []
    texts = TokenizerProcesses(2, lambda worker, message: asked.append((worker, message.text or "")))  # type: ignore[attr-defined]
    first, second, third = (asyncio.ensure_future(texts.encode(text)) for text in ("crashes it", "elsewhere", "fine"))
    await asyncio.sleep(0)
    texts.resend_requests(0)
    assert asked == [(0, "crashes it"), (1, "elsewhere"), (0, "fine"), (0, "crashes it"), (0, "fine")]
    texts.resend_requests(0)
    with pytest.raises(InvalidRequestError, match="crashed its tokenizer process 2 times"):
        await first
    assert asked[5:] == [(0, "fine")]
    for name in ("1", "2"):
        texts.receive_reply(Tokenized(id=name, token_ids=[1]))
    assert await asyncio.gather(second, third) == [[1], [1]]
