"""Drafters and requests of every kind, in engines of every kind: 1,000 requests each, with the
tokens of an engine without a drafter. The parameters of each request are drawn at random.

The 45 runs take one to two minutes each on one core:
`python -m pytest -m soak --timeout 0 tests/core/test_speculative_grid.py`. `FRAME_GRID_REQUESTS`
sets another number of requests.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import GrammarContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Generate, TokenLogprobs
from frame.entrypoints.engine_client.limits import get_child_params
from frame.plugins.loader import load_registry
from frame.testing.checkpoints import make_checkpoint
from frame.testing.drafters import Script, ScriptedDrafter
from frame.testing.local_loop import LocalLoop
from frame.text.tokenizer import Tokenizer
from tests.core.greedy import Case, make_loop, on_two_ranks
from tests.plugins.drafters.test_heads import make_eagle, make_medusa

pytestmark = pytest.mark.soak

COUNT = int(os.environ.get("FRAME_GRID_REQUESTS", "1000"))
STEPS = 5
GRAMMARS = ("(foo|bar|[a-c]{2,5})( (foo|bar|[a-c]{2,5})){2,6}", "[0-9]{5,20}", '\\{"name": "[a-z]{1,8}", "value": -?[0-9]{1,4}\\}')
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"tokens": 16 * 1024, "chunk": 512, "page_size": 16, "overlap": False},
    "adaptive": {"tokens": 16 * 1024, "chunk": 32, "page_size": 1, "overlap": True},
    "scarce": {"tokens": 160, "chunk": 64, "page_size": 16, "overlap": True},
    "scarce, single-token pages": {"tokens": 160, "chunk": 64, "page_size": 1, "overlap": True},
    "two ranks": {"tokens": 160, "chunk": 64, "page_size": 16, "overlap": True},
}
FOLDER = str(find_model(EMBEDDED))
HEADS = {"eagle3": make_eagle, "medusa": make_medusa}


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams
    grammar: str | None


@dataclass
class ReplyText:
    tokens: list[int]
    logprobs: list[float | None]
    steps: int = 0  # that had output
    is_ended: bool = False

    def is_close(self, other: ReplyText) -> bool:
        return self.tokens == other.tokens and self.logprobs == pytest.approx(other.logprobs, abs=1e-3)


class Target:
    """A checkpoint, its requests, and their answers without a drafter."""

    def __init__(self, folder: str, draft: dict[str, str]) -> None:
        self.folder, self.draft = folder, draft
        self.tokenizer = Tokenizer.load(folder)
        self.requests = self.make_requests(COUNT, biased=bool(draft))
        registry = load_registry(installed=False)
        backend = registry.load(registry.get("grammar_backend", "llguidance"))(GrammarContext(self.tokenizer, 2048 if not draft else 384))
        self.compiled = {source: backend.compile("regex", source) for source in GRAMMARS}
        self.expected = self.reply(make_loop(folder, 16 * 1024), self.requests)
        self.add_stops()

    def make_requests(self, count: int, *, biased: bool) -> list[Request]:
        """biased: most tokens are among those that the random heads draft."""
        numbers = random.Random(9)
        stem, found = [numbers.randrange(6, 384) for _ in range(32)], []
        while len(found) < count:
            prompt = [numbers.randrange(6, 384) for _ in range(numbers.randint(2, 18))] * numbers.randint(1, 3)
            prompt = stem[: numbers.randint(0, 32)] + prompt if numbers.random() < 0.5 else prompt
            more: dict[str, Any] = {"temperature": numbers.choice((0.0, 0.7, 1.0)), "seed": numbers.randrange(2**40)}
            if numbers.random() < 0.25:
                more |= {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.2, "min_tokens": 3}
            if numbers.random() < 0.25:
                more |= {"top_p": 0.9, "top_k": 20, "min_p": 0.01}
            grammar = numbers.choice(GRAMMARS) if numbers.random() < 0.25 else None
            if numbers.random() < 0.3 and grammar is None:  # with `min_tokens`, they may exclude all tokens that a grammar accepts
                more["stop_token_ids"] = tuple(numbers.sample(range(384), 20))
            if numbers.random() < 0.25:
                more["logprobs"] = numbers.randint(0, 3)
            if numbers.random() < 0.1:
                more["num_speculative_tokens"] = numbers.randint(0, 2)
            if biased and grammar is None:
                more["logit_bias"] = dict.fromkeys(liked_tokens(), 9.0)
            n = 3 if numbers.random() < 0.1 else 1
            maximum = 64 if numbers.random() < 0.2 else numbers.randint(3, 16)
            params = SamplingParams(n=n, ignore_eos=grammar is None and numbers.random() < 0.5, max_tokens=maximum, **more)
            found += [Request(prompt, get_child_params(params, number), grammar) for number in range(n)]
        return found[:count]

    def add_stops(self) -> None:
        """Give one answer in five a stop string that is in its text."""
        numbers = random.Random(2)
        for number, reply in enumerate(self.expected):
            text = self.tokenizer.decode(reply.tokens)
            if len(text) < 6 or numbers.random() > 0.2:
                continue
            start = numbers.randrange(len(text) - 2)
            request = self.requests[number]
            stopped = structs.replace(request.params, stop=(text[start : start + 2],))
            self.requests[number] = Request(request.prompt, stopped, request.grammar)
            self.cut(reply, stopped.stop[0])

    def cut(self, reply: ReplyText, stop: str) -> bool:
        """Whether the text has the stop string; the answer then ends with it."""
        for length in range(1, len(reply.tokens) + 1):
            if stop in self.tokenizer.decode(reply.tokens[:length]):
                del reply.tokens[length:], reply.logprobs[length:]
                return True
        return False

    def reply(self, loop: LocalLoop, requests: Sequence[Request]) -> list[ReplyText]:
        """Requests that meet their stop string are aborted, as the text processes do."""
        replies = {f"{id(requests)}.{number}": ReplyText([], []) for number in range(len(requests))}
        stops = {rid: request.params.stop for rid, request in zip(replies, requests, strict=True)}
        waiting = zip(replies, requests, strict=True)

        def add(count: int) -> None:
            for rid, request in islice(waiting, count):
                grammar = self.compiled[request.grammar].start() if request.grammar else None
                assert loop.scheduler.add_request(Generate(rid=rid, token_ids=request.prompt, params=request.params), grammar) is None

        add(64)
        for step in loop.run_steps():
            add(len(step.finishes))
            loop.stats["cached"] += sum(step.num_cached_tokens.values())
            for index, rid in enumerate(step.rids):
                reply = replies[rid]
                if reply.is_ended:
                    continue
                reply.tokens += step.token_ids[index]
                reply.steps += bool(step.token_ids[index])
                reply.logprobs += step.logprobs.get(index, TokenLogprobs([], [], [])).logprobs
                reply.is_ended = index in step.finishes
                assert not reply.is_ended or step.finishes[index].reason != "error", step.finishes[index]
                if stops[rid] and self.cut(reply, stops[rid][0]):
                    reply.is_ended = True
                    loop.scheduler.abort([rid], "stop")
        assert all(reply.is_ended for reply in replies.values())
        return list(replies.values())

    def make_script(self, *, is_right: bool) -> Script:
        """Drafts of the expected tokens, or of wrong ones."""
        outputs = {(tuple(r.prompt), r.params.seed): reply.tokens for r, reply in zip(self.requests, self.expected, strict=True)}

        def script(setup: SlotSetup, given: Sequence[int], maximum: int) -> list[int]:
            start = len(given) - setup.prompt_len
            tokens = outputs[tuple(given[: setup.prompt_len]), setup.params.seed][start : start + maximum]
            return tokens if is_right else [(token + 1) % 384 for token in tokens]

        return script


def liked_tokens() -> list[int]:
    """The tokens that the random heads draft."""
    return sorted(random.Random(3).sample(range(384), 96))[:6]


def prefer_liked_tokens(folder: Path) -> None:
    """Random heads draft a few tokens only, so that some of their drafts are accepted."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name == "lm_head.weight":
            tensor[: len(liked_tokens())] *= 30
        elif name.endswith(".2.weight"):
            tensor[liked_tokens()] *= 30
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def get_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    @cache
    def get(name: str) -> Target:
        if name == "frame-tiny":
            return Target(FOLDER, {})
        target = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("target"), num_hidden_layers=4)
        draft = {}
        for head, make in HEADS.items():
            folder = tmp_path_factory.mktemp(head)
            draft[head] = make(64, folder)[0]
            prefer_liked_tokens(folder)
        return Target(str(target), draft)

    return lambda drafter: get("random" if drafter in HEADS else "frame-tiny")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "mtp", "mtp trees", "draft_model", *HEADS, "oracle", "adversary"])
