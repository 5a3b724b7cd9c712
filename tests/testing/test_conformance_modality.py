"""The in-tree modalities pass the suite of their kind, and skip nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.plugins.loader import load_registry
from frame.testing.conformance import Setting, find, run_suite
from frame.testing.modality import families
from frame.testing.modality.files import Maker, make_sound
from frame.testing.modality.suite import suite

REGISTRY = load_registry(installed=False)
PICTURES = {"reading_is_fast", "detail_of_wide_pictures", "pixels_at_the_edges_count", "files_that_begin_alike"}
SKIPPED = {"image": set(), "video": PICTURES, "audio": {"bytes_have_factors", *PICTURES}}


FEW = ("qwen2_vl", "gemma3", "llava")  # a grid of patches, tiles, and one picture; test_image.py compares features of the others


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["few", "all"])
@pytest.mark.parametrize("name", sorted(SKIPPED))
def test_our_modalities(name: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_whole:
        monkeypatch.setattr(families, "FAMILIES", {family: families.FAMILIES[family] for family in FEW})
    outcomes = run_suite(find(REGISTRY, f"modality:{name}", Setting()))
    assert [outcome for outcome in outcomes if outcome.result == "failed"] == []
    assert {outcome.check for outcome in outcomes if outcome.result == "skipped"} == SKIPPED[name]


def test_files_are_those_of_the_modality(tmp_path: Path) -> None:
    subject = find(REGISTRY, "modality:audio", Setting())
    assert Maker(subject, tmp_path).make(50, seed=3) == make_sound(0.5, seed=3)
    assert "alpha_is_laid_over_white" not in {check.name for check in suite(subject)}


def test_images_are_checked_for_all_architectures() -> None:
    names = [check.name for check in families.list_checks(find(REGISTRY, "modality:image", Setting()))]
    assert len({name.rpartition("-")[2] for name in names if name.startswith("features_are_the_processors")}) >= 13
    assert set(families.ROWS) <= {name.rpartition("-")[2] for name in names}
