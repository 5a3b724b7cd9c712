"""Sampling kernels against float64, row by row, over dtypes, vocabularies and filters.

Collected by `tests/gpu/test_sampling.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import DataObject, booleans, data, floats, integers, just, one_of, sampled_from

from frame.core.execution.staging import map_arrays
from frame.core.interfaces.batch import ScheduledBatch, SlotSetup
from frame.core.interfaces.sampling import ProcessorContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.sampling import gumbel_race
from frame.core.sampling.batch_layout import compute_layout
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampled, Sampler
from frame.core.sampling.sampling_metadata import SamplingTable
from frame.kernels.sampling import filtering
from frame.kernels.sampling.filtering import Filters, sample_filtered
from frame.kernels.sampling.gumbel_noise import RACE_GROUP
from frame.kernels.sampling.logit_changes import apply_token_mask
from frame.kernels.sampling.logprobs import compute_logprobs
from frame.kernels.sampling.operations import TRITON
from frame.kernels.sampling.sampling import sample_unfiltered
from frame.plugins.loader import load_registry
from tests.core.sampling.race_reference import winners

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LN2 = math.log(2.0)
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def random_logits(rows: int, vocab: int, spread: float, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab + rows)) * spread).to(dtype)


def weights_of(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, log_min_p: float = -math.inf) -> torch.Tensor:
    """The float64 weights of one row's columns after the filters, which are applied by sorting."""
    values = logits.double()
    order = values.sort(descending=True).values
    top_k = min(top_k, len(order)) if top_k > 0 else len(order)
    sorted_weights = ((order - order[0]) / temperature).exp2()
    limit = order[top_k - 1]
    if top_p < 1.0:
        before = sorted_weights.cumsum(0) - sorted_weights
        size = int((before < top_p * sorted_weights[:top_k].sum()).sum())
        limit = max(limit, order[min(max(size, 1), top_k) - 1])
    distance = (values - order[0]) / temperature
    return torch.where((values >= limit) & (distance >= log_min_p), distance.exp2(), 0.0)


def random_keys(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(seed))