def test_grid(drafter: str, engine: str, get_target: Callable[[str], Target]) -> None:
    torch.set_num_threads(1)
    pytest.importorskip("llguidance")
    target, settings = get_target(drafter), dict(ENGINES[engine])
    is_scripted = drafter in {"oracle", "adversary"}
    if not is_scripted:
        algorithm = drafter.removesuffix(" trees")
        settings["speculative"] = {"algorithm": algorithm, "adaptive": engine == "adaptive"}
        if algorithm != drafter:
            settings["plugins"] = {"options": {f"drafter/{algorithm}": {"eagle_topk": 3}}}
        if drafter == "draft_model" or drafter in HEADS:
            settings["speculative"]["draft_model_path"] = target.draft.get(drafter, FOLDER)

    def act(loop: LocalLoop) -> tuple[list[ReplyText], dict[str, Any]]:
        if is_scripted:
            drafts = ScriptedDrafter(target.make_script(is_right=drafter == "oracle"))
            loop.scheduler.speculation.enable(drafts, STEPS, is_adaptive=engine == "adaptive")
        replies, load = target.reply(loop, target.requests), loop.scheduler.get_load()
        loop.scheduler.check_integrity()
        loop.scheduler.flush_cache()
        return replies, load | {"leaked": loop.scheduler.get_load()["used_pages"], "cached": loop.stats["cached"]}

    if engine == "two ranks":
        replies, load = on_two_ranks(Case(target.folder, [], None), act, **settings)
    else:
        replies, load = act(make_loop(target.folder, **settings))
    shown = ("num_drafts", "drafted_tokens", "accepted_tokens", "preempted", "cached", "leaked")
    print(f"{drafter}, {engine}:", *(f"{name} {load[name]}" for name in shown))
    wrong = [number for number, (found, wanted) in enumerate(zip(replies, target.expected, strict=True)) if not found.is_close(wanted)]
    assert not wrong, [(number, target.requests[number], replies[number], target.expected[number]) for number in wrong[:3]]
    assert load["leaked"] == 0 and load["cached"] > 0 and load["drafted_tokens"] > 0
    assert (load["accepted_tokens"] > 0) == (drafter != "adversary")
    assert (load["preempted"] > 0) == (settings["tokens"] < 1024)
    if (drafter, engine) == ("oracle", "roomy"):
        for request, found in zip(target.requests, replies, strict=True):
            maximum = request.params.num_speculative_tokens
            length = 1 + (STEPS if maximum is None else min(maximum, STEPS))
            assert request.grammar or found.steps == 1 + math.ceil((len(found.tokens) - 1) / length)  # the first token is the prompt's
