"""The sampler against a naive row-by-row reference in float64, and what it promises about seeds and
company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from frame.core.execution.staging import SharedMemory
from frame.core.interfaces.batch import ScheduledBatch, SlotSetup
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.sampling.batch_layout import compute_layout
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampler, draw_plain, row_max
from frame.core.sampling.sampling_metadata import SamplingArrays, SamplingTable, draw_keys
from tests.core.sampling.race_reference import winners

VOCAB = 300


def run(logits, params, seeds=None, positions=None, grammar_mask=None, samples=None):
    """One step of decodes, a row a parameter set; returns (Sampled, plan)."""
    rows = len(params)
    seeds = list(range(rows)) if seeds is None else seeds
    positions = np.full(rows, 10) if positions is None else np.asarray(positions)
    table = SamplingTable(rows)
    table.update([SlotSetup(r, params[r], seeds[r], 5, np.arange(5, dtype=np.int32)) for r in range(rows)], [])
    batch = ScheduledBatch(
        step=0,
        num_decodes=rows,
        slots=np.arange(rows, dtype=np.int32),
        num_computed=(positions - 1).astype(np.int32),
        num_scheduled=np.ones(rows, np.int32),
        token_ids=np.empty(0, np.int32),
        samples=np.ones(rows, np.bool_) if samples is None else np.asarray(samples),
        new_pages=np.empty((0, 3), np.int32),
        grammar_mask=grammar_mask,
    )
    plan = table.begin_step(batch, compute_layout(batch), draws=False)
    tensors = SharedMemory().move(plan.arrays)
    return Sampler(Processors((), rows), TORCH).sample(logits.clone(), plan, None, tensors), plan


def kept(logits, params):
    """Naive float64 filters of one row: scaled probabilities, 0 where cut."""
    scaled = [float(x) / params.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    alive = set(order)
    if params.top_k > 0:
        minimum = scaled[order[min(params.top_k, len(order)) - 1]]
        alive = {i for i in alive if scaled[i] >= minimum}
        order = order[: params.top_k]
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    if params.top_p < 1.0:
        whole, before, minimum = sum(weights.values()), 0.0, None
        for i in order:
            if before >= params.top_p * whole:
                break
            before, minimum = before + weights[i], scaled[i]
        alive = {i for i in alive if scaled[i] >= minimum}
    if params.min_p > 0.0:
        alive = {i for i in alive if math.exp(scaled[i] - scaled[order[0]]) >= params.min_p}
    probabilities = np.array([math.exp(scaled[i] - scaled[order[0]]) if i in alive else 0.0 for i in range(len(scaled))])
    return probabilities / probabilities.sum()


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.5},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 3.0, "top_k": 40, "top_p": 0.9},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies_follow_the_filtered_distribution(filters):
    params = SamplingParams(**{"temperature": 1.0, **filters})
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    draws = 4000
    sampled, _ = run(logits.expand(draws, VOCAB), [params] * draws, seeds=[11] * draws, positions=np.arange(1, draws + 1))
    counts = np.bincount(sampled.token_ids.numpy(), minlength=VOCAB)
    expected = kept(logits, params) * draws
    assert (counts[expected == 0] == 0).all()
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    wanted = np.where(wanted > 0, wanted, 1e-9)
    chi = float((((observed - wanted) ** 2) / wanted)[wanted > 1e-6].sum())
    freedom = max(1, int(big.sum()))
    assert chi < freedom + 4 * math.sqrt(2 * freedom) + 4, (chi, freedom)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_every_draw_equals_the_reference_race(filters):
    params = SamplingParams(**{"temperature": 1.0, **filters})
    rows = 40
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    sampled, _ = run(logits, [params] * rows)
    keys = draw_keys(np.arange(rows), np.full(rows, 10))
    for r in range(rows):
        assert int(sampled.token_ids[r]) in winners(kept(logits[r], params), int(keys[r]), within=1e-5)


def test_ties_at_the_threshold_are_kept():
    logits = torch.zeros(1, VOCAB)
    logits[0, :20] = 1.0
    rows = 300
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.01), SamplingParams(min_p=0.999)):
        sampled, _ = run(logits.expand(rows, VOCAB), [params] * rows)
        assert set(sampled.token_ids.tolist()) == set(range(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_and_order_change_nothing(dtype):
    generator = np.random.default_rng(0)
    rows, vocab = 48, 2000
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)
    params = [
        SamplingParams(
            temperature=float(generator.choice([0.0, 0.5, 1.0, 1.7])),
            top_k=int(generator.choice([-1, 3, 50, 900])),
            top_p=float(generator.choice([1.0, 0.4, 0.99])),
            min_p=float(generator.choice([0.0, 0.02])),
            logprobs=int(generator.choice([0, 3])) if r % 3 else None,
        )
        for r in range(rows)
    ]
    seeds = generator.integers(-(2**63), 2**63, rows).tolist()
    positions = generator.integers(1, 5000, rows)
    together = run(logits, params, seeds, positions)[0].token_ids.tolist()
    alone = [run(logits[r : r + 1], [params[r]], [seeds[r]], positions[r : r + 1])[0].token_ids.item() for r in range(rows)]
    assert together == alone
    order = generator.permutation(rows)
    shuffled = run(logits[order], [params[r] for r in order], [seeds[r] for r in order], positions[order])[0].token_ids.tolist()
    assert shuffled == [alone[r] for r in order]
    assert together != run(logits, params, seeds, positions + 1)[0].token_ids.tolist()


@pytest.mark.parametrize("vocab", [1, 31, 128, 151_936, 50_257])
def test_greedy_takes_the_first_greatest(vocab):
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    logits[1, -1] = 50.0
    logits[2] = 0.0
    values, ids = row_max(logits)
    assert values.tolist() == logits.amax(-1).tolist()
    assert ids.tolist() == [int(np.argmax(row)) for row in logits.numpy()]
    sampled, _ = run(logits, [SamplingParams(temperature=0.0)] * 5)
    assert sampled.token_ids.tolist() == ids.tolist()


def test_broken_rows_show_in_the_greatest_value_and_harm_no_other():
    for vocab in (VOCAB, 151_936):
        logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
        logits[1, 7], logits[2, 9], logits[3] = float("nan"), float("inf"), -float("inf")
        params = [SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(top_k=5), *[SamplingParams(temperature=1.0)] * 3]
        sampled, _ = run(logits, params)
        assert torch.isfinite(sampled.best).tolist() == [True, False, False, False, True]
        assert ((sampled.token_ids >= 0) & (sampled.token_ids < vocab)).all()
        alone, _ = run(logits[[0, 4]], [params[0], params[4]], seeds=[0, 4])
        assert sampled.token_ids[[0, 4]].tolist() == alone.token_ids.tolist()


def test_a_graph_step_draws_the_tokens_of_the_sampler():
    rows = 60
    logits = torch.randn(rows, 5003, generator=torch.Generator().manual_seed(2)) * 2
    params = [SamplingParams(temperature=(0.0, 0.7, 1.0)[r % 3]) for r in range(rows)]
    sampled, plan = run(logits, params)
    temperature = torch.tensor([p.temperature * math.log(2.0) for p in params])
    keys = torch.from_numpy(draw_keys(np.arange(rows), plan.positions))
    table = torch.zeros(rows, dtype=torch.int64)
    token_ids, best = draw_plain(logits, temperature, keys, (table, torch.arange(rows).flip(0)))
    assert token_ids.tolist() == sampled.token_ids.tolist() == table.flip(0).tolist()
    assert torch.equal(best, sampled.best)


def test_logprobs_are_of_the_untouched_logits():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(temperature=2.0, top_k=2, logprobs=4),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=0),
    ]
    mask = np.full((3, -(-VOCAB // 32)), -1, np.int32)
    mask[2] = 0
    mask[2, 1] = 1 << 5  # token 37 alone
    sampled, plan = run(logits, params, grammar_mask=mask)
    expected = torch.log_softmax(logits.double(), -1)
    assert plan.logprob_rows.tolist() == [0, 2]
    assert sampled.token_ids[2] == 37
    np.testing.assert_allclose(sampled.logprobs, [expected[0, sampled.token_ids[0]], expected[2, 37]], rtol=1e-5)
    assert sampled.top_ids.tolist() == expected[[0, 2]].topk(4).indices.tolist()
    np.testing.assert_allclose(sampled.top_logprobs, expected[[0, 2]].topk(4).values, rtol=1e-5)


def test_logprobs_of_listed_tokens():
    """Also of tokens that a grammar forbids; rows with fewer ids are filled up."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(temperature=2.0, logprobs=1, logprob_token_ids=(5, 0, VOCAB - 1)),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(9,)),
    ]
    mask = np.full((3, -(-VOCAB // 32)), -1, np.int32)
    mask[0] = 0
    mask[0, 1] = 1 << 5
    expected = torch.log_softmax(logits.double(), -1)
    sampled, plan = run(logits, params, grammar_mask=mask)
    assert plan.arrays.listed_ids.tolist() == [[5, 0, VOCAB - 1], [0, 0, 0], [9, 0, 0]]
    np.testing.assert_allclose(sampled.listed_logprobs[0], expected[0, [5, 0, VOCAB - 1]], rtol=1e-5)
    np.testing.assert_allclose(sampled.listed_logprobs[2, 0], expected[2, 9], rtol=1e-5)
    sampled, plan = run(torch.randn(2, VOCAB), [SamplingParams(logprobs=2)] * 2)
    assert (plan.arrays.listed_ids, sampled.listed_logprobs) == (None, None)


def test_grammar_masks_hold_for_greedy_and_drawn_rows():
    rows, words = 64, -(-VOCAB // 32)
    mask = np.random.default_rng(0).integers(-(2**31), 2**31, (rows, words)).astype(np.int32)
    mask[5] = -1
    params = [SamplingParams(temperature=float(r % 2)) for r in range(rows)]
    sampled, plan = run(torch.randn(rows, VOCAB), params, grammar_mask=mask)
    for row, token in enumerate(sampled.token_ids.tolist()):
        assert mask[row, token // 32] >> (token % 32) & 1
    assert 5 not in plan.arrays.grammar.rows


def test_a_greedy_step_asks_for_no_work():
    _, plan = run(torch.randn(4, VOCAB), [SamplingParams(temperature=0.0, top_k=4, top_p=0.5, min_p=0.1)] * 4)
    assert plan.arrays == SamplingArrays()
    assert (plan.num_drawn, plan.num_filtered, plan.has_min_p) == (0, 0, False)
