"""A streamed answer is the whole answer, however its tokens come: fuzzed through the client, the
detokenizer, stop strings, the parsers and the responses themselves. Only sockets and engine are
played.

A case is a seed: tokenizer, route, parsers, what the model writes (well formed, damaged, or noise),
how it is cut into tokens (also within characters), stop strings, log-probabilities, and number of
sequences. It is answered whole, then streamed by several cuttings into steps.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from codecs import getincrementaldecoder
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from frame.checkpoint.model_config import find_model
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, Generate, StepTokens, TokenLogprobs
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import ClientLimits
from frame.entrypoints.http.chat.output_parser import ParserPair, decode_prompt_end
from frame.entrypoints.http.openai import completions
from frame.entrypoints.http.openai.completions import ChatResponse, CompletionResponse
from frame.entrypoints.http.openai.completions_schema import ChatRequest, CompletionRequest
from frame.plugins.loader import load_registry
from frame.testing.contexts import PARSER
from frame.text.detokenizer import Detokenizer
from frame.text.tokenizer import Tokenizer
from tests.entrypoints.submitting import submit_request
from tests.plugins.tool_call_parsers.texts import FUNCTIONS, THOUGHTS, WORDS, WRITERS, damaged, some_calls
from tests.text.test_detokenizer import byte_fallback

CASES, ALL_CASES, BLOCK = 60, 10_000, 500
TOOLS = [{"type": "function", "function": {"name": f.name, "parameters": f.parameters}} for f in FUNCTIONS]
NOISE = "ab é日🙂\u0301\n\t<>[]{}\"'\\|`:,=()/_0"
REGISTRY = load_registry(installed=False)


@functools.cache
def frame_tiny() -> Tokenizer:
    return Tokenizer.load(Path(find_model("frame-tiny")))


@functools.cache
def pieces() -> dict[bytes, int]:
    """frame-tiny's ordinary tokens by their bytes."""
    tokenizer = frame_tiny()
    assert tokenizer.pieces is not None
    return {piece: i for i, piece in enumerate(tokenizer.pieces) if piece and i not in tokenizer.special_ids}


def parser(kind: str, name: str | None) -> Any:
    if name is None:
        return None
    record = REGISTRY.get(kind, name)
    return functools.partial(REGISTRY.load(record), PARSER, REGISTRY.options(record, {}))


class Case:
    """Everything that a seed decides but the cutting into steps."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.is_chat = dice.random() < 0.75
        self.is_byte_level = dice.random() < 0.8
        self.tokenizer = frame_tiny() if self.is_byte_level else byte_fallback()
        self.reasoning = dice.choice([None, *THOUGHTS])
        self.tools = dice.choice([None, *WRITERS])
        self.ends = [self._sequence() for _ in range(dice.choice((1, 1, 1, 2, 3)))]
        text = self.tokenizer.decode(self.ends[0][0], False)
        places = [dice.randrange(len(text) + 1) for _ in range(dice.choice((0, 0, 1, 2)))]
        stops = [stop for place in places if (stop := text[place : place + dice.randint(1, 6)])]
        self.fields: dict[str, Any] = {
            "n": len(self.ends),
            "max_tokens": 4096,
            "stop": stops or None,
            "include_stop_str_in_output": dice.random() < 0.3,
            "min_tokens": dice.choice((0, 0, 5)),
            "skip_special_tokens": dice.random() < 0.7,
            "stream_options": {"include_usage": True, "continuous_usage_stats": dice.random() < 0.3},
        }
        self.wants_logprobs = dice.random() < 0.4
        self.prompt_end = dice.choice(("x", "<think>\n", "<think>\n\n</think>\n\n", "<|start|>assistant"))
        self.is_parallel = dice.random() < 0.7

    def _sequence(self) -> tuple[list[int], Finish]:
        """One sequence's tokens and its end."""
        dice = self.dice
        ids = self._cut(self._text())
        if dice.random() < 0.2 and self.is_byte_level:  # special and arbitrary tokens in between
            for _ in range(dice.randint(1, 6)):
                ids.insert(dice.randrange(len(ids) + 1), dice.randrange(self.tokenizer.vocab_size))
        if dice.random() < 0.5:
            return ids or [5], Finish("length")
        end = dice.choice(self.tokenizer.eos_token_ids or (2,))
        return [*ids, end], Finish("stop", end)

    def _text(self) -> str:
        dice = self.dice
        if dice.random() < 0.15:
            return "".join(dice.choice(NOISE) for _ in range(dice.randint(0, 60)))
        before, after = THOUGHTS[self.reasoning] if self.reasoning and dice.random() < 0.8 else ("", "")
        calls = WRITERS[self.tools or "hermes"](some_calls(dice)) if dice.random() < 0.7 else ""
        said = dice.choice(("", "", " ", "Well. ", dice.choice(WORDS)))
        text = f"{before}{dice.choice(WORDS)}{after}{said}{calls}{dice.choice(('', ' Done.', chr(10)))}"
        return damaged(text, dice) if text and dice.random() < 0.4 else text

    def _cut(self, text: str) -> list[int]:
        """Token ids of the text: as the tokenizer encodes it, or any others with the same bytes."""
        if not self.is_byte_level:
            return [3 + byte for byte in text.encode()]
        if self.dice.random() < 0.3:
            return self.tokenizer.encode(text, False)
        data, ids, place = text.encode(), [], 0
        while place < len(data):
            known = [size for size in range(1, 9) if data[place : place + size] in pieces() and place + size <= len(data)]
            size = self.dice.choice(known)
            ids.append(pieces()[data[place : place + size]])
            place += size
        return ids

    def request(self, *, stream: bool) -> Any:
        fields = {**self.fields, "stream": stream}
        if not stream:
            del fields["stream_options"]
        if self.is_chat:
            fields |= {"messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": self.is_parallel, "tools": TOOLS}
            fields |= {"logprobs": True, "top_logprobs": 1} if self.wants_logprobs else {}
            return ChatRequest.model_validate(fields)
        fields |= {"logprobs": 1} if self.wants_logprobs else {}
        return CompletionRequest.model_validate({**fields, "prompt": "x"})


