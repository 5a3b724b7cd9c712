"""The interface of KV allocators: which free pages of a pool a request gets (kind `kv_allocator`).

The page allocator calls it in the scheduler's thread, up to a few times a step, and counts the
pages itself. Page indices are int32 arrays. Imports no torch. Must not know tokens, requests or the
prefix cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frame.core.interfaces.plugin import Anything

if TYPE_CHECKING:
    import numpy as np
    from pydantic import BaseModel

    from frame.core.interfaces.cache_groups import GroupKind


@dataclass(frozen=True, slots=True)
class KVAllocatorCapabilities(Anything):
    """What a KV allocator is told. `after`: `allocate_pages` takes the argument of this name."""

    after: bool = False


@dataclass(frozen=True, slots=True)
class KVAllocatorContext:
    """The pool that a KV allocator is built for. A model with several cache groups has a pool, and
    an allocator, for each."""

    num_pages: int  # the reserved page 0 included, so that pages are 1 … num_pages - 1; at least 2
    page_size: int  # tokens; 0: a page holds the state or the block of one sequence
    kind: GroupKind = "tokens"


class KVAllocator(ABC):
    """Chooses the pages of one pool. At construction all pages but the reserved page 0 are free.

    Contract:
    - `allocate_pages` returns free pages only, each once, and never page 0. Which ones depends on
      the calls so far alone.
    - A page is free again after `free_pages`, in whichever order and grouping pages come back.
    - The engine asks for no more pages than `num_free`, and frees allocated pages only, each once.
      It raises an error for others before a plugin sees them.
    - Arrays that are passed in are views that change later, and arrays that are returned belong to
      the caller: copy what is kept.
    - A call takes time for its own pages, amortised over many calls, and not for those of the pool.
    """

    def __init__(self, context: KVAllocatorContext, options: BaseModel | None = None) -> None: ...

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Pages that are free."""

    @abstractmethod
    def allocate_pages(self, num_pages: int, after: np.ndarray | None = None) -> np.ndarray:
        """-> int32 [num_pages]; num_pages: 1 to `num_free`.

        after: int32 [rows], where the pages extend rows of requests: the last page of each row (0:
        the row has none). Each row gets `num_pages // rows` of the pages, in this order. It is a
        hint: no page has to be near. None: the pages start a row, or are those of no row. Given
        only to a plugin whose record has the capability `after`.
        """

    @abstractmethod
    def free_pages(self, pages: np.ndarray) -> None:
        """pages: int32 [n], at least one."""
