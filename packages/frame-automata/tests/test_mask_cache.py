"""The cache returns what was put in, in sparse or dense form, within its limit."""

from __future__ import annotations

import numpy as np
import pytest

from frame_automata.mask_cache import Costs, LruCache, Mask
from frame_automata.vocabulary_tree import NOT_AT_ALL


def test_the_latest_are_kept() -> None:
    kept: LruCache[int, Mask] = LruCache(100 * (40 + 256))
    for i in range(300):
        assert kept.get(i) is None
        kept.put(i, Mask(np.full(10, i, np.int32), None))
        assert kept.get(0) is not None  # used again and again
    kept.put(299, Mask(np.zeros(10, np.int32), None))
    again = kept.get(299)
    assert len(kept) == 100 and kept.get(150) is None and again is not None and again.words[0] == 299
    small: LruCache[int, Mask] = LruCache(0)
    for i in range(30):
        small.put(i, Mask(np.zeros(10, np.int32), None))
    assert len(small) == 16


@pytest.mark.parametrize("count", [0, 3, 100])
def test_masks_are_written_as_they_were(count: int) -> None:
    mask = np.zeros(100, np.int32)
    mask[np.random.default_rng(0).permutation(100)[:count]] = -7
    kept, out = Mask.of(mask), np.full(100, -1, np.int32)
    kept.write(out)
    assert (out == mask).all() and kept.num_bytes <= mask.nbytes and (kept.places is None) == (count == 100)


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_masks_by_costs(share: float) -> None:
    rng = np.random.default_rng(0)
    costs = np.where(rng.random(640) < share, rng.integers(0, 251, 640), NOT_AT_ALL).astype(np.uint8)
    kept = Costs.of(costs)
    assert (kept.tokens is None) == (share > 0.5) and kept.num_bytes <= 640
    for maximum in (0, 1, 100, 250, 5000):
        mask = np.full(20, -1, np.int32)
        kept.mask(maximum).write(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert (bits == ((costs <= maximum) & (costs != NOT_AT_ALL))).all()
