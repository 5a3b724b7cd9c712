"""Where items are in a prompt: rows and keys of tokens, items of a chunk, runs."""

from __future__ import annotations

import numpy as np

from frame.core.interfaces.media import PlaceholderRun
from frame.media.prompt_layout import lay_out_prompt
from tests.media.media_rig import make_item


def test_tokens_have_the_rows_and_keys_of_their_items() -> None:
    items = [make_item("x", PlaceholderRun(1, 2), PlaceholderRun(4, 1)), make_item("y", PlaceholderRun(5, 2))]
    names = [("", "image", item.digest) for item in items]
    layout, keys = lay_out_prompt(np.arange(9, dtype=np.int32), items, names, [-3, -5], has_positions=False, has_spans=True)
    assert layout.rows.tolist() == [-1, 0, 1, -1, 2, 0, 1]
    assert keys.tolist() == [0, -3, -3, 3, -3, -5, -5, 7, 8]
    assert layout.spans is not None
    assert layout.spans.tolist() == [0, 3, 3, 0, 5, 7, 7]
    assert [list(layout.find_items(*chunk)) for chunk in ((0, 1), (2, 4), (3, 6), (5, 9), (7, 9))] == [[], [0], [0, 1], [1], []]
    assert [layout.find_run(token) for token in (0, 2, 3, 4, 6, 8)] == [(0, 0), (1, 3), (3, 3), (4, 5), (5, 7), (8, 8)]
