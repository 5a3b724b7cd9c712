"""The three values of a step: `ScheduledBatch` (host) -> `ForwardBatch` (device, frozen) -> `StepResult` (host).

The scheduler writes the first, the batch builder makes the second of it, the runner returns the third.
Arrays are one row a request; rows `[0, num_decodes)` are decodes (one query token each), the rest extends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from frame.core.interfaces.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.attention import AttentionSpec

T = TypeVar("T")


class SlotSetup(msgspec.Struct, frozen=True, array_like=True):
    """What a request slot starts from when a request enters (or re-enters) the device.

    `token_ids` is the prompt followed by the output so far (int32); `prompt_len` divides them. `seed` is always set:
    the scheduler draws one for requests without. Sampling of the token at position p depends on (seed, p) alone,
    so a request that comes back goes on exactly where it was. `second_text_start` is where a pair's second text begins (0: there is one).
    `rid` names the request where somebody traces it.
    """

    slot: int
    params: SamplingParams
    seed: int
    prompt_len: int
    token_ids: np.ndarray
    second_text_start: int = 0
    rid: str = ""


class ScheduledBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens run in one step, as host arrays; crosses to the other ranks as bytes.

    `num_computed[r]` tokens of row r are in the cache already, `num_scheduled[r]` are computed now.
    `token_ids` are the ids of the extend rows, flattened; a decode row's one id is read from the device's last-token table
    (it may have been sampled by a step that is still in flight). `samples[r]` says whether row r yields a token
    (a prompt's inner chunk does not). `new_pages` are page-table writes, int32 [n, 3] of (slot, index in the row, page).
    `prompt_logprobs[r]` asks for the log-probabilities of row r's own tokens. `cached[r]` says that K and V of the tokens computed now are
    in the cache too, where others may read them: only the logits are wanted, and nothing is stored.
    """

    step: int
    num_decodes: int
    slots: np.ndarray  # int32 [rows]
    num_computed: np.ndarray  # int32 [rows]
    num_scheduled: np.ndarray  # int32 [rows]
    token_ids: np.ndarray  # int32 [sum of num_scheduled over extend rows]
    samples: np.ndarray  # bool [rows]
    new_pages: np.ndarray  # int32 [n, 3]
    setups: list[SlotSetup] = []
    released: list[int] = []  # slots whose request left since the last step
    prompt_logprobs: np.ndarray | None = None  # bool [rows]
    cached: np.ndarray | None = None  # bool [rows]; None: no row's are
    grammar_mask: np.ndarray | None = None  # int32 [sampling rows, ceil(vocab / 32)]; bit set = allowed
    has_deferred_grammar_mask: bool = False  # the mask depends on tokens in flight: it comes by `UnsampledStep.sample`


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step yields, on the host. One entry a sampling row, in row order."""

    step: int
    token_ids: np.ndarray  # int32 [sampling rows]
    logprobs: np.ndarray | None = None  # float32 [sampling rows]; of the sampled token
    top_ids: np.ndarray | None = None  # int32 [sampling rows, k]; k = the largest asked for in the batch
    top_logprobs: np.ndarray | None = None  # float32 [sampling rows, k]
    prompt_logprobs: list[PromptLogprobs | None] | None = None  # one a batch row
    invalid: np.ndarray | None = None  # bool [sampling rows]: the logits were not finite; None when all were
    pooled: np.ndarray | None = None  # float32 [sampling rows, width]; of tasks without tokens, whose `token_ids` are empty


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens `first, first+1, …` (the first token of a prompt has none)."""

    first: int
    logprobs: np.ndarray  # float32 [n]
    top_ids: np.ndarray  # int32 [n, k]
    top_logprobs: np.ndarray  # float32 [n, k]
    ranks: np.ndarray | None = None  # int32 [n]; 1 + how many tokens are likelier; None from a runner that does not count them


class KVCache(Protocol):
    """The token-to-KV pool as layers and backends see it; pages are rows of every tensor."""

    page_size: int

    def store(self, spec: AttentionSpec, slots: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Write this step's tokens to `spec.layer`: slots int64 [tokens]; MHA: (k [tokens, kv_heads, head_dim],
        v [tokens, kv_heads, v_head_dim]); MLA: (latent [tokens, rank + rope],). An fp8 cache divides them by the spec's scales."""
        ...

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Layout "paged_nhd": (k [pages, page_size, kv_heads, head_dim], v [pages, page_size, kv_heads, v_head_dim]).
        Layout "paged_latent": (latent [pages, page_size, rank + rope],)."""
        ...


@dataclass(frozen=True, slots=True)
class HostView:
    """Host copies of what plans need, so that no plan synchronises with the device."""

    slots: np.ndarray  # int32 [rows]
    query_lens: np.ndarray  # int32 [rows]
    seq_lens: np.ndarray  # int32 [rows]; cached tokens after this step
    page_table: np.ndarray  # int32 [slots, max pages]; the whole table, read-only, row = request slot


@dataclass(frozen=True, slots=True)
class TokenTypes:
    """Extension of a batch for encoders: 0 for the tokens of a pair's first text, 1 for those of its second. int64 [tokens]."""

    types: torch.Tensor


@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """Extension of a batch for models that narrow: whose hidden states to return, in this order. int64 [n], where n may be 0."""

    indices: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionOut:
    """Extension of a batch: where `AttentionBackend.run` may leave its result, which saves a copy to there, [tokens, heads, v_head_dim]."""

    tensor: torch.Tensor

    @staticmethod
    def of(batch: ForwardBatch, like: torch.Tensor, heads: int, width: int) -> torch.Tensor:
        """The place for a result of the type of `like` and as many tokens, which is the batch's if that is of this shape, else new."""
        shape = (like.shape[0], heads, width)
        place = batch.extensions.get(AttentionOut)
        if place is not None and place.tensor.shape == shape and place.tensor.dtype == like.dtype:
            found: torch.Tensor = place.tensor
            return found
        return like.new_empty(shape)

    def part(self, tokens: slice) -> AttentionOut:
        """Of these tokens alone."""
        return AttentionOut(self.tensor[tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The only thing that a model, a layer or a backend gets at run time. Device tensors, frozen after the build.

    A feature's further tensors are typed extensions: `batch.get(CascadePlan)`.
    """

    num_decodes: int
    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    kv_slots: torch.Tensor  # int64 [tokens]; page * page_size + offset where this token's K and V go
    request_slots: torch.Tensor  # int64 [rows]; row of the page table
    seq_lens: torch.Tensor  # int32 [rows]; cached tokens after this step
    query_lens: torch.Tensor  # int32 [rows]
    query_starts: torch.Tensor  # int32 [rows + 1]
    page_table: torch.Tensor  # int32 [slots, max pages]
    logits_indices: torch.Tensor  # int64 [n]; tokens whose logits are wanted
    kv: KVCache
    host: HostView
    plan: Any = None  # what the attention backend's `plan` returned
    extensions: dict[type, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.request_slots.shape[0])

    def get(self, kind: type[T]) -> T | None:
        """The extension of this type, or None."""
        return self.extensions.get(kind)

    def store_kv(self, spec: AttentionSpec, *tensors: torch.Tensor) -> None:
        """Write this step's K and V (or latent) of one layer to the cache."""
        self.kv.store(spec, self.kv_slots, *tensors)
