"""The client while engine or text processes are away: requests go on where they were, or end by name."""

from __future__ import annotations

import asyncio

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.inflight_file import hash_request
from frame.core.loading.model_config import find_model
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
from frame.core.text.detokenizer import Detokenizer
from frame.core.text.incremental_decoder import TextStream
from frame.core.text.tokenizer import Tokenizer
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import (
    ClientLimits,
    EngineDeadError,
    InvalidRequestError,
)
from frame.entrypoints.engine_client.tokenizing import ProcessInput
from tests.entrypoints.engine_client.test_client import LIMITS, Link, generated, make, submit, tokens_of


async def test_after_a_death_a_request_goes_on_where_it_was() -> None:
    client, link = make()
    answer = submit(client, SamplingParams(max_tokens=9, temperature=1.0, prompt_logprobs=1))
    first = generated(link)[0]
    assert first.params.seed is not None  # or it would draw others the next time
    scored = TokenLogprobs([1, 2, 3], [None, -1.0, -2.0], [[], [], []])
    link.inbox = [StepTokens(rids=["r"], token_ids=[[7, 8]], prompt_logprobs={0: scored})]
    client.drain()
    answer.take_changed()
    assert answer.sequences[0].take()[1] == [7, 8]  # sent to the user already
    client.suspend("it died", {})
    assert client.away == "it died"
    late = tokens_of(first, 99)
    link.inbox = [late]
    client.drain()
    client.reserve(1)
    waiting = client.submit([[5]], [SamplingParams()], rid="new")
    waiting.sequences[0].standing.expires -= LIMITS.request_timeout - 10.0  # so long it waits for an engine
    assert len(generated(link)) == 1
    client.resume()
    again, new = generated(link)[1:]
    assert (again.token_ids, again.output_len, again.params.seed) == ([1, 2, 3, 7, 8], 2, first.params.seed)
    assert again.params.prompt_logprobs is None  # they are here
    assert again.rid != first.rid
    assert 0 < (again.deadline or 0) <= LIMITS.request_timeout
    assert (new.rid, new.output_len) == ("new", 0)
    assert 0 < (new.deadline or 0) <= 10.0  # its time ran on meanwhile
    link.inbox = [late, tokens_of(again, 9, finish=Finish("length")), tokens_of(new, finish=Finish("length"))]
    client.drain()
    assert answer.sequences[0].take()[1] == [9]
    assert (answer.sequences[0].rid, answer.sequences[0].num_tokens, waiting.open) == ("r", 3, 0)
    assert (client.num_outstanding, client.stats.recovered) == (0, 1)


async def test_text_goes_on_in_the_middle_of_a_character() -> None:
    tokenizer = Tokenizer.load(find_model("frame-tiny"))
    ids = tokenizer.encode("né\u4e2d\U0001f600!", add_special_tokens=False)
    for cut in range(len(ids)):
        client, link = make(detokenizer=Detokenizer(tokenizer))
        answer = submit(client, SamplingParams())
        link.inbox = [tokens_of(generated(link)[0], *ids[:cut])]
        client.drain()
        client.suspend("it died", {})
        client.resume()
        link.inbox = [tokens_of(generated(link)[-1], *ids[cut:], finish=Finish("length"))]
        client.drain()
        assert answer.sequences[0].take()[0] == "né\u4e2d\U0001f600!"


async def test_text_that_cannot_be_made_again_ends_its_request_alone() -> None:
    class Broken:
        def feed(self, token_id: int) -> str:
            raise RuntimeError("no such piece")

        def flush(self) -> str:
            return ""

    detokenizer = Detokenizer(Tokenizer.load(find_model("frame-tiny")))
    client, link = make(detokenizer=detokenizer)
    bad, good = submit(client, SamplingParams(), rid="bad"), submit(client, SamplingParams(), rid="good")
    link.inbox = [StepTokens(rids=["bad", "good"], token_ids=[[70], [70]])]
    client.drain()
    client.suspend("it died", {})
    made = detokenizer.create_stream
    detokenizer.create_stream = lambda params, tail=(): TextStream(Broken(), params) if len(detokenizer) == 0 else made(params, tail)  # type: ignore[method-assign]
    client.resume()
    finish = bad.sequences[0].finish
    assert finish is not None and "the detokenizer failed on this request" in (finish.error or "")
    first, told, second = link.sent[-3:]
    assert isinstance(first, Generate) and isinstance(second, Generate)
    assert told == Abort(rids=[first.rid], reason="stop")
    link.inbox = [tokens_of(first, finish=Finish("stop")), tokens_of(second, 71, finish=Finish("length"))]
    client.drain()
    assert (good.open, client.num_outstanding) == (0, 0)