class Played(SimpleNamespace):
    """Services whose engine is a list of steps, and a call that keeps what it is sent."""

    def __init__(self, case: Case, steps: list[StepTokens], rng: random.Random) -> None:
        super().__init__(
            resolved=SimpleNamespace(served_name="m", user=SimpleNamespace(disaggregation=SimpleNamespace(mode=None))),
            response_model=lambda model: model or "m",
            fingerprint="f",
            tokenizer=case.tokenizer,
            reasoning=parser("reasoning_parser", case.reasoning),
            tool_calls=parser("tool_call_parser", case.tools),
        )
        self.steps, self.rng = steps, rng
        self.sent: list[bytes] = []
        self.replied: Any = None
        self.client = EngineClient(
            self, ClientLimits(max_outstanding=9, max_context=10_000, vocab_size=10**6, capacity=10_000), Detokenizer(case.tokenizer)
        )
        self.names: list[str] = []

    def need_tokenizer(self) -> Tokenizer:
        return self.tokenizer  # type: ignore[no-any-return]

    def send(self, message: Any) -> None:  # the link's
        if isinstance(message, Generate):
            self.names.append(message.rid)

    def _play(self, step: StepTokens) -> None:
        self.client.handle_messages([msgspec.structs.replace(step, rids=[self.names[int(rid)] for rid in step.rids])])

    async def complete(self, reply: Any) -> Any:
        for step in self.steps:
            self._play(step)
        assert not reply.num_unfinished

    async def stream(self, context: Any, services: Any, reply: Any, write: Any, close: Any) -> None:
        """Some steps come while the connection is full: their news is written together."""
        for step in self.steps:
            self._play(step)
            if self.rng.random() < 0.7:
                self.sent += [write(sequence) for sequence in reply.take_changed()]
        self.sent += [write(sequence) for sequence in reply.take_changed()]
        assert not reply.num_unfinished
        self.sent.append(close())


def steps_of(case: Case, sizes: tuple[int, ...], rng: random.Random) -> list[StepTokens]:
    """Every sequence's tokens in pieces of some of these sizes, several sequences in a step; the
    end comes with the last, or after it."""
    left = [list(ids) for ids, _ in case.ends]
    is_open, found = [True] * len(left), []
    while any(is_open):
        rids, ids, finishes, logprobs = [], [], {}, {}
        for i, (rest, (_, finish)) in enumerate(zip(left, case.ends, strict=True)):
            if not is_open[i] or rng.random() < 0.2:
                continue
            size = rng.choice(sizes)
            part, rest[:] = rest[:size], rest[size:]
            if not rest and (finish.reason == "stop" or rng.random() < 0.7 or not part):
                finishes[len(rids)] = finish
                is_open[i] = False
            if case.wants_logprobs and part:
                logprobs[len(rids)] = TokenLogprobs(part, [-0.5] * len(part), [[(token, -0.5)] for token in part])
            rids.append(str(i))
            ids.append(part)
        found.append(StepTokens(rids=rids, token_ids=ids, finishes=finishes, logprobs=logprobs))
    return found


