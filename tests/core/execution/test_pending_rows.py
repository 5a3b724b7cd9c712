"""A step that is planned before its lengths are known has the inputs of one that is planned
after."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from frame.core.interfaces.batch import DraftOrder, ScheduledBatch, SlotSetup
from frame.core.interfaces.sampling_params import SamplingParams
from tests.core.test_speculative_equality import make_loop

LENGTH, DRAFT, REJECTED = 5, [41, 42, 43], 1  # of slot 0, whose step in flight has as many drafted tokens


def list_tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor) or tree is None:
        return [] if tree is None else [tree]
    values = tree if isinstance(tree, tuple) else [getattr(tree, each.name) for each in fields(tree)]
    return [tensor for value in values for tensor in list_tensors(value)]


def make_batch(setups: list[SlotSetup], parents: np.ndarray | None = None) -> ScheduledBatch:
    """Rows without a draft and with two drafted tokens."""
    pages = [(slot, place, 1 + 3 * slot + place) for slot in range(2) for place in range(3)]
    return ScheduledBatch(
        step=0,
        num_decodes=1,
        slots=np.array([1, 0], np.int32),
        num_computed=np.array([5, LENGTH], np.int32),
        num_scheduled=np.array([1, 3], np.int32),
        token_ids=np.array([40, *DRAFT[:2]], np.int32),
        samples=np.array([True, True]),
        new_pages=np.array(pages, np.int32),
        num_drafts=np.array([0, 2], np.int32),
        draft_parents=parents,
        draft_order=DraftOrder(2, np.full(2, 12, np.int32), np.zeros(2, np.int32)),
        setups=setups,
    )


@pytest.mark.parametrize("parents", [None, np.array([0, 0], np.int32), np.array([0, 1], np.int32)])
def test_inputs_are_those_of_known_lengths(parents: np.ndarray | None) -> None:
    topk = 1 if parents is None else 2
    inputs: Any = make_loop(algorithm="mtp", page_size=4, topk=topk).runner.inputs  # type: ignore[attr-defined]
    params = SamplingParams(temperature=1.0, frequency_penalty=0.5)
    setups = [SlotSetup(slot, params, 5 + slot, 2, np.array([3, 4], np.int32)) for slot in range(2)]
    expected = inputs.prepare(make_batch(setups, parents))
    inputs.table.last_token[:2] = torch.tensor([40, 7])
    inputs.table.drafts[0, : len(DRAFT)] = torch.tensor(DRAFT)
    if parents is not None:
        inputs.table.parents[0, :2] = torch.from_numpy(parents)
    inputs.pending.store_counts(torch.tensor([1, 0]), torch.tensor([1, 1 + len(DRAFT) - REJECTED]))
    batch = msgspec.structs.replace(make_batch([]), token_ids=np.zeros(3, np.int32))
    for pending, more in ((len(DRAFT), REJECTED), (0, 0)):  # then nothing is in flight, and no count of before is added
        late = np.array([0, pending], np.int32)
        found = inputs.prepare(msgspec.structs.replace(batch, num_computed=batch.num_computed + np.array([0, more]), num_pending=late))
        assert found.batch.token_ids.tolist() == [7, 40, *DRAFT[:2]]
        for name in ("positions", "kv_slots", "seq_lens", "request_slots", "logits_indices"):
            assert torch.equal(getattr(found.batch, name), getattr(expected.batch, name)), name
        (verified, drafting), (one, other) = ((each.tensors.verification, each.tensors.drafting) for each in (found, expected))
        if parents is not None:  # of the paths, those of the rows' own nodes are read
            nodes = found.tensors.pending.nodes
            trees = [replace(each.trees, paths=each.trees.paths[nodes].int()) for each in (verified, one)]
            verified, one = (replace(each, trees=read) for each, read in zip((verified, one), trees, strict=True))
        rounds = found.tensors.rounds[: len(expected.tensors.rounds)]  # more, where the host does not have the depths
        tensors = [list_tensors(each) for each in ((verified, rounds), (one, expected.tensors.rounds))]
        assert found.tensors.rounds[1].sampling.draw is not None and found.tensors.rounds[1].sampling.processing is not None
        assert all(map(torch.equal, *tensors)) and len(tensors[0]) == len(tensors[1])
        assert torch.equal(drafting.positions, other.positions)
        assert (drafting.places is None) == (other.places is None) == (parents is None)
        assert drafting.places is None or torch.equal(drafting.places, other.places)
        columns = drafting.columns if pending else torch.zeros(2, dtype=torch.int64)
        for row, column in enumerate(columns.tolist()):  # from here on the keys of a row are those of its positions
            assert torch.equal(drafting.key[row, column : column + 3], other.key[row, :3])
        assert found.batch.host.seq_lens.tolist() == expected.batch.host.seq_lens.tolist()
