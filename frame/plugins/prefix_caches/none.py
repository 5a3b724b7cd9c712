"""`none`: a prefix cache that stores nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel

from frame.core.interfaces.cache import Inserted, Match, PrefixCache, PrefixCacheContext, SupportsRelock

_NONE = np.empty(0, np.int32)


class NoCache(PrefixCache, SupportsRelock):
    """Matches nothing; every inserted page is reported as a duplicate, which the caller frees."""

    reuses: ClassVar[bool] = False

    def __init__(self, context: PrefixCacheContext, options: BaseModel | None = None) -> None:
        self._page_size = context.page_size

    def match(self, tokens: np.ndarray, namespace: str = "") -> Match:
        return Match(0, _NONE, None)

    def lock(self, handle: Any) -> None: ...

    def unlock(self, handle: Any) -> None: ...

    def insert(
        self, tokens: np.ndarray, pages: np.ndarray, namespace: str = "", priority: int = 0, groups: Sequence[np.ndarray] = ()
    ) -> Inserted:
        offered = np.concatenate([_NONE, *(group_pages[:, 1] if group_pages.ndim == 2 else group_pages for group_pages in groups)])
        return Inserted(len(tokens) // self._page_size * self._page_size, None, offered[offered > 0].tolist())

    def evict(self, num_pages: int) -> np.ndarray:
        return _NONE

    def audit(self) -> Iterator[np.ndarray]:
        return iter(())

    def relock(self, handles: Iterable[Any]) -> None: ...

    @property
    def num_evictable(self) -> int:
        return 0

    @property
    def num_locked(self) -> int:
        return 0