async def test_what_ends_while_the_engine_is_away() -> None:
    limits = ClientLimits(max_outstanding=8, max_context=32, vocab_size=100, capacity=64, request_timeout=0.0)
    link = Link()
    client = EngineClient(link, limits)
    answers = {rid: submit(client, SamplingParams(), rid=rid) for rid in ("told", "left", "named", "late")}
    client.abort(["told"])  # the engine dies before it hears of it
    client.suspend("it died", {})
    assert answers["told"].sequences[0].finish == Finish("abort")
    client.abandon(answers["left"])
    client.abort(["named"])
    assert answers["named"].sequences[0].finish == Finish("abort")
    client.expire()
    assert "deadline exceeded" in (answers["late"].sequences[0].finish.error or "")  # type: ignore[union-attr]
    assert client.num_outstanding == 0
    client.resume()
    assert len(generated(link)) == 4
    assert client.stats.finished == {"abort": 3, "error": 1}


async def test_a_detokenizer_that_comes_again_is_told_what_is_out() -> None:
    client, link = make(remote_text=True)
    answer = submit(client, SamplingParams())
    link.inbox = [StepText(rids=["r"], texts=["ab"], token_ids=[[7, 8]])]
    client.drain()
    client.suspend("it died")
    assert link.sent[-1] == Abort(rids=["r"])  # the engine lives, and goes on under another name
    link.inbox = [StepText(rids=["r"], texts=["lost"], token_ids=[[9]])]
    client.drain()
    client.resume()
    watch, again = link.sent[-2:]
    assert isinstance(watch, StartDetokenize) and isinstance(again, Generate)
    assert (watch.rid, watch.token_ids, again.token_ids) == (again.rid, [7, 8], [1, 2, 3, 7, 8])
    assert answer.sequences[0].take() == ("ab", [7, 8], [])


async def test_a_new_engine_stays_paused_and_old_commands_end() -> None:
    client, link = make()
    pausing = asyncio.ensure_future(client.control("pause"))
    await asyncio.sleep(0)
    link.inbox = [ControlReply(id=link.sent[-1].id, ok=True)]  # type: ignore[attr-defined]
    client.drain()
    await pausing
    waiting = asyncio.ensure_future(client.control("server_info"))
    await asyncio.sleep(0)
    client.suspend("it died", {})
    with pytest.raises(EngineDeadError, match="it died"):
        await waiting
    with pytest.raises(EngineDeadError, match="it died"):
        await client.control("server_info")
    client.resume()
    assert isinstance(link.sent[-1], Control) and link.sent[-1].action == "pause"


async def test_a_killer_is_refused_and_its_answer_told() -> None:
    client, link = make()
    answer, other = submit(client, SamplingParams(), rid="a"), submit(client, SamplingParams(), rid="b")
    for _ in range(2):
        client.suspend("it died", {hash_request(message.rid): 0 for message in generated(link)[-2:]})
        client.resume()
    assert len(generated(link)) == 5  # both, both, and the first alone
    client.suspend("it died", {hash_request(generated(link)[-1].rid): 0})
    finish = answer.sequences[0].finish
    assert finish is not None and "ended the engine 3 times" in (finish.error or "")
    client.resume()
    assert (generated(link)[-1].token_ids, other.open) == ([1, 2, 3], 1)


async def test_a_tokenizer_that_comes_again_is_asked_again() -> None:
    asked: list[tuple[int, str]] = []
    texts = ProcessInput(2, lambda worker, message: asked.append((worker, message.text or "")))  # type: ignore[attr-defined]
    first, second, third = (asyncio.ensure_future(texts.encode(text)) for text in ("poison", "elsewhere", "fine"))
    await asyncio.sleep(0)
    texts.ask_again(0)
    assert asked == [(0, "poison"), (1, "elsewhere"), (0, "fine"), (0, "poison"), (0, "fine")]
    texts.ask_again(0)
    with pytest.raises(InvalidRequestError, match="ended its tokenizer process 2 times"):
        await first
    assert asked[5:] == [(0, "fine")]
    for name in ("1", "2"):
        texts.answer(Tokenized(id=name, token_ids=[1]))
    assert await asyncio.gather(second, third) == [[1], [1]]