def play(case: Case, steps: list[StepTokens], rng: random.Random, *, stream: bool) -> Played:
    services, request = Played(case, steps, rng), case.request(stream=stream)
    params, prompt = request.to_sampling_params(SamplingParams()), case.tokenizer.encode(case.prompt_end, False) or [3]
    if case.is_chat:
        pair = ParserPair(
            services.reasoning and services.reasoning(),
            services.tool_calls and services.tool_calls(),
            request.resolve_tools(),
            decode_prompt_end(prompt, case.tokenizer),
        )
        params = pair.constrain_params(params)
    services.client.reserve_sequences(params.n)
    reply = submit_request(services.client, [prompt], [params])
    response: Any = (ChatResponse if case.is_chat else CompletionResponse)(services, request, reply)  # type: ignore[arg-type]
    with patch.multiple(completions, wait_complete=services.complete, stream_response=services.stream):
        body = asyncio.run(response.send(services))
    if body is not None:
        services.replied = json.loads(msgspec.json.encode(body))
    assert services.client.num_outstanding == 0
    return services


def joined(case: Case, sent: list[bytes]) -> dict[str, Any]:
    """What a client makes of the events: the choices and the usage of the whole answer."""
    events = b"".join(sent).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    choices: dict[int, dict[str, Any]] = {
        i: {"index": i, "texts": {}, "calls": [], "logprobs": [], "end": None} for i in range(len(case.ends))
    }
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        mine = choices[choice["index"]]
        assert mine["end"] is None, "something comes after the end"
        if choice["finish_reason"] is not None:
            mine["end"] = (choice["finish_reason"], choice.get("matched_stop"))
        mine["logprobs"] += listed(choice["logprobs"])
        delta = choice["delta"] if case.is_chat else {"content": choice["text"]}
        for key, value in delta.items():
            if key == "tool_calls":
                (call,) = value
                if "id" in call:
                    assert call["index"] == len(mine["calls"])
                    mine["calls"].append([call["function"]["name"], ""])
                mine["calls"][call["index"]][1] += call["function"]["arguments"]
            else:
                mine["texts"][key] = mine["texts"].get(key, "") + (value or "")  # a refusal is null
    assert chunks[-1]["choices"] == []
    return {"choices": list(choices.values()), "usage": chunks[-1]["usage"]}


def listed(logprobs: Any) -> list[Any]:
    """Log-probabilities as one entry a token."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return [list(entry) for entry in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True)]


def whole(case: Case, body: Any) -> dict[str, Any]:
    """The same of an answer that came at once."""
    choices = []
    for choice in body["choices"]:
        message = choice["message"] if case.is_chat else {"content": choice["text"]}
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.pop("tool_calls", ())]
        texts = {key: value or "" for key, value in message.items()}
        end = (choice["finish_reason"], choice["matched_stop"])
        choices.append({"index": choice["index"], "texts": texts, "calls": calls, "logprobs": listed(choice["logprobs"]), "end": end})
    return {"choices": choices, "usage": body["usage"]}


def plain_text(case: Case, ids: list[int], finish: Finish) -> str:
    """A completion's text by its definition: the joined bytes, up to the first stop string that a
    token completes."""
    pieces, special = case.tokenizer.pieces, case.tokenizer.special_ids if case.fields["skip_special_tokens"] else ()
    assert pieces is not None
    includes = case.fields["include_stop_str_in_output"]
    shown = ids[:-1] if isinstance(finish.matched, int) and not includes else ids
    decoder, text = getincrementaldecoder("utf-8")("replace"), ""
    for data in [*(b"" if token in special else pieces[token] for token in shown), None]:
        text += decoder.decode(data or b"", data is None)
        stops = [(text.index(stop), -len(stop)) for stop in case.fields["stop"] or () if stop in text]
        if stops:
            place, size = min(stops)
            return text[: place - size if includes else place]
    return text


def check(seed: int) -> Case:
    case = Case(seed)
    cut = random.Random(seed)
    expected = whole(case, play(case, steps_of(case, (10**6,), cut), cut, stream=False).replied)
    assert whole(case, play(case, steps_of(case, (1, 2, 3), cut), cut, stream=False).replied) == expected, seed
    if not case.is_chat and case.is_byte_level and not case.fields["min_tokens"]:
        assert [choice["texts"]["content"] for choice in expected["choices"]] == [plain_text(case, *end) for end in case.ends], seed
    for sizes in ((1,), (0, 1, 2, 5), (1, 40), (10**6,)):
        found = joined(case, play(case, steps_of(case, sizes, cut), cut, stream=True).sent)
        for choice in found["choices"]:
            choice["texts"].setdefault("content", "")
        assert found == expected, (seed, sizes)
    return case


@pytest.mark.slow
def test_streams_are_whole_answers() -> None:
    cases = [check(seed) for seed in range(CASES)]
    assert {case.tools for case in cases} >= set(WRITERS)
    assert {case.reasoning for case in cases} >= set(THOUGHTS)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(CASES, ALL_CASES, BLOCK))
def test_streams_are_whole_answers_at_length(first: int) -> None:
    for seed in range(first, min(first + BLOCK, ALL_CASES)):
        check(seed)
