"""`InputBatch` against a naive loop over rows, for random batches; and its cost."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frame.core.execution.input_batch import ForwardInputs, InputBatch, ReplayInputs
from frame.core.interfaces.batch import ScheduledBatch, SelectedTokens, SlotSetup
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.core.sampling.batch_layout import compute_layout
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampler
from frame.core.sampling.step_plan import StepArrays
from tests.core.fake_model import FakeAttention, fake_model_config

CPU = torch.device("cpu")
CONTEXT, SLOTS = 64, 80


def make(page_size, **more):
    limits = Limits(SLOTS, 4096, CONTEXT, page_size)
    context = BuildContext(device=CPU, dtype=torch.float32, tp=LocalGroup(), limits=limits)
    pool = KVPool(kv_geometry(fake_model_config(), 1, page_size, "float32"), 4, CPU)
    return InputBatch(replace(context, attention=FakeAttention(context)), pool, Sampler(Processors((), SLOTS), TORCH), **more)


def scheduled(rows, num_decodes, new_pages, token_ids, prompt_logprobs=None):
    """rows: (slot, computed, length, samples)."""
    columns = list(zip(*rows, strict=True))
    return ScheduledBatch(
        step=1,
        num_decodes=num_decodes,
        slots=np.array(columns[0], np.int32),
        num_computed=np.array(columns[1], np.int32),
        num_scheduled=np.array(columns[2], np.int32),
        token_ids=np.array(token_ids, np.int32),
        samples=np.array(columns[3], np.bool_),
        new_pages=np.array(new_pages, np.int32).reshape(-1, 3),
        prompt_logprobs=prompt_logprobs,
    )


@st.composite
def batches(draw):
    slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=12, unique=True))
    decodes = draw(st.integers(0, len(slots)))
    rows = []
    for index, slot in enumerate(slots):
        computed = draw(st.integers(0, CONTEXT - 20))
        rows.append((slot, computed, 1 if index < decodes else draw(st.integers(1, 20)), index < decodes or draw(st.booleans())))
    scores = draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    return rows, decodes, scores


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from([1, 4, 16]), st.randoms(use_true_random=False))
def test_every_array_equals_the_naive_one(drawn, page_size, random):
    rows, decodes, scores = drawn
    inputs = make(page_size)
    table = inputs.table
    writes, pages = [], {}
    for slot, computed, length, _ in rows:
        for column in range(-(-(computed + length) // page_size)):
            pages[slot, column] = random.randrange(1, 10_000)
            writes.append((slot, column, pages[slot, column]))
    random.shuffle(writes)
    table.last_token[: table.first_host_token] = torch.arange(SLOTS + 1) + 1000
    extend_ids = [random.randrange(100) for _ in range(sum(row[2] for row in rows[decodes:]))]
    batch = scheduled(rows, decodes, writes, extend_ids, np.array(scores))
    forward, extra = inputs.build_forward_batch(batch, compute_layout(batch), StepArrays(prompt_targets=np.arange(3)))

    ids, positions, places, ends, wanted = [], [], [], [], []
    given_ids = iter(extend_ids)
    for index, (slot, computed, length, _) in enumerate(rows):
        for position in range(computed, computed + length):
            ids.append(1000 + slot if index < decodes else next(given_ids))
            positions.append(position)
            places.append(pages[slot, position // page_size] * page_size + position % page_size)
        ends.append(len(ids))
    wanted = [end - 1 for end, row in zip(ends, rows, strict=True) if row[3]]
    for end, row, score in zip(ends, rows, scores, strict=True):
        wanted += range(end - row[2], end) if score else []
    assert forward.token_ids.tolist() == ids
    assert forward.positions.tolist() == positions
    assert forward.kv_slots.tolist() == places
    assert forward.query_starts.tolist() == [0, *ends]
    assert forward.seq_lens.tolist() == forward.host.seq_lens.tolist() == [row[1] + row[2] for row in rows]
    assert forward.query_lens.tolist() == [row[2] for row in rows]
    assert forward.request_slots.tolist() == [row[0] for row in rows]
    assert forward.logits_indices.tolist() == wanted
    assert (forward.num_rows, forward.num_tokens, forward.num_decodes) == (len(rows), len(ids), decodes)
    assert forward.plan == len(rows)
    assert extra.prompt_targets.tolist() == [0, 1, 2]
    dtypes = {"token_ids": torch.int64, "positions": torch.int64, "kv_slots": torch.int64, "request_slots": torch.int64}
    dtypes |= {"seq_lens": torch.int32, "query_lens": torch.int32, "query_starts": torch.int32, "page_table": torch.int32}
    assert {name: getattr(forward, name).dtype for name in dtypes} == dtypes


def test_a_batch_in_flight_is_not_overwritten_by_the_next():
    inputs = make(4)
    first = scheduled([(0, 0, 3, True)], 0, [(0, 0, 5)], [1, 2, 3])
    second = scheduled([(1, 0, 3, True)], 0, [(1, 0, 6)], [4, 5, 6])
    built = inputs.prepare(first).batch
    inputs.prepare(second)
    assert (built.token_ids.tolist(), built.kv_slots.tolist()) == ([1, 2, 3], [20, 21, 22])


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_decode_step_of_64_rows_costs_what_one_of_one_row_does(page_size):
    inputs = make(page_size)
    batches = {rows: scheduled([(row, 40, 1, True) for row in range(rows)], rows, [], []) for rows in (1, 64)}
    best = dict.fromkeys(batches, 1.0)
    with torch.inference_mode():
        for rows, batch in [*batches.items()] * 300:
            start = time.perf_counter()
            inputs.build_forward_batch(batch, compute_layout(batch), StepArrays())
            best[rows] = min(best[rows], time.perf_counter() - start)
    assert best[64] < 2 * best[1]  # 28.2 µs and 27.6 where this was written


def test_what_is_cached_is_not_stored_again():
    inputs = make(4)
    rows = [(3, 9, 1, True), (1, 7, 1, True), (0, 7, 2, True)]
    pages = [(3, 2, 4), (1, 1, 6), (0, 1, 5), (0, 2, 7)]
    batch = msgspec.structs.replace(scheduled(rows, 1, pages, [50, 60, 61]), skip_kv_store=np.array([False, True, False]))
    forward = inputs.prepare(batch).batch
    assert forward.kv_slots.tolist() == [17, 0, 23, 28]
    inputs.max_graph_rows = 8
    found = inputs.prepare(batch).rows
    assert list(zip(found.slots, found.positions, found.kv_slots, strict=True)) == [(3, 9, 17), (1, 7, 0), (0, 8, 28), (0, 7, 23)]


def test_tokens_one_by_one_begin_with_those_that_are_sampled():
    inputs = make(4)
    table = inputs.table
    rows = [(3, 9, 1, True), (1, 4, 3, True), (0, 0, 2, False)]
    batch = scheduled(rows, 1, [(0, 0, 5)], [50, 51, 52, 60, 61], None)
    batch = msgspec.structs.replace(batch, setups=[setup(slot, temperature=0.0) for slot in (3, 1, 0)])
    inputs.max_graph_rows = 8
    prepared = inputs.prepare(batch)
    assert prepared.tensors == StepArrays() and prepared.plans.sampling.draws["temperature"].tolist() == [0.0, 0.0]
    found = prepared.rows
    first = table.first_host_token
    assert found.slots.tolist() == [3, 1, 1, 1, 0, 0] and found.num_sampling == 2
    assert found.positions.tolist() == [9, 6, 4, 5, 0, 1]
    assert found.sources.tolist() == [3, first + 2, first, first + 1, first + 3, first + 4]
    assert found.drawn.tolist() == [3, 1, *[table.padding_slot] * 4]
    assert table.last_token[found.sources[1:]].tolist() == [52, 50, 51, 60, 61]
    assert table.pages[0, 0] == 5


def decodes(*slots, **more):
    return msgspec.structs.replace(scheduled([(slot, 20, 1, True) for slot in slots], len(slots), [], []), **more)


def setup(slot, **params):
    return SlotSetup(slot, SamplingParams(**params), 7, 3, np.arange(3, dtype=np.int32))


def test_a_decode_graph_draws_the_tokens_of_rows_without_logprobs_alone():
    inputs = make(4)
    inputs.max_graph_rows = 2
    plain = inputs.prepare(decodes(0, 1, setups=[setup(0, temperature=0.0), setup(1, temperature=1.0)]))
    assert isinstance(plain, ReplayInputs) and plain.tensors == StepArrays() and list(plain.plans.sampling.draws) == ["temperature", "key"]
    assert (plain.plans.sampling.draws["temperature"] > 0).tolist() == [False, True]
    sampled = inputs.prepare(decodes(0, 2, setups=[setup(2, temperature=0.0, logprobs=1)]))
    assert isinstance(sampled, ReplayInputs) and not sampled.plans.sampling.draws
    assert sampled.tensors.sampling.slots.tolist() == [0, 2] and sampled.tensors.sampling.logprob_rows.tolist() == [1]
    deferred = inputs.prepare(decodes(0, 1, has_deferred_grammar_mask=True))
    assert isinstance(deferred, ReplayInputs) and not deferred.plans.sampling.draws and not deferred.is_masked
    inputs.draws_masked = True
    masked = inputs.prepare(decodes(0, 1, has_deferred_grammar_mask=True))
    assert isinstance(masked, ReplayInputs) and masked.plans.sampling.draws and masked.is_masked
    assert not inputs.prepare(decodes(0, 2, has_deferred_grammar_mask=True)).plans.sampling.draws, "a row has log-probabilities"
    assert isinstance(inputs.prepare(decodes(0, 1, 2)), ForwardInputs), "no graph has three rows"


@pytest.mark.parametrize(("rows", "selects", "indices", "is_selected"), [
    ([(0, 9, 1, True), (1, 9, 1, True)], True, None, False),  # all hidden states, in order
    ([(0, 9, 1, True), (1, 0, 9, True)], False, [0, 9], False),
    ([(0, 9, 1, True), (1, 0, 9, True)], True, None, True),
    ([(0, 9, 1, True), (1, 0, 2, True)], True, [0, 2], False),  # too few tokens are left out
])  # fmt: skip
def test_hidden_states_are_selected_once(rows, selects, indices, is_selected):
    inputs = make(4, selects_tokens=selects)
    count = sum(row[2] for row in rows[1:])
    batch = scheduled(rows, 2 if count == 1 else 1, [], [] if count == 1 else list(range(count)))
    found = inputs.prepare(batch)
    assert (None if found.logits_indices is None else found.logits_indices.tolist()) == indices
    selected = found.batch.get(SelectedTokens)
    assert (selected is not None) == is_selected
    if selected is not None:
        assert selected.indices.tolist() == found.batch.logits_indices.tolist() == [0, 9]
