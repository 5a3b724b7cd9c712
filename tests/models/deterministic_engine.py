"""Engines of the batch-invariant mode: tokens and the bits of their log-probabilities, alone and in
company.

Used by the tests on the CPU and on GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.local_loop import LocalLoop

NUMBERS = random.Random(3)
PROMPT = [NUMBERS.randrange(6, 250) for _ in range(137)]
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=20, ignore_eos=True, logprobs=2)
# few tokens again and again, which the drafter ngram proposes
REPEATED = SamplingParams(temperature=0.7, seed=5, max_tokens=20, ignore_eos=True, logprobs=2, logit_bias={7: 60.0, 8: 59.5})


@dataclass
class Scores:
    """The output tokens of a request, their log-probabilities, and those of its prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    prompt: list[float | None] = field(default_factory=list)


def make_engine(path: Path | str, device: str, dtype: str, **sections: dict[str, Any]) -> LocalLoop:
    config: dict[str, Any] = {
        "model": {"path": str(path), "dtype": dtype, "skip_tokenizer_init": True, "max_context": 512},
        "cache": {"max_total_tokens": 32_768},
        "scheduler": {"max_running_requests": 256, "chunked_prefill_size": 512},
        "execution": {"device": device, "deterministic": True},
    }
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)


def score(
    loop: LocalLoop, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], preempt_every: int | None = None
) -> list[Scores]:
    """Run the requests together. preempt_every: steps after which all are preempted."""
    scores = {loop.add_request(prompt, each): Scores() for prompt, each in zip(prompts, params, strict=True)}
    for number, step in enumerate(loop.run_checked(), 1):
        if preempt_every is not None and number % preempt_every == 0:
            loop.scheduler.preempt_all()  # type: ignore[attr-defined]
        for index, rid in enumerate(step.rids):
            scores[rid].tokens += step.token_ids[index]
            if index in step.logprobs:
                scores[rid].logprobs += step.logprobs[index].logprobs
            if index in step.prompt_logprobs:
                scores[rid].prompt += step.prompt_logprobs[index].logprobs
    return list(scores.values())


def score_one(loop: LocalLoop, params: SamplingParams, others: int = 0, preempt_every: int | None = None) -> Scores:
    """Of `PROMPT`, in a random place among other requests."""
    numbers = random.Random(others)
    prompts = [[numbers.randrange(6, 250) for _ in range(numbers.randrange(2, 60))] for _ in range(others)]
    each = [SamplingParams(temperature=1.0, seed=n, max_tokens=1 + n % 20, ignore_eos=True) for n in range(others)]
    place = numbers.randrange(others + 1)
    prompts.insert(place, PROMPT)
    each.insert(place, params)
    return score(loop, prompts, each, preempt_every)[place]


def score_as_prompt(loop: LocalLoop, tokens: Sequence[int]) -> list[float | None]:
    """The log-probabilities of output tokens as those of a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    (scores,) = score(loop, [[*PROMPT, *tokens]], [params])
    return scores.prompt[len(PROMPT) :]


def check_engine(
    path: Path | str,
    device: str,
    dtype: str,
    others: int = 255,
    ngram: bool = True,
    plain: dict[str, dict[str, Any]] | None = None,
    **sections: dict[str, Any],
) -> Scores:
    """Raises AssertionError if the bits of the request depend on anything. Returns them. plain:
    sections of the engines with other chunks, instead of those in `sections`."""
    loop = make_engine(path, device, dtype, **sections)
    expected, repeated = score_one(loop, DRAWN), score_one(loop, REPEATED)
    assert len(expected.logprobs) == len(expected.tokens) == DRAWN.max_tokens
    assert loop.stats["cached"] >= 96
    assert score_one(loop, DRAWN) == expected, "after a cache hit"
    for params, alone in ((DRAWN, expected), (REPEATED, repeated)):
        assert score_one(loop, params, others) == alone, f"among {others} others"
        assert score_as_prompt(loop, alone.tokens) == alone.logprobs, "as a prompt"
    for chunk in (16, 33, 64, 100):
        chunked = sections | (plain or {}) | {"scheduler": sections.get("scheduler", {}) | {"chunked_prefill_size": chunk}}
        assert score_one(make_engine(path, device, dtype, **chunked), DRAWN) == expected, f"chunks of {chunk}"
    scheduler = sections.get("scheduler", {}) | {"overlap": False}
    waiting = make_engine(path, device, dtype, **sections | {"scheduler": scheduler})
    assert score_one(waiting, DRAWN, 4, preempt_every=7) == expected, "preempted"
    assert waiting.scheduler.get_load()["preempted"] > 0
    if ngram:
        drafting = make_engine(path, device, dtype, **sections | {"speculative": {"algorithm": "ngram", "num_steps": 4, "adaptive": False}})
        assert score_one(drafting, REPEATED, 8) == repeated, "with drafts"
        load = drafting.scheduler.get_load()
        assert 0 < load["accepted_tokens"] < load["drafted_tokens"]
    return expected
