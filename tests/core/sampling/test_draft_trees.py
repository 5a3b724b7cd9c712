"""Trees of drafted tokens: layout of a step, verification, and what cannot verify them."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frame.attention_backends import FLEX_ATTENTION, TORCH_NATIVE
from frame.core.execution.input_batch import make_tree_mask
from frame.core.execution.pending_rows import trace_trees
from frame.core.execution.staging import SharedMemory
from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.drafter import Drafts
from frame.core.sampling.batch_layout import BatchLayout, compute_layout
from frame.core.sampling.step_plan import plan_verification
from frame.core.sampling.verification import verify_drafts

Tree = list[tuple[int, int]]  # (parent, token) of each node from 1 on


def lay_out(trees: list[Tree]) -> BatchLayout:
    """A decode, rows with these trees, and a prompt's chunk that does not sample. Row r with a tree
    has 10 * r + 10 tokens in the cache."""
    counts = np.array([len(tree) for tree in trees], np.int32)
    pairs = [pair for tree in trees for pair in tree]
    token_ids = [token for tree in trees for token in (900, *(token for _, token in tree))] + [901, 902]
    batch = ScheduledBatch(
        step=0,
        num_decodes=1,
        slots=np.arange(len(trees) + 2, dtype=np.int32),
        num_computed=np.array([3, *(10 * row + 10 for row in range(len(trees))), 4], np.int32),
        num_scheduled=np.array([1, *(counts + 1), 2], np.int32),
        token_ids=np.array(token_ids, np.int32),
        samples=np.array([True] * (len(trees) + 1) + [False]),
        new_pages=np.zeros((0, 3), np.int32),
        num_drafts=np.array([0, *counts, 0], np.int32),
        draft_parents=np.array([parent for parent, _ in pairs], np.int32),
    )
    return compute_layout(batch)


def path_of(tree: Tree, node: int) -> list[int]:
    return [*path_of(tree, tree[node - 1][0]), node] if node else [0]


@st.composite
def some_trees(draw: Any) -> list[Tree]:
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return [[(draw(st.integers(0, node)), draw(st.integers(0, 2))) for node in range(size)] for size in sizes]


@settings(max_examples=50, deadline=None)
@given(some_trees())
def test_the_device_finds_the_form_of_trees(trees: list[Tree]) -> None:
    drafts = lay_out(trees).drafts
    assert drafts is not None and drafts.trees is not None
    nodes, depth = torch.from_numpy(drafts.trees.parents), int(drafts.trees.depths.max())
    exists = torch.from_numpy(drafts.num_samples).unsqueeze(1) > torch.arange(nodes.shape[1])
    unknown = ~exists[:, 1:] * 5  # what the table has beyond the drafted tokens
    tokens = torch.from_numpy(drafts.trees.tokens)[:, 1:] + unknown
    found, bits = trace_trees(nodes[:, 1:], tokens, exists, depth)
    for name in ("parents", "depths", "tokens", "branches", "paths"):
        tensor, expected = getattr(found, name), torch.from_numpy(getattr(drafts.trees, name))
        is_read = exists if name == "paths" else torch.ones_like(exists)
        assert torch.equal(tensor[is_read].long(), expected[is_read].long()), name
    assert drafts.bits is not None and bits[exists].tolist() == drafts.bits.tolist()


@settings(max_examples=100, deadline=None)
@given(some_trees(), st.data())
def test_the_longest_path_of_drawn_tokens_is_output(trees: list[Tree], data: st.DataObject) -> None:
    layout = lay_out(trees)
    assert layout.drafts is not None
    drawn = [7, *(data.draw(st.integers(0, 2)) for tree in trees for _ in range(len(tree) + 1))]
    plan = plan_verification(layout, layout.drafts)
    found = verify_drafts(torch.tensor(drawn), plan, SharedMemory().move(plan.arrays))
    assert found.order is not None and found.counts[0] == 1 and found.last[0] == 7 and found.order[0] == 0
    first = 1
    for row, tree in enumerate(trees, 1):
        max_length = 0
        for node in range(len(tree) + 1):
            path = path_of(tree, node)
            if all(drawn[first + one] == tree[other - 1][1] for one, other in pairwise(path)):
                max_length = max(max_length, len(path))
        count = int(found.counts[row])
        assert count == max_length
        order = [int(sample) - first for sample in found.order[first : first + len(tree) + 1]]
        assert order[:count] == path_of(tree, order[count - 1])
        assert order[count:] == list(range(count, len(tree) + 1))
        assert all(drawn[first + one] == tree[other - 1][1] for one, other in pairwise(order[:count]))
        assert found.last[row] == drawn[first + order[count - 1]]
        first += len(tree) + 1


@settings(max_examples=30, deadline=None)
@given(some_trees())
def test_tokens_of_a_depth_share_a_position_and_see_their_branch(trees: list[Tree]) -> None:
    layout = lay_out(trees)
    backend: Any = SimpleNamespace(capabilities=TORCH_NATIVE)
    assert layout.drafts is not None
    plan = plan_verification(layout, layout.drafts)
    mask = make_tree_mask(layout, backend, SharedMemory().move(plan.arrays).bits, is_plain=True)
    assert mask.rows.tolist() == list(range(1, len(trees) + 1))
    places = np.concatenate(([3], *(10 * row + 10 + np.arange(len(tree) + 1) for row, tree in enumerate(trees)), [4, 5]))
    assert layout.places.tolist() == places.tolist()
    positions, sample, token = layout.positions, 1, 1
    assert positions[0] == 3 and positions[-2:].tolist() == [4, 5]
    words = mask.bits.tolist()
    assert words[0] == words[-1] == words[-2] == -1
    for row, tree in enumerate(trees):
        for node in range(len(tree) + 1):
            path = path_of(tree, node)
            assert positions[token] == 10 * row + 10 + len(path) - 1 == layout.sample_positions[sample] - 1
            assert [other for other in range(node + 1) if words[token] >> (node - other) & 1] == path
            assert words[token] >> (node + 1) == -1
            token, sample = token + 1, sample + 1


def test_refusals() -> None:
    layout, backend = lay_out([[(0, 1)]]), SimpleNamespace(capabilities=FLEX_ATTENTION)
    bits = torch.zeros(4)
    with pytest.raises(ValueError, match="cannot verify trees of drafted tokens; use a drafter of chains"):
        make_tree_mask(layout, backend, bits, is_plain=True)  # type: ignore[arg-type]
    backend.capabilities = TORCH_NATIVE
    with pytest.raises(ValueError, match="several cache groups, and synthetic acceptance"):
        make_tree_mask(layout, backend, bits, is_plain=False)  # type: ignore[arg-type]


def test_a_shorter_tree_is_its_first_nodes() -> None:
    drafts = Drafts(np.arange(6), np.array([4, 0, 2], np.int32), np.array([0, 0, 2, 3, 0, 0]))
    found = drafts.shorten(np.array([3, 0, 1], np.int32))
    assert found.parents is not None
    assert (found.token_ids.tolist(), found.counts.tolist(), found.parents.tolist()) == ([0, 1, 2, 4], [3, 0, 1], [0, 0, 2, 0])
    assert drafts.shorten(drafts.counts) is drafts
