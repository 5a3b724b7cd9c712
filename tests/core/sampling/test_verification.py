"""Drafts change the number of steps and no token: the runner with the fake model, with and without
decode graphs, for every sampling parameter, and right, wrong and half-right drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from frame.core.execution.staging import SharedMemory
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.sampling.batch_layout import DraftLayout
from frame.core.sampling.step_plan import plan_verification
from frame.core.sampling.verification import verify_drafts
from frame.testing.drafters import ScriptedDrafter
from tests.core.execution.test_decode_graphs import PROMPTS, VOCAB, make_loop


def test_counts_and_last_tokens() -> None:
    num_samples = np.array([1, 4, 3, 4, 2])
    first = np.cumsum(num_samples) - num_samples
    offsets = np.arange(14) - np.repeat(first, num_samples)
    targets = np.array([-1, 5, 6, 7, -1, 5, 6, -1, 1, 2, 3, -1, 9, -1])
    drawn = torch.tensor([8, 5, 6, 7, 8, 4, 6, 8, 1, 0, 3, 8, 9, 7])
    rows = np.array([0, 2, 3, 4, 6])
    layout: Any = SimpleNamespace(sample_slots=10 + np.repeat(rows, num_samples))
    plan = plan_verification(layout, DraftLayout(rows, num_samples, first, offsets, targets, np.repeat(np.arange(5), num_samples), 4))
    found = verify_drafts(drawn, plan, SharedMemory().move(plan.arrays))
    assert found.counts.tolist() == [1, 4, 1, 2, 2]
    assert found.last.tolist() == [8, 8, 4, 0, 7]
    assert plan.arrays.slots.tolist() == [10, 12, 13, 14, 16]


def make_params(row: int, *, wants_more: bool) -> SamplingParams:
    more = {"temperature": (0.0, 0.7, 1.5)[row % 3], "seed": row, "max_tokens": 5 + 2 * row, "ignore_eos": True}
    if wants_more:
        more |= {"top_k": (-1, 5)[row % 2], "top_p": (1.0, 0.8)[row // 2 % 2], "min_p": (0.0, 0.05)[row // 4 % 2]}
        more |= {"frequency_penalty": 0.9 * (row % 2), "repetition_penalty": (1.0, 1.3)[row // 3 % 2], "min_tokens": row % 3}
        more |= {"logprobs": (None, 2)[row % 2], "logit_bias": {3: 4.0} if row % 4 == 0 else {}}
    return SamplingParams(**more)


def run(captured: int, params: list[SamplingParams], drafter: ScriptedDrafter | None = None, *, overlap: bool = False):
    """The tokens of each prompt, the log-probabilities in order, and the number of steps."""
    loop, logprobs = make_loop(captured, overlap=overlap), {}
    if drafter is not None:
        loop.scheduler.speculation.enable(drafter, 4)
    commit = loop.scheduler.commit

    def watched(batch, result):
        tokens = commit(batch, result)
        for i, found in tokens.logprobs.items():
            logprobs.setdefault(tokens.rids[i], []).extend(zip(found.token_ids, found.logprobs, found.top, strict=True))
        return tokens

    loop.scheduler.commit = watched
    tokens = loop.generate(PROMPTS, params)
    loop.scheduler.check_integrity()
    return tokens, logprobs, loop.stats["steps"]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "everything"])
def expected(request):
    params = [make_params(row, wants_more=request.param) for row in range(len(PROMPTS))]
    return params, run(0, params)


@pytest.mark.pairwise
@pytest.mark.parametrize("captured", [0, 128])
@pytest.mark.parametrize("quality", ["right", "wrong", "mixed"])
def test_output_does_not_depend_on_drafts(expected, captured, quality):
    params, (tokens, logprobs, steps) = expected
    whole = {tuple(prompt): prompt + output for prompt, output in zip(PROMPTS, tokens, strict=True)}

    def script(setup, given, maximum):
        draft = whole[tuple(setup.token_ids[: setup.prompt_len].tolist())][len(given) : len(given) + maximum]
        right = {"right": maximum, "wrong": 0, "mixed": len(given) % 3}[quality]
        return [token if i < right else (token + 1 + i) % VOCAB for i, token in enumerate(draft)]

    drafted = run(captured, params, ScriptedDrafter(script), overlap=quality == "mixed")
    assert drafted[0] == tokens
    assert drafted[1].keys() == logprobs.keys()
    for rid, values in logprobs.items():
        assert [(token, [i for i, _ in top]) for token, _, top in drafted[1][rid]] == [(t, [i for i, _ in top]) for t, _, top in values]
        np.testing.assert_allclose([value for _, value, _ in drafted[1][rid]], [value for _, value, _ in values], rtol=1e-5)
    if quality == "right":
        assert drafted[2] < steps / 2