@each_type
@pytest.mark.parametrize("vocab", [1, 5003])
def test_unfiltered_draws(vocab: int, dtype: torch.dtype) -> None:
    temperature = torch.tensor([0.0, 1.0, 0.5, 0.0, 3.0], device=DEVICE) * LN2
    logits = random_logits(5, vocab + 5, 3.0, dtype).to(DEVICE)[:, :vocab]
    logits[3, vocab // 2 :] = logits[3].max()  # ties: the first column is drawn
    keys = random_keys(5)
    token_ids, best = sample_unfiltered(logits, temperature, keys.to(DEVICE))
    assert best.tolist() == logits.amax(-1).float().tolist()
    for row, token in enumerate(token_ids.tolist()):
        if temperature[row] == 0:
            assert token == int(np.argmax(logits[row].float().cpu().numpy()))
        else:
            assert token in winners(weights_of(logits[row].cpu(), float(temperature[row])), int(keys[row]))


def test_the_race_equals_that_of_pytorch() -> None:
    """The scores differ in their last bits, which these keys do not show."""
    assert RACE_GROUP == gumbel_race.GROUP
    for vocab, spread in ((63, 0.1), (5003, 5.0)):
        logits = random_logits(10, vocab, spread, torch.float32)
        temperature, keys = torch.full((10,), LN2), random_keys(10, vocab)
        token_ids, _ = sample_unfiltered(logits.to(DEVICE), temperature.to(DEVICE), keys.to(DEVICE))
        expected = gumbel_race.draw(logits, gumbel_race.find_heights(logits), temperature, keys)
        assert token_ids.tolist() == expected.tolist()


def test_non_finite_rows_are_reported_and_affect_no_other_row() -> None:
    logits = random_logits(6, 5003, 1.0, torch.float32).to(DEVICE)
    keys = random_keys(6).to(DEVICE)
    temperature = torch.full((6,), LN2, device=DEVICE)
    sound, _ = sample_unfiltered(logits, temperature, keys)
    logits[1, 7], logits[2, 9], logits[3], logits[4, 4000] = math.nan, math.inf, -math.inf, math.nan
    logits[4, 4500] = math.inf
    every = torch.ones(6, device=DEVICE)
    filters = Filters(temperature, keys, every.int() * 5, every * 0.9, every * -math.inf)
    for token_ids, best in (sample_unfiltered(logits, temperature, keys), sample_filtered(logits, filters)):
        assert best.isfinite().tolist() == [True, False, False, False, False, True]
        assert best[[1, 4]].isnan().all()
        assert token_ids[1:5].tolist() == [7, 9, 0, 4000]
    assert sample_unfiltered(logits, temperature, keys)[0][[0, 5]].tolist() == sound[[0, 5]].tolist()


def test_columns_without_weight_are_never_drawn() -> None:
    rows = 4
    logits = torch.full((rows, 5003), -math.inf, device=DEVICE)
    logits[:, [130, 4999]] = torch.tensor([2.0, 1.0], device=DEVICE)
    temperature, keys = torch.full((rows,), LN2, device=DEVICE), random_keys(rows).to(DEVICE)
    token_ids = sample_unfiltered(logits, temperature, keys)[0].tolist()
    assert set(token_ids) == {130, 4999}
    every = torch.ones(rows, device=DEVICE)
    for top_k, top_p in ((5, 0.999), (5000, 1.0)):
        filters = Filters(temperature, keys, every.int() * top_k, every * top_p, every * -math.inf)
        assert sample_filtered(logits, filters)[0].tolist() == token_ids


@pytest.mark.parametrize(
    ("vocab", "spread", "dtype", "room"),  # room for candidates: with little room, rows are searched whole
    [
        (31, 3.0, torch.float32, 2048),
        (300, 0.3, torch.bfloat16, 2048),
        (300, 0.3, torch.float16, 16),
        (5003, 3.0, torch.bfloat16, 2048),
        (5003, 3.0, torch.bfloat16, 16),
        (2100, 3.0, torch.float32, 16),
    ],
    ids=str,
)
def test_filtered_draws(vocab: int, spread: float, dtype: torch.dtype, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtering, "CANDIDATES", room)
    monkeypatch.setattr(filtering, "TILE", 1024)
    wanted = [  # temperature, top_k, top_p, min_p
        (0.0, 5, 0.5, 0.0), (1.0, 0, 0.9, 0.0), (0.5, 7, 1.0, 0.0), (2.0, 0, 0.95, 0.0), (1.0, 50, 0.8, 0.0), (1.0, 1000, 0.9, 0.01),
        (1.0, 0, 1.0, 0.0), (0.7, 1, 0.3, 0.1), (1.0, 3, 0.01, 0.0), (3.0, 0, 1e-7, 0.0), (1.0, 40, 0.999, 0.0), (1.0, 0, 1.0, 0.05),
    ]  # fmt: skip
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*wanted, strict=True))
    temperature, log_min_p = temperature * LN2, min_p.log2()
    logits = random_logits(len(wanted), vocab, spread, dtype)
    keys = random_keys(len(wanted), vocab)
    filters = Filters(*(each.to(DEVICE) for each in (temperature, keys, top_k.int(), top_p, log_min_p)))
    token_ids, best = sample_filtered(logits.to(DEVICE), filters)
    assert best.tolist() == logits.amax(-1).float().tolist()
    for row, token in enumerate(token_ids.tolist()):
        if temperature[row] == 0:
            assert token == int(np.argmax(logits[row].float().numpy()))
            continue
        weights = weights_of(logits[row], float(temperature[row]), int(top_k[row]), float(top_p[row]), float(log_min_p[row]))
        assert token in winners(weights, int(keys[row]))


