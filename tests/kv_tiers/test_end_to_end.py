"""Engines with tiers, whose device pool holds a twentieth of what is asked: the tokens are those of
an engine whose pool holds everything; and a disk is warm after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from frame import Engine

PROMPTS = [[7 + (number * 31 + index * index * 3) % 900 for index in range(60)] for number in range(20)]
GREEDY = {"max_tokens": 2, "temperature": 0}
WORKING_SET = len(PROMPTS) * 64
SETTINGS: dict[str, Any] = {
    "model": "frame-tiny",
    "device": "cpu",
    "dtype": "float32",
    "page_size": 2,
    "max_model_len": 64,
    "max_running_requests": 2,
    "min_load_tokens": 4,
    "threads": 1,
}


def serve(tiers: Sequence[str], folder: Path, num_tokens: int, rounds: int, **more: Any) -> tuple[list[list[list[int]]], list[int]]:
    """-> the tokens of each round and prompt, and the cached tokens of each round."""
    known = {
        "kv_tier/host": {"size_gib": 0.05},
        "kv_tier/disk": {"folder": str(folder), "size_gib": 0.1, "buffer_gib": 0.01},
    }
    options = {name: values for name, values in known.items() if name.removeprefix("kv_tier/") in tiers}
    keywords = {**SETTINGS, "cache_tiers": tiers, "plugins_options": options} if tiers else {**SETTINGS}
    if not tiers:
        del keywords["min_load_tokens"]
    tokens, cached = [], []
    with Engine(max_total_tokens=num_tokens, **keywords, **more) as engine:
        for _ in range(rounds):
            outputs = [output for prompt in PROMPTS for output in engine.generate([prompt], GREEDY)]
            assert all(output.error is None for output in outputs)
            tokens.append([output.token_ids for output in outputs])
            cached.append(sum(output.cached_tokens for output in outputs))
    return tokens, cached


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of an engine without tiers whose pool holds everything."""
    (tokens,), _ = serve((), tmp_path_factory.mktemp("none"), 2 * WORKING_SET, 1)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [("host",), ("disk",), ("host", "disk")], ids="-".join)
def test_a_small_pool_with_tiers_gives_the_same_tokens(tiers: Sequence[str], expected: list[list[int]], tmp_path: Path) -> None:
    rounds, (_, cached) = serve(tiers, tmp_path / "blocks", WORKING_SET // 20, 2)
    assert rounds == [expected, expected]
    assert cached > len(PROMPTS) * 4, "the second round reads blocks that the pool evicted in the first"


@pytest.mark.slow
def test_a_disk_is_warm_after_a_restart(expected: list[list[int]], tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    assert serve(("disk",), folder, WORKING_SET // 20, 1)[0] == [expected]
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "key_secret").stat().st_mode & 0o777 == 0o600
    again, (cached,) = serve(("disk",), folder, WORKING_SET // 20, 1)
    assert again == [expected]
    assert cached > len(PROMPTS) * 4


@pytest.mark.slow
def test_a_disk_of_two_ranks_is_warm_after_a_restart(expected: list[list[int]], tmp_path: Path) -> None:
    """Other numbers of ranks have other blocks."""
    folder = tmp_path / "blocks"
    assert serve(("disk",), folder, WORKING_SET // 20, 1, tp=2)[0] == [expected]
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 2
    again, (cached,) = serve(("disk",), folder, WORKING_SET // 20, 1, tp=2)
    assert again == [expected]
    assert cached > len(PROMPTS) * 4
    again, (cached,) = serve(("disk",), folder, WORKING_SET // 20, 1)
    assert again == [expected]
    assert cached == 0
