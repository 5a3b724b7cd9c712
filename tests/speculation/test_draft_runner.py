"""Drafts of frame-tiny's prediction layer equal those of a plain PyTorch loop over the training
model, and draws of drafts use the keys of their positions."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.core.interfaces.batch import DraftOrder, ScheduledBatch, SlotSetup
from frame.core.interfaces.device_drafter import DeviceDrafter
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.sampling.batch_layout import compute_layout
from frame.core.sampling.sampling_metadata import SamplingTable, draw_keys
from frame.core.sampling.step_plan import DraftingArrays, DraftingPlan, plan_drafting
from frame.speculation.draft_runner import DraftRunner
from scripts.train_frame_tiny.export import load_model
from scripts.train_frame_tiny.model import FrameTiny, rope_tables
from tests.core.test_speculative_equality import make_loop, make_requests

STEPS = 3


def reference_draft(model: FrameTiny, tokens: list[int], num_steps: int) -> list[int]:
    """The draft after these tokens, by whole sequences without a cache."""
    with torch.no_grad():
        ids = torch.tensor([tokens])
        states, embedded = model.hidden(ids[:, :-1])[0], model.embed_tokens(ids[:, 1:])
        draft: list[int] = []
        for _ in range(num_steps):
            found, _ = model.prediction(states, embedded, rope_tables(model.shape, states.shape[1], states.device))
            draft.append(int(model.lm_head(found[:, -1]).argmax()))
            states = torch.cat((states, found[:, -1:]), 1)
            embedded = torch.cat((embedded, model.embed_tokens(torch.tensor([draft[-1:]]))), 1)
        return draft


def record_drafts(loop: Any) -> list[tuple[list[int], list[int]]]:
    """(tokens, draft) of each draft that the device makes from now on."""
    drafter, tokens, found = loop.scheduler.speculation._drafter, {}, []
    assert isinstance(drafter, DeviceDrafter)
    add_slot, observe, store = drafter.add_slot, drafter.observe_tokens, drafter.store_drafts

    def add(setup: SlotSetup) -> None:
        tokens[setup.slot] = setup.token_ids.tolist()
        add_slot(setup)

    def observed(slots: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> None:
        for slot, row, count in zip(slots.tolist(), ids.tolist(), counts.tolist(), strict=True):
            tokens[slot] += row[:count]
        observe(slots, ids, counts)

    def stored(slots: np.ndarray, drafts: np.ndarray) -> None:
        found.extend((list(tokens[slot]), draft) for slot, draft in zip(slots.tolist(), drafts.tolist(), strict=True))
        store(slots, drafts)

    drafter.add_slot, drafter.observe_tokens, drafter.store_drafts = add, observed, stored
    return found


@pytest.mark.parametrize("settings", [{"chunk": 16}, {"page_size": 1}], ids=["chunks", "prefix hits"])
def test_drafts_are_those_of_the_reference(settings: dict[str, Any]) -> None:
    """In a large pool, so that each row has the pages that its draft needs. Prompts with a common
    prefix would share the entry of its last token, which depends on the token after it."""
    model = load_model(find_model(EMBEDDED)).eval()
    prompts = [prompt for number, prompt in enumerate(make_requests(7, seed=3)[0]) if number % 3]
    loop = make_loop(algorithm="mtp", **settings)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    if "page_size" in settings:
        loop.generate(prompts, params)
    found = record_drafts(loop)
    loop.generate(prompts, params)
    assert len(found) > 25 and (loop.stats["cached"] > 0) == ("page_size" in settings)
    for tokens, draft in found:
        left = 12 + next(len(prompt) for prompt in prompts if tokens[: len(prompt)] == prompt) - len(tokens)
        assert draft[:left] == reference_draft(model, tokens, min(STEPS, left))  # there are no pages for what cannot be output


def test_model_at_fault_is_not_used_any_more(caplog: pytest.LogCaptureFixture) -> None:
    prompts, params = make_requests(3)
    loop = make_loop(algorithm="mtp")

    def fail(states: torch.Tensor, place: int) -> torch.Tensor:
        raise ValueError("out of order")

    loop.runner.drafts.model.compute_logits = fail  # type: ignore[attr-defined]
    with caplog.at_level(logging.ERROR):
        assert loop.generate(prompts, params) == make_loop().generate(prompts, params)
    assert caplog.text.count("is not used any more: ValueError: out of order") == 1
    assert loop.scheduler.get_load()["drafted_tokens"] == 0


def test_keys_of_a_draft_are_those_of_its_positions() -> None:
    """Two rows with drafts of 2 and 0 tokens, and a chunk of a prompt that samples nothing."""
    table = SamplingTable(8)
    setups = [SlotSetup(slot, SamplingParams(temperature=0.5 * slot), 40 + slot, 3, np.zeros(3, np.int32)) for slot in (0, 1, 2)]
    table.update(setups, [])
    batch = ScheduledBatch(
        step=0, num_decodes=1, slots=np.array([1, 0, 2], np.int32), num_computed=np.array([9, 20, 0], np.int32),
        num_scheduled=np.array([1, 3, 4], np.int32), token_ids=np.array([5, 6, 7, 11, 12, 13, 14], np.int32),
        samples=np.array([True, True, False]), new_pages=np.empty((0, 3), np.int32), num_drafts=np.array([0, 2, 0], np.int32),
    )  # fmt: skip
    order = DraftOrder(2, np.array([16, 32, 48], np.int32), np.array([0, 0, 15], np.int32))
    plan = plan_drafting(batch, order, compute_layout(batch), table)
    assert (plan.num_tokens, plan.num_drawn, plan.width) == (2, 1, 3)
    arrays = plan.arrays
    assert arrays.next_ids[4:].tolist() == [12, 13, 14, 15]  # the others are drawn in the step
    assert arrays.samples.tolist() == [0, 1, 2, 3] and arrays.first.tolist() == [0, 1]
    assert arrays.positions.tolist() == [10, 21] and arrays.limits.tolist() == [16, 32]
    keys = [draw_keys(np.full(4, seed), first + np.arange(4)) for seed, first in ((41, 11), (40, 22))]
    assert (arrays.key == np.array(keys)).all()


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_error_of_the_model_beside_other_ranks_is_raised(is_alone: bool) -> None:
    """They wait for this rank's tokens."""
    runner: Any = make_loop(algorithm="mtp").runner
    drafts = DraftRunner(runner.drafts._passes, STEPS, is_alone=is_alone)
    slot = torch.zeros(1, dtype=torch.int64)
    arguments = (slot, None, DraftingPlan(1, 0, 1, DraftingArrays(*[slot.numpy()] * 6)), DraftingArrays(*[slot] * 6))
    if is_alone:
        assert drafts.draft(*arguments) is None
    else:
        with pytest.raises(RuntimeError, match="its forward pass is not known"):
            drafts.draft(*arguments)