@pytest.mark.soak
@settings(deadline=None, max_examples=60)
@given(data())
def test_kept_columns_match_the_reference(source: DataObject) -> None:
    """The draws are those of the reference, whose filters sort."""
    vocab = source.draw(integers(1, 700))
    dtype = source.draw(sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    logits = random_logits(1, vocab, source.draw(floats(0.01, 8.0)), dtype)
    if source.draw(booleans()):
        logits = (logits.float() * 2).round().div(2).to(dtype)  # many ties
    temperature = source.draw(floats(0.05, 20.0)) * LN2
    top_k, top_p = source.draw(integers(0, vocab + 1)), source.draw(one_of(just(1.0), floats(0.0, 1.0, width=32)))
    log_min_p = source.draw(one_of(just(-math.inf), floats(-30.0, 0.0, width=32)))
    rows = 3
    keys = random_keys(rows, vocab)
    one = torch.ones(rows)
    filters = Filters(*(each.to(DEVICE) for each in (one * temperature, keys, one.int() * top_k, one * top_p, one * log_min_p)))
    room = source.draw(sampled_from([2048, 16]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filtering, "CANDIDATES", room)
        patch.setattr(filtering, "TILE", 256)
        token_ids, _ = sample_filtered(logits.expand(rows, vocab).contiguous().to(DEVICE), filters)
    heavier, lighter = (weights_of(logits[0], float(filters.temperature[0]), top_k, p, log_min_p) for p in (top_p * (1 - 1e-6), top_p))
    for key, token in zip(keys.tolist(), token_ids.tolist(), strict=True):
        assert any(token in winners(weights, key) for weights in (heavier, lighter))


@pytest.mark.parametrize("room", [2048, 8])
def test_ties_at_the_threshold_are_kept(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtering, "CANDIDATES", room)
    monkeypatch.setattr(filtering, "TILE", 1024)
    rows = 4
    logits = torch.zeros(rows, 300, device=DEVICE)
    logits[:, :4] = 1.0
    keys = random_keys(rows).to(DEVICE)
    every = torch.ones(rows, device=DEVICE)
    for top_k, top_p in ((3, 1.0), (3, 0.005)):
        filters = Filters(every * LN2, keys, every.int() * top_k, every * top_p, every * -math.inf)
        assert set(sample_filtered(logits, filters)[0].tolist()) <= {0, 1, 2, 3}


def test_tokens_are_stored_by_slot() -> None:
    logits = random_logits(4, 300, 3.0, torch.bfloat16).to(DEVICE)
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0], device=DEVICE) * LN2
    keys = random_keys(4, 6).to(DEVICE)
    table, slots = torch.full((7,), -1, device=DEVICE), torch.tensor([5, 0, 3, 1], device=DEVICE)
    token_ids, best = sample_unfiltered(logits, temperature, keys, (table, slots))
    assert table.tolist() == [token_ids[1], token_ids[3], -1, token_ids[2], -1, token_ids[0], -1]
    one = torch.ones(4, device=DEVICE)
    top_k = torch.tensor([0, 0, 2, 2], dtype=torch.int32, device=DEVICE)
    filters = Filters(temperature, keys, top_k, one, one * -math.inf)
    unfiltered = token_ids.clone()
    again, _ = sample_filtered(logits, filters, (token_ids, best), (table, slots))
    assert again is token_ids
    assert again[:2].tolist() == unfiltered[:2].tolist() != again[2:].tolist()
    assert table.tolist() == [again[1], again[3], -1, again[2], -1, again[0], -1]
    assert again.tolist() == sample_filtered(logits, filters)[0].tolist()


def test_draws_are_batch_invariant() -> None:
    logits = random_logits(6, 5003, 3.0, torch.bfloat16).to(DEVICE)
    temperature = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.3, 1.0], device=DEVICE) * LN2
    keys = random_keys(6, 2).to(DEVICE)
    top_k = torch.tensor([0, 0, 50, 5, 0, 0], dtype=torch.int32, device=DEVICE)
    top_p = torch.tensor([0.9, 1.0, 1.0, 0.5, 0.9, 1.0], device=DEVICE)
    log_min_p = torch.tensor([-math.inf] * 4 + [-3.0, -3.0], device=DEVICE)
    every = Filters(temperature, keys, top_k, top_p, log_min_p)
    together, _ = sample_filtered(logits, every)
    for row in range(6):
        one = slice(row, row + 1)
        alone, _ = sample_filtered(logits[one], Filters(temperature[one], keys[one], top_k[one], top_p[one], log_min_p[one]))
        assert alone.item() == together[row]


