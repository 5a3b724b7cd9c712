"""The Gumbel race: its noise, its distribution, and how often close distributions agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from frame.core.sampling import gumbel_race
from frame.core.sampling.sampling_metadata import draw_keys
from tests.core.sampling.race_reference import hash_word, noise_of

LN2 = math.log(2.0)


def race(logits: torch.Tensor, keys: np.ndarray, limits: torch.Tensor | None = None, temperature: float = 1.0) -> torch.Tensor:
    logits = logits.expand(len(keys), -1) if logits.dim() == 1 else logits
    heights = gumbel_race.find_heights(logits)
    return gumbel_race.draw(logits, heights, torch.full((len(keys),), temperature * LN2), torch.from_numpy(keys), limits=limits)


def random_logits(rows: int, vocab: int, spread: float) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """In standard deviations above its mean."""
    big = expected >= 5
    observed, wanted = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    return float((((observed - wanted) ** 2) / wanted).sum() - freedom) / math.sqrt(2 * freedom)


def test_the_hash_is_that_of_the_definition() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 5)
    index = np.array([0, 1, 63, 64, 151_935, -1, -2, -4749], np.int64)
    words = gumbel_race.hash_words(keys.view(np.uint64)[:, None], index.astype(np.uint32))
    assert words.tolist() == [[hash_word(int(key), int(number)) for number in index] for key in keys]
    assert np.array_equal(gumbel_race._hash_on_device(torch.from_numpy(keys), torch.from_numpy(index)).numpy(), words)


def test_the_noise_of_groups_on_devices_is_that_of_the_cpu() -> None:
    keys = torch.from_numpy(draw_keys(np.arange(5), np.arange(5)))
    groups = torch.randint(2375, (5, 7), generator=torch.Generator().manual_seed(0))
    minimum = gumbel_race.find_min(keys, 2375)
    torch.testing.assert_close(gumbel_race._find_min_on_device(keys, 2375), minimum)
    minimum = minimum.gather(1, groups)
    torch.testing.assert_close(gumbel_race._find_noise_on_device(keys, groups, minimum), gumbel_race.find_noise(keys, groups, minimum))


@pytest.mark.parametrize(("vocab", "spread"), [(1, 1.0), (100, 1.0), (2048, 2.0), (5003, 0.1), (20_000, 4.0)])
def test_a_race_of_the_best_groups_equals_that_of_all_tokens(vocab: int, spread: float) -> None:
    rows = 60
    logits, keys = random_logits(rows, vocab, spread), draw_keys(np.arange(rows), np.full(rows, 3))
    temperature = torch.linspace(0.1, 2.0, rows) * LN2
    limits = torch.linspace(-8.0, 0.0, rows)
    for each in (None, limits):
        found = gumbel_race.draw(logits, gumbel_race.find_heights(logits), temperature, torch.from_numpy(keys), limits=each)
        expected = gumbel_race._draw_from_all(logits, temperature, torch.from_numpy(keys), each)
        assert torch.equal(found, expected)


def test_the_noise_is_independent_and_exponential() -> None:
    """Over the tokens of one key, over the keys of one token, and within a group."""
    keys = draw_keys(np.arange(40), np.arange(40)).tolist()
    noise = np.array([[2.0 ** noise_of(key, column) * LN2 for column in range(256)] for key in keys])
    shares = np.sort(1.0 - np.exp(-noise.ravel()))
    distance = np.abs(shares - (np.arange(len(shares)) + 0.5) / len(shares)).max()
    assert distance < 1.95 / math.sqrt(len(shares))  # Kolmogorov and Smirnov: exceeded by 0.1 % of samples
    uniform = 1.0 - np.exp(-noise)
    for first, second in ((uniform[:, :-1], uniform[:, 1:]), (uniform[:-1], uniform[1:]), (uniform[:, :128], uniform[:, 128:])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 4 / math.sqrt(first.size)


@pytest.mark.parametrize("is_by_seed", [True, False])
def test_draws_follow_the_softmax(is_by_seed: bool) -> None:
    """Over the positions of one seed, and over the seeds of one position."""
    draws = 40_000
    every, one = np.arange(draws), np.full(draws, 7)
    keys = draw_keys(every, one) if is_by_seed else draw_keys(one, every)
    logits = random_logits(1, 300, 2.0)[0]
    for temperature in (0.7, 2.0):
        counts = np.bincount(race(logits, keys, temperature=temperature).numpy(), minlength=300)
        assert abs(chi_square(counts, (logits.double() / temperature).softmax(0).numpy() * draws)) < 4


def test_limits_keep_the_distribution_of_what_is_left() -> None:
    draws = 20_000
    logits = random_logits(1, 500, 2.0)[0]
    kept = logits >= logits.topk(20).values[-1]
    limit = float((logits[kept].min() - logits.max()) / LN2)
    keys = draw_keys(np.arange(draws), np.zeros(draws))
    found = race(logits, keys, limits=torch.full((draws,), limit - 1e-6))
    masked = logits.masked_fill(~kept, -torch.inf)
    assert abs(chi_square(np.bincount(found.numpy(), minlength=500), masked.double().softmax(0).numpy() * draws)) < 4
    assert torch.equal(found, race(masked, keys))


@pytest.mark.parametrize("change", [0.1, 0.5, 2.0])
def test_close_distributions_draw_the_same_token(change: float) -> None:
    """With probability (1 - TV) / (1 + TV) or more, on average over keys."""
    draws = 5_000
    keys = draw_keys(np.arange(draws), np.full(draws, 11))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(200, generator=generator) * 2
        other = logits + torch.randn(200, generator=generator) * change
        distance = float((logits.double().softmax(0) - other.double().softmax(0)).abs().sum()) / 2
        agreed = float((race(logits, keys) == race(other, keys)).double().mean())
        assert agreed >= (1 - distance) / (1 + distance) - 3 / math.sqrt(draws) / 2
        assert agreed <= 1 - distance + 3 / math.sqrt(draws) / 2  # no coupling agrees more often


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((200, 777), -torch.inf)
    logits[:, [3, 130, 776]] = torch.tensor([0.0, 2.0, -20.0])
    assert set(race(logits, draw_keys(np.arange(200), np.zeros(200))).tolist()) == {3, 130}
    logits[:, [3, 130]] = -torch.inf
    assert set(race(logits, draw_keys(np.arange(200), np.zeros(200))).tolist()) == {776}


def test_rows_that_are_not_finite_get_some_token() -> None:
    logits = random_logits(4, 777, 1.0)
    logits[0, 5], logits[1], logits[2, 700] = math.nan, -math.inf, math.inf
    found = race(logits, draw_keys(np.arange(4), np.zeros(4)))
    assert ((found >= 0) & (found < 777)).all()
    assert found[3] == race(logits[3:], draw_keys(np.arange(3, 4), np.zeros(1)))[0]


def test_keys_are_the_finaliser_of_splitmix64() -> None:
    """Known values of the generator that starts at seed 0: splitmix64's first outputs."""
    mixed_zero = np.array([0], np.uint64)  # the finaliser maps 0 to 0
    outputs = draw_keys(mixed_zero.repeat(3), np.arange(1, 4)).view(np.uint64)
    assert outputs.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
