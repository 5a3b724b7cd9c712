"""The folder of compiled kernels, warm and cold starts, and compilation counts."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frame.kernels.cache import CACHE_DIR_VARIABLE, KernelCache, KernelCounts, count_compilations, select_cache_folder, start_key


def test_the_users_folder_is_kept_and_the_default_is_named_by_gpu(tmp_path: Path) -> None:
    environ = {CACHE_DIR_VARIABLE: str(tmp_path / "mine")}
    assert select_cache_folder("NVIDIA H200", environ) == tmp_path / "mine"
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    folder = select_cache_folder("NVIDIA H200", environ)
    assert folder.parent == tmp_path / "frame" / "triton"
    assert folder.name.endswith("nvidia-h200")
    assert environ[CACHE_DIR_VARIABLE] == str(folder)
    assert select_cache_folder("NVIDIA H200", {"HOME": str(tmp_path)}).is_relative_to(tmp_path / ".cache" / "frame" / "triton")


def test_a_completed_start_makes_the_next_one_warm(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, "a")
    assert not cache.is_warm
    cache.mark_complete(KernelCounts(compiled=3, seconds=1.5))
    assert cache.is_warm
    assert not KernelCache(tmp_path, "b").is_warm
    (tmp_path / "file").write_text("")
    KernelCache(tmp_path / "file", "a").mark_complete(KernelCounts())  # not writable: ignored


def test_tritons_key_is_computed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: Any = pytest.importorskip("triton.runtime.cache")
    found = Future[str]()
    monkeypatch.setattr(cache, "triton_key", lambda: found.set_result(threading.current_thread().name))
    start_key()
    assert found.result(10) == "triton-key"


def test_triton_compilations_are_counted() -> None:
    knobs: Any = pytest.importorskip("triton").knobs
    before = knobs.compilation.listener
    with count_compilations() as counts:
        tell = knobs.compilation.listener
        rest = {"src": None, "metadata": {}, "metadata_group": {}}
        tell(**rest, times=SimpleNamespace(total=2_000_000), cache_hit=False)
        tell(**rest, times=SimpleNamespace(total=10), cache_hit=True)
    assert counts == KernelCounts(compiled=1, loaded=1, seconds=2.0)
    assert knobs.compilation.listener is before