@pytest.mark.parametrize(
    ("vocab", "dtype", "room"), [(3, torch.float32, 2048), (5003, torch.bfloat16, 2048), (300, torch.float32, 8)], ids=str
)
@pytest.mark.parametrize("num_top", [0, 5])
def test_logprobs(vocab: int, dtype: torch.dtype, room: int, num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtering, "CANDIDATES", room)
    logits = random_logits(4, vocab, 3.0, dtype)
    logits[2] = logits[2].round()  # equals
    token_ids = torch.arange(4) % vocab
    chosen, top_ids, top = (each.cpu() for each in compute_logprobs(logits.to(DEVICE), token_ids.to(DEVICE), num_top))
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), expected.gather(1, token_ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    for row in range(4):
        ranked = sorted(range(vocab), key=lambda column: (-float(logits[row, column]), column))[:num_top]
        assert top_ids[row].tolist() == ranked
        torch.testing.assert_close(top[row].double(), expected[row, ranked], rtol=1e-5, atol=1e-5)


@each_type
def test_token_masks(dtype: torch.dtype) -> None:
    logits = random_logits(4, 2100, 3.0, dtype)
    mask = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, (4, 66)).astype(np.int32))
    rows = torch.tensor([3, 1, -1, -1])  # the last two have no row
    masked = logits.to(DEVICE, copy=True)
    apply_token_mask(masked, rows.to(DEVICE), mask.to(DEVICE))
    rows, mask = rows[:2], mask[:2]
    allowed = (mask[:, torch.arange(2100) // 32] >> (torch.arange(2100) % 32)) & 1
    logits[rows] = logits[rows].masked_fill(allowed == 0, -math.inf)
    assert torch.equal(masked.cpu(), logits)


def sample_step(use_triton: bool, logits: torch.Tensor, params: list[SamplingParams], mask: np.ndarray | None, steps: int) -> list[Sampled]:
    """Several decode steps over the same logits, with the built-in logits processors."""
    rows, vocab = logits.shape
    registry = load_registry(installed=False)
    made = [registry.load(record)(ProcessorContext(vocab, rows, DEVICE)) for record in registry.records("logits_processor")]
    for processor in made:
        processor.eos_token_ids = (3,)
    processors, table = Processors(made, rows), SamplingTable(rows, by_row=use_triton)
    sampler = Sampler(processors, TRITON if use_triton else TORCH)
    setups = [SlotSetup(row, each, row, 5, np.arange(5, dtype=np.int32)) for row, each in enumerate(params)]
    table.update(setups, [])
    processors.update(setups, [])
    results = []
    for step in range(steps):
        batch = ScheduledBatch(
            step=step,
            num_decodes=rows,
            slots=np.arange(rows, dtype=np.int32),
            num_computed=np.full(rows, 4 + step, np.int32),
            num_scheduled=np.ones(rows, np.int32),
            token_ids=np.empty(0, np.int32),
            samples=np.ones(rows, np.bool_),
            new_pages=np.empty((0, 3), np.int32),
            grammar_mask=mask,
        )
        plan = table.begin_step(batch, compute_layout(batch), draws=False)
        processing = processors.plan(plan.slots, plan.positions)
        plan.arrays.processing = None if processing is None else processing.arrays
        tensors = map_arrays(plan.arrays, lambda array: torch.from_numpy(array).to(DEVICE))
        results.append(sampler.sample(logits.to(DEVICE, copy=True), plan, processing, tensors))
        if processing is not None:
            processors.observe_tokens(results[-1].token_ids, processing, tensors.processing)
    return results


@pytest.mark.parametrize("every_row_is_changed", [False, True])
def test_the_sampler_with_triton_equals_the_one_without(every_row_is_changed: bool) -> None:
    rows, vocab = 8, 1000
    changes = [
        {"frequency_penalty": 2.0, "presence_penalty": 1.0},
        {"repetition_penalty": 3.0, "logit_bias": {7: 20.0, 8: 19.5}},
        {"min_tokens": 2, "logit_bias": {3: 30.0}},
        {"bad_words_ids": ((5,), (9, 6))},
    ]
    params = [
        SamplingParams(
            temperature=(0.0, 1.0, 0.7)[row % 3],
            top_p=(1.0, 0.8)[row // 3 % 2],
            top_k=(-1, 40)[row // 2 % 2],
            logprobs=(None, 2)[row % 2],
            **(changes[row % 4] if every_row_is_changed or row < 4 else {}),
        )
        for row in range(rows)
    ]
    mask = np.full((rows, -(-vocab // 32)), -1, np.int32)
    mask[5:7] = np.random.default_rng(0).integers(-(2**31), 2**31, mask[5:7].shape)
    logits = random_logits(rows, vocab, 2.0, torch.bfloat16)
    pairs = zip(*(sample_step(use_triton, logits, params, mask, 2) for use_triton in (True, False)), strict=True)
    for use_triton, without in pairs:
        assert use_triton.token_ids.tolist() == without.token_ids.tolist()
        torch.testing.assert_close(use_triton.best, without.best)
        assert use_triton.logprobs is not None and use_triton.top_ids is not None
        torch.testing.assert_close(use_triton.logprobs, without.logprobs)
        assert use_triton.top_ids.tolist() == without.top_ids.tolist()
