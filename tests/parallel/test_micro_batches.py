"""Micro-batches: each row is in one of them, by its slot, and results are joined in the batch's
order."""

from __future__ import annotations

import msgspec
import numpy as np

from frame.core.interfaces.batch import PromptLogprobs, ScheduledBatch, StepResult
from frame.core.interfaces.media import EncodeOrder, MediaItem
from frame.parallel.micro_batches import count_samples, join_results, split_batch


def make_batch(drafts: bool) -> ScheduledBatch:
    """Two decodes and three extends, of which one does not sample."""
    return ScheduledBatch(
        step=7,
        num_decodes=2,
        slots=np.array([4, 1, 3, 2, 0], np.int32),
        num_computed=np.array([9, 8, 0, 5, 2], np.int32),
        num_scheduled=np.array([1, 1, 3, 2, 3], np.int32),
        token_ids=np.arange(8, dtype=np.int32),
        samples=np.array([True, True, False, True, True]),
        new_pages=np.ones((2, 3), np.int32),
        released=[6],
        num_drafts=np.array([0, 0, 0, 1, 2], np.int32) if drafts else None,
        grammar_mask=np.arange(7 if drafts else 4, dtype=np.int32)[:, None],
    )


def test_rows_are_split_by_slot() -> None:
    even, odd = split_batch(make_batch(drafts=True), 2)
    assert (even.batch.slots.tolist(), odd.batch.slots.tolist()) == ([4, 2, 0], [1, 3])
    assert (even.batch.num_decodes, odd.batch.num_decodes) == (1, 1)
    assert (even.batch.token_ids.tolist(), odd.batch.token_ids.tolist()) == ([3, 4, 5, 6, 7], [0, 1, 2])
    assert (even.samples.tolist(), odd.samples.tolist()) == ([0, 2, 3, 4, 5, 6], [1])
    assert (even.sampling_rows.tolist(), odd.sampling_rows.tolist()) == ([0, 2, 3], [1])
    assert even.batch.grammar_mask is not None and even.batch.grammar_mask[:, 0].tolist() == [0, 2, 3, 4, 5, 6]
    assert (even.batch.released, odd.batch.released, len(odd.batch.new_pages)) == ([6], [], 0)
    assert split_batch(make_batch(drafts=False), 1)[0].rows.tolist() == [0, 1, 2, 3, 4]


def test_media_of_tokens_go_with_their_rows() -> None:
    media = {
        "media_rows": np.arange(10, 18, dtype=np.int32),
        "rotary_positions": np.arange(24, dtype=np.int32).reshape(3, 8),
        "media_spans": np.arange(20, 28, dtype=np.int32),
    }
    item = MediaItem("image", b"", [], 1, "", [])
    batch = msgspec.structs.replace(make_batch(drafts=False), encodes=[EncodeOrder(item, np.zeros(0, np.int32))], **media)
    even, odd = split_batch(batch, 2)
    for part, tokens in ((even, [3, 4, 5, 6, 7]), (odd, [0, 1, 2])):
        for name, whole in media.items():
            assert np.array_equal(getattr(part.batch, name), whole[..., tokens]), name
    assert (len(even.batch.encodes), len(odd.batch.encodes)) == (1, 0)


def test_results_are_joined_in_order() -> None:
    for drafts in (False, True):
        batch = make_batch(drafts)
        parts = split_batch(batch, 2)
        total = int(count_samples(batch).sum())
        prompt = PromptLogprobs(0, np.zeros(1, np.float32), np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32))
        states = np.zeros((3, 2), np.float32)
        results = [
            StepResult(
                step=7,
                token_ids=100 + part.samples.astype(np.int32),
                counts=part.sampling_rows.astype(np.int32) + 1 if drafts else None,
                top_ids=np.repeat(part.samples[:, None], 1 + part.number, axis=1).astype(np.int32),
                invalid=part.samples == 1 if part.number else None,
                prompt_logprobs=[prompt if row == 2 else None for row in part.rows],
                hidden_states=[states if row == 1 else None for row in part.rows],
                faults={0: "fault"} if part.number else None,
            )
            for part in parts
        ]
        joined = join_results(batch, parts, results)
        assert joined.token_ids.tolist() == list(range(100, 100 + total))
        assert (joined.counts is None) if not drafts else (joined.counts is not None and joined.counts.tolist() == [1, 2, 3, 4])
        assert joined.top_ids is not None and joined.top_ids[:, 0].tolist() == list(range(total)) and joined.top_ids[1, 1] == 1
        assert joined.invalid is not None and joined.invalid.tolist() == [index == 1 for index in range(total)]
        assert joined.prompt_logprobs == [None, None, prompt, None, None] and joined.faults == {1: "fault"}
        assert joined.hidden_states == [None, states, None, None, None]


def test_a_batch_without_rows_has_no_micro_batch() -> None:
    empty = np.zeros(0, np.int32)
    batch = ScheduledBatch(
        step=1, num_decodes=0, slots=empty, num_computed=empty, num_scheduled=empty, token_ids=empty,
        samples=np.zeros(0, np.bool_), new_pages=np.zeros((0, 3), np.int32), released=[3],
    )  # fmt: skip
    assert split_batch(batch, 2) == []
