"""Recurrent layers equal their definition token by token, for any rows and any split of a row.

Collected by the tests of the PyTorch form, and by those of the kernels under Triton's interpreter
and on a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from frame.core.interfaces.batch import DraftedStates, SequenceStates
from tests.models.layers.recurrences import CASES, Drawn, compute_by_definition, draw

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"


def check(drawn: Drawn, got: torch.Tensor, want: tuple[torch.Tensor, ...], atol: float = 1e-5, rtol: float = 1e-4) -> None:
    for each, expected in zip((got, *drawn.pool.data[0]), want, strict=True):
        assert torch.isfinite(each).all()
        torch.testing.assert_close(each.double().cpu(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("case", CASES)
def test_ragged_rows(case: str) -> None:
    """Decodes beside prompts that end before, at and after the end of a chunk."""
    drawn = draw(case, [1, 1, 63, 64, 2, 130], device=DEVICE)
    want = compute_by_definition(drawn)
    check(drawn, drawn.mixer.mix(*drawn.inputs, drawn.batch), want)


@pytest.mark.parametrize("case", CASES)
def test_any_split_of_a_row_gives_the_whole(case: str) -> None:
    drawn = draw(case, [90], device=DEVICE)
    want, got, at = compute_by_definition(drawn), [], 0
    for size in (31, 1, 2, 56):
        parts = [part[at : at + size] for part in drawn.inputs]
        got.append(drawn.mixer.mix(*parts, drawn.make_batch([size], int(size == 1))))
        at += size
    check(drawn, torch.cat(got), want)


@pytest.mark.parametrize("case", CASES)
def test_bits_depend_on_no_other_row(case: str) -> None:
    """Of `RankContext.deterministic`: among other rows, alone, and in pieces that begin with a
    decode."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    drawn = draw(case, [1, 1, 67, 5], dtype, DEVICE, deterministic=True)
    before = [stored.clone() for stored in drawn.pool.data[0]]
    want = drawn.mixer.mix(*drawn.inputs, drawn.batch)
    states = [stored.clone() for stored in drawn.pool.data[0]]
    for stored, old in zip(drawn.pool.data[0], before, strict=True):
        stored.copy_(old)
    at, got = 0, []
    for row, pieces in enumerate(([1], [1], [1, 33, 1, 32], [5])):
        for size in pieces:
            parts = [part[at : at + size] for part in drawn.inputs]
            got.append(drawn.mixer.mix(*parts, drawn.make_batch([size], int(size == 1), slice(row, row + 1))))
            at += size
    for each, expected in zip((torch.cat(got), *drawn.pool.data[0]), (want, *states), strict=True):
        assert torch.equal(each, expected)


@pytest.mark.parametrize("case", ["gated delta", "kimi delta"])
def test_strong_decay_and_equal_keys_stay_finite(case: str) -> None:
    """Decays whose sums overflow as factors, and keys that make the triangular system dense."""
    drawn = draw(case, [70], device=DEVICE)
    mixed, decay, beta = drawn.inputs
    decay[:, ::2] *= 60
    mixed[20:50] = mixed[20]
    beta[20:50] = 8.0
    want = compute_by_definition(drawn)
    check(drawn, drawn.mixer.mix(*drawn.inputs, drawn.batch), want)


@pytest.mark.parametrize("case", CASES)
def test_drafts_change_a_state_by_their_accepted_tokens(case: str) -> None:
    """Of rows of 4, 1 and 3 drafted tokens, 1, 2 and 4 of the tokens count; the first row is a
    decode."""
    drawn = draw(case, [1, 5, 2, 4], device=DEVICE)
    want = compute_by_definition(drawn)[0], *compute_by_definition(drawn, [1, 1, 2, 4])[1:]
    batch = drawn.batch
    targets = drawn.pages.clone()
    targets[1:] = next(page for page in range(6) if page not in drawn.pages.tolist())
    spare = int(targets[1])
    drafted = DraftedStates(targets, torch.arange(1, 12, device=DEVICE))
    batch.extensions[SequenceStates] = SequenceStates(drawn.pages, drafted)
    got = drawn.mixer.mix(*drawn.inputs, batch)
    rows = torch.tensor([0, 5, 7, 11], dtype=torch.int32), torch.tensor([1, 2, 4], dtype=torch.int32)
    ((layer, inputs),) = drafted.inputs.values()
    layer.replay(inputs, drawn.pool, drawn.pages[1:], tuple(part.to(DEVICE) for part in rows))
    for stored, expected in zip(drawn.pool.data[0], want[1:], strict=True):
        expected[spare] = stored[spare].double().cpu()
    check(drawn, got, want)
