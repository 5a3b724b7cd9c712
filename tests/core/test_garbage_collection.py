"""A block without garbage collection, of imports or of captures."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from frame.core.garbage_collection import paused_collection


def test_collection_is_enabled_after_imports_that_fail() -> None:
    with pytest.raises(ImportError), paused_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_caller_that_disabled_collection_keeps_it_disabled() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


MADE = """
import gc
from frame.core.garbage_collection import paused_collection
with paused_collection():
    made = [[] for _ in range(10_000)]
assert not gc.get_freeze_count()
oldest = {id(each) for each in gc.get_objects(generation=2)}
assert all(id(each) in oldest for each in made)
"""


def test_objects_of_imports_are_not_traversed_by_the_next_collection() -> None:
    """In a process that has frozen none, with few objects to go through."""
    subprocess.run([sys.executable, "-c", MADE], check=True, timeout=500)


def test_garbage_is_collected_before_the_block_and_not_in_it() -> None:
    class Cycle:
        pass

    def make() -> weakref.ref[Cycle]:
        cycle = Cycle()
        cycle.itself = cycle  # type: ignore[attr-defined]
        return weakref.ref(cycle)

    before = make()
    with pytest.raises(RuntimeError, match="a capture that fails"), paused_collection(collects_first=True):
        assert before() is None
        within = make()
        for _ in range(10):  # an inner block leaves collection off
            with paused_collection():
                assert not gc.isenabled()
        assert not gc.isenabled()
        assert within() is not None
        raise RuntimeError("a capture that fails")
    assert gc.isenabled()
