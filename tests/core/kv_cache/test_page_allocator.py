"""The page allocator, compared with a set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from frame.core.interfaces.kv_allocator import KVAllocatorContext
from frame.core.kv_cache.page_allocator import RESERVED_PAGE, PagedAllocator
from frame.plugins.kv_allocators import ContiguousOptions
from frame.plugins.kv_allocators.contiguous import ContiguousAllocator
from frame.plugins.kv_allocators.stack import StackAllocator
from frame.testing.page_allocators import make_allocator

NUM_PAGES = 12


class AllocatorMachine(RuleBasedStateMachine):
    def make(self) -> PagedAllocator:
        return make_allocator(NUM_PAGES)

    def __init__(self) -> None:
        super().__init__()
        self.allocator = self.make()
        self.out: list[int] = []

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def alloc(self, count: int) -> None:
        pages = self.allocator.alloc(count)
        if count > NUM_PAGES - 1 - len(self.out):
            assert pages is None
        else:
            assert pages is not None and pages.dtype == np.int32 and len(pages) == count
            assert not set(pages.tolist()) & set(self.out)
            assert RESERVED_PAGE not in pages
            self.out += pages.tolist()

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.out), unique=True)) if self.out else []
        self.allocator.free(pages)
        self.out = [page for page in self.out if page not in pages]

    @rule(page=st.integers(-1, NUM_PAGES))
    def free_what_is_not_out(self, page: int) -> None:
        if page not in self.out:
            with pytest.raises(ValueError, match=f"page {page} "):
                self.allocator.free([*self.out, page])

    @rule()
    def free_twice(self) -> None:
        if self.out:
            with pytest.raises(ValueError, match=f"page {self.out[0]} is freed twice"):
                self.allocator.free([self.out[0], self.out[0]])

    @invariant()
    def adds_up(self) -> None:
        assert self.allocator.num_free + len(self.out) == self.allocator.capacity == NUM_PAGES - 1
        assert self.allocator.pages_out().tolist() == sorted(self.out)
        self.allocator.check_integrity([np.array(self.out, np.int32)])


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAllocator = AllocatorMachine.TestCase


class ContiguousMachine(AllocatorMachine):
    """The same with hints: free pages, allocated ones, equal ones and none."""

    def make(self) -> PagedAllocator:
        chooser = ContiguousAllocator(KVAllocatorContext(NUM_PAGES, 4), ContiguousOptions(growth_pages=3))
        return PagedAllocator(NUM_PAGES, chooser, wants_after=True)

    @rule(after=st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=4), each=st.integers(1, 3))
    def alloc_after(self, after: list[int], each: int) -> None:
        pages = self.allocator.alloc(len(after) * each, np.array(after, np.int32))
        assert (pages is None) == (len(after) * each > NUM_PAGES - 1 - len(self.out))
        self.out += [] if pages is None else pages.tolist()


ContiguousMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestContiguous = ContiguousMachine.TestCase


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ([0, 3], r"chose pages 0 of 1 to 7"),
        ([8, 3], r"chose pages 8 of 1 to 7"),
        ([5, 5], r"chose pages 5 twice"),
        ([1, 3], r"chose pages 1, which are allocated"),
        ([3], r"chose int32 \(1,\) for 2 pages"),
    ],
)
def test_a_wrong_choice_is_named(chosen: list[int], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests would write to one page."""
    allocator = make_allocator(8)
    allocator.alloc(1)
    monkeypatch.setattr(StackAllocator, "allocate_pages", lambda *_: np.array(chosen, np.int32))
    with pytest.raises(RuntimeError, match=f"StackAllocator {sentence}|kv_allocator .* {sentence}"):
        allocator.alloc(2)
    assert allocator.pages_out().size == 1


def test_a_list_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = make_allocator(8)
    monkeypatch.setattr(StackAllocator, "allocate_pages", lambda *_: [3, 4])
    with pytest.raises(RuntimeError, match="chose a list, and no int32 array"):
        allocator.alloc(2)
    assert allocator.pages_out().size == 0


def test_a_wrong_count_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = make_allocator(8)
    monkeypatch.setattr(StackAllocator, "free_pages", lambda *_: None)
    allocator.free(allocator.alloc(3))
    with pytest.raises(RuntimeError, match="counts 4 free pages, and 0 of 7 are allocated"):
        allocator.check_integrity()


def test_integrity_names_the_fault() -> None:
    allocator = make_allocator(8)
    pages = allocator.alloc(4)
    assert pages is not None
    allocator.check_integrity([pages[:2], pages[2:]])
    with pytest.raises(RuntimeError, match="1 pages leaked"):
        allocator.check_integrity([pages[:3]])
    with pytest.raises(RuntimeError, match="held twice"):
        allocator.check_integrity([pages, pages[:1]])
    allocator.free(pages[:1])
    with pytest.raises(RuntimeError, match=f"{pages[0]} are held but free"):
        allocator.check_integrity([pages])
    with pytest.raises(RuntimeError, match="pages 2000000000 are held, but do not exist"):
        allocator.check_integrity([np.array([2_000_000_000], np.int32)])


def test_a_pool_of_one_page_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 2"):
        make_allocator(1)
