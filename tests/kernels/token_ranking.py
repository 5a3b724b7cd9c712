"""The likeliest next tokens of branches, found by groups, equal those of PyTorch.

Run by `test_interpreted.py` under TRITON_INTERPRET=1, and by tests/gpu.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from frame.core.sampling.sampling_metadata import draw_keys
from frame.kernels import INTERPRETED
from frame.speculation.token_ranking import rank_tokens, rank_with_torch

DEVICE = "cpu" if INTERPRETED else "cuda"
KEYS = torch.from_numpy(draw_keys(np.arange(2), np.arange(2)))
TEMPERATURE = torch.tensor([0.0, 0.7]) * math.log(2.0)


@pytest.mark.parametrize(("vocab", "spread", "count"), [(100, 1.0, 8), (5003, 3.0, 3), (5003, 0.05, 4)])
def test_branches_get_the_tokens_of_the_plain_version(vocab: int, spread: float, count: int) -> None:
    """Some tokens are excluded, among them whole groups and a whole block."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    logits[0, ::3], logits[1, 2048:4096], logits[2, 40:] = -math.inf, -math.inf, -math.inf
    values, ids = rank_tokens(logits.to(DEVICE), (TEMPERATURE.to(DEVICE), KEYS.to(DEVICE)), 2, count)
    expected = rank_with_torch(logits, (TEMPERATURE, KEYS), 2, count)
    assert ids.tolist() == expected[1].tolist()
    torch.testing.assert_close(values.cpu(), expected[0], atol=1e-5, rtol=1e-5)


def test_greedy_branches_of_rounded_logits() -> None:
    """Of equal logits the least token comes first. A branch with few tokens, and one whose logits
    are not numbers, get tokens of the vocabulary."""
    logits = (torch.randn(4, 100, generator=torch.Generator().manual_seed(0)) * 2).bfloat16()
    logits[2, 1:], logits[3, 5] = -math.inf, math.nan
    values, ids = rank_tokens(logits.to(DEVICE), None, 4, 4)
    order = logits[:2].float().sort(dim=1, descending=True, stable=True).indices[:, :4]
    assert ids[0, :2].tolist() == order.tolist()
    torch.testing.assert_close(values[0, :2].cpu(), logits[:2].float().log_softmax(1).gather(1, order), atol=1e-5, rtol=1e-5)
    assert values[0, 2].tolist() == [0.0] + 3 * [-math.inf] and values[0, 3].tolist() == 4 * [-math.inf]
    assert int(ids.min()) >= 0 and int(ids.max()) < 100
