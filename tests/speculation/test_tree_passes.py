"""Trees of frame-tiny's prediction layer equal those of a plain PyTorch loop over the training
model, and branches are ranked by the draws of their positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.sampling.sampler import draw_plain
from frame.core.sampling.sampling_metadata import draw_keys
from frame.speculation.token_ranking import rank_tokens
from frame.speculation.tree_choice import choose_nodes
from scripts.train_frame_tiny.export import load_model
from scripts.train_frame_tiny.model import FrameTiny, rope_tables
from tests.core.test_speculative_equality import make_loop, make_requests
from tests.speculation.test_draft_runner import record_drafts

Branch = tuple[int, ...]  # the drafted tokens up to a node


def reference_tree(model: FrameTiny, tokens: list[int], width: int, depth: int) -> dict[Branch, float]:
    """The branches that are found after these tokens, and their log-probabilities, by whole
    sequences without a cache."""
    with torch.no_grad():
        ids = torch.tensor([tokens])
        beams: dict[Branch, Any] = {(): (0.0, model.hidden(ids[:, :-1])[0], model.embed_tokens(ids[:, 1:]))}
        found: dict[Branch, float] = {}
        for _ in range(depth):
            reached: dict[Branch, Any] = {}
            for branch, (value, states, embedded) in beams.items():
                after, _ = model.prediction(states, embedded, rope_tables(model.shape, states.shape[1], states.device))
                best = model.lm_head(after[0, -1]).log_softmax(-1).topk(width)
                for more, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    drafted = torch.cat((embedded, model.embed_tokens(torch.tensor([[token]]))), 1)
                    reached[(*branch, token)] = value + more, torch.cat((states, after[:, -1:]), 1), drafted
            found |= {branch: value for branch, (value, _, _) in reached.items()}
            beams = dict(sorted(reached.items(), key=lambda each: -each[1][0])[:width])
    return found


def list_branches(tree: list[list[int]]) -> list[Branch]:
    branches: list[Branch] = [()]
    for token, parent in zip(*tree, strict=True):
        branches.append((*branches[parent], token))
    return branches[1:]


@pytest.mark.slow
def test_trees_are_those_of_the_reference() -> None:
    model = load_model(find_model(EMBEDDED)).eval()
    prompts = [prompt for number, prompt in enumerate(make_requests(5, seed=3)[0]) if number % 3]
    loop = make_loop(algorithm="mtp", chunk=16, topk=3, nodes=8)
    found = record_drafts(loop)
    loop.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert len(found) > 15
    for tokens, tree in found:
        expected = reference_tree(model, tokens, 3, 3)
        values = [expected[branch] for branch in list_branches(tree)]  # type: ignore[arg-type]
        assert len(set(list_branches(tree))) == 7  # type: ignore[arg-type]
        np.testing.assert_allclose(values, sorted(expected.values(), reverse=True)[:7], atol=1e-4)


def test_a_pass_has_no_more_decodes_than_backends_have_room_for() -> None:
    """More branches than there are slots, in rows that draft one after the other."""
    loop: Any = make_loop(algorithm="mtp", running=2, topk=3)
    passes, decodes = loop.runner.drafts._passes, []
    plan = passes.backend.plan

    def note(batch: Any) -> Any:
        decodes.append(batch.num_decodes)
        return plan(batch)

    passes.backend.plan = note
    loop.generate([[9, 8], [7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert max(decodes) == 3 == loop.runner.context.limits.max_decodes


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_likeliest_token_is_the_one_that_is_drawn(temperature: float) -> None:
    numbers = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, 5000, generator=numbers)
    keys = torch.from_numpy(draw_keys(np.array([7, 9]), np.array([3, 4])))
    values, ids = rank_tokens(logits.flatten(0, 1), (torch.tensor([temperature, 0.0]), keys), 3, 4)
    assert values.shape == (2, 3, 4) and bool((values.diff() <= 0).all()) and bool((values <= 0).all())
    for branch in range(3):
        drawn, _ = draw_plain(logits[:, branch], torch.tensor([temperature, 0.0]), keys)
        assert ids[:, branch, 0].tolist() == drawn.tolist()


def test_logits_that_are_not_numbers_rank_tokens_of_the_vocabulary() -> None:
    keys = torch.zeros(2, dtype=torch.int64)
    values, ids = rank_tokens(torch.full((2, 70), torch.nan), (torch.tensor([0.0, 0.7]), keys), 1, 8)
    assert bool((values == -torch.inf).all()) and int(ids.max()) < 70


def test_a_token_comes_after_its_parent_where_both_are_certain() -> None:
    values, ids = torch.tensor([[-2.0, 0.0, 0.0, -1.0, -3.0, -2.5]]), torch.arange(6).unsqueeze(0)
    found = choose_nodes(values, ids, torch.tensor([[1, 0]]), 2, 5)
    assert found[0].tolist() == [[1, 2, 3, 0, 5], [0, 1, 1, 0, 4]]
