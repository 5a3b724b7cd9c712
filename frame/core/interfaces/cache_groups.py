"""Cache groups: what each layer of a model stores, and the page pools that follow from it.

A model file declares a layer's cache by `LayerCache`; attention layers are declared by their
`AttentionSpec`. Layers with the same lifetime of pages form a group, and each group has its own
page size. Used by models, the KV pool, the prefix cache and the scheduler. Must not know a request
or a device; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

GroupKind = Literal["tokens", "window", "snapshot", "sidecar", "write_once"]
"""How long a group keeps what its layers store.

- `tokens`: every token of the sequence, in pages. The first group of a model, even without layers.
- `window`: the tokens that later ones can still attend to; pages before them are freed.
- `snapshot`: one recurrent state a sequence, overwritten by each step; a page is one state.
- `sidecar`: further tensors of every token, in the pages of the `tokens` group (indexer keys).
- `write_once`: one block a sequence, written when the sequence starts and only read afterwards
  (keys and values of an encoder's output). The prefix cache does not hold it.
"""

RESERVED_PAGES = 1  # of each pool
CHECKPOINT_TOKENS = 64  # a decoding sequence saves its state about every so many tokens


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a layer's cache on this rank."""

    shape: tuple[int, ...]  # of one token; of `snapshot`: of one sequence; of `write_once`: of one position
    dtype: torch.dtype | None = None  # None: the dtype of the KV cache


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer stores on this rank. A module declares it as its attribute `cache`; the
    attribute `spec` of an attention layer declares keys and values, with the window of
    `AttentionSpec.sliding_window`.

    A layer that reads the keys of another layer has that layer's index, and is declared once.
    """

    layer: int  # index into the KV cache, unique in the model
    kind: GroupKind
    tensors: tuple[CacheTensor, ...]
    window: int | None = None  # of kind `window`: tokens, the query's own position included
    length: int = 0  # of kind `write_once`: positions of a block


@dataclass(frozen=True, slots=True)
class PagePool:
    """The pages of one group, as the scheduler and the prefix cache see them. Page 0 of each pool
    is reserved."""

    kind: GroupKind
    num_pages: int  # the reserved page 0 included
    page_size: int  # tokens; of `snapshot` and `write_once` 0: a page holds the state or the block of one sequence
    window: int | None = None  # tokens

    @property
    def name(self) -> str:
        """Its kind, with the window's size: for metrics and display."""
        return self.kind if self.window is None else f"{self.kind}_{self.window}"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The KV cache of a runner."""

    num_pages: int  # the reserved page 0 included
    page_size: int  # tokens
    bytes_per_token: int  # of the `tokens` group, over all layers
    phases: dict[str, float] = field(default_factory=dict)  # seconds of the phases of the start
    further: tuple[PagePool, ...] = ()  # the pools of the other cache groups

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """The pools of all cache groups, that of the tokens first."""
        return (PagePool("tokens", self.num_pages, self.page_size), *self.further)

    @property
    def max_total_tokens(self) -> int:
        """Tokens that the cache holds."""
        return (self.num_pages - RESERVED_PAGES) * self.page_size
