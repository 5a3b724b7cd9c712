"""The three values of a step: `ScheduledBatch` (host) -> `ForwardBatch` (device, frozen) ->
`StepResult` (host).

The scheduler makes the first, `InputBatch` turns it into the second, the model runner returns the
third. Arrays have one row per request; rows `[0, num_decodes)` are decodes (one query token each),
the rest are extends. A row with k drafted tokens is an extend of its last token and its draft; it
samples k + 1 tokens, of which the leading ones that agree with the draft and the next one count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from frame.core.interfaces.media import EncodeOrder
from frame.core.interfaces.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.attention_spec import AttentionSpec

T = TypeVar("T")


class SlotSetup(msgspec.Struct, frozen=True, array_like=True):
    """The state of a request slot when a request enters the device, or enters it again.

    The token at position p is sampled from (seed, p) alone, so that a preempted request continues
    with the same tokens.
    """

    slot: int
    params: SamplingParams
    seed: int  # the scheduler draws one for requests without
    prompt_len: int
    token_ids: np.ndarray  # int32; the prompt, then the output so far
    second_text_start: int = 0  # index of the first token of a pair's second text; 0: there is one text
    rid: str = ""  # request id, set for traced requests
    tenant: str = ""  # the owner of the request's cache namespace
    adapter: int = -1  # place of the request's adapter; -1: none
    adapter_start: int = 0  # first position at which the adapter is active
    position_offset: int = 0  # rotary position less the place in the sequence, of tokens after the prompt's last item


class DraftOrder(msgspec.Struct, frozen=True, array_like=True):
    """What a device drafter does after a step."""

    num_tokens: int  # to draft for each sampling row; 0: only the drafter's cache is filled
    limits: np.ndarray  # int32 [rows]; tokens that the pages of the row hold
    next_tokens: np.ndarray  # int32 [rows]; the prompt token after the row's last one; of sampling rows unused


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """Before a step: copy an adapter from host memory to a place on the device."""

    place: int
    digest: str
    pages: list[int]  # of the adapter pool, `PAGE_RANKS` ranks each; in the order of its ranks


class ScheduledBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that one step computes, as host arrays. Other ranks receive it as bytes.

    Row r has `num_computed[r]` tokens in the cache and computes `num_scheduled[r]` more. The id of
    a decode row is read from the device's last-token table, because the step that samples it may
    still be in flight.
    """

    step: int
    num_decodes: int
    slots: np.ndarray  # int32 [rows]
    num_computed: np.ndarray  # int32 [rows]
    num_scheduled: np.ndarray  # int32 [rows]
    token_ids: np.ndarray  # int32 [sum of num_scheduled over extend rows]; the extend rows' tokens, flattened
    samples: np.ndarray  # bool [rows]; whether the row samples a token (False for all but the last chunk of a prompt)
    new_pages: np.ndarray  # int32 [n, 3]; page-table writes: (slot, index in the row, page)
    setups: list[SlotSetup] = []
    released: list[int] = []  # slots whose request left since the last step
    adapter_loads: list[AdapterLoad] = []  # in order, before the step
    encodes: list[EncodeOrder] = []  # before the step
    media_rows: np.ndarray | None = None  # int32 [len(token_ids)]; see `MediaRows`; None: the step has no placeholders
    # int32 [3, len(token_ids)], without meaning in rows with drafts; None: those of text, with each
    # slot's offset
    rotary_positions: np.ndarray | None = None
    media_spans: np.ndarray | None = None  # int32 [len(token_ids)]; see `MediaSpans`; None: no token is in a span
    prompt_logprobs: np.ndarray | None = None  # bool [rows]; whether the row's own tokens need log-probabilities, or return hidden states
    skip_kv_store: np.ndarray | None = None  # bool [rows]; K and V are cached in shared pages: compute logits, store nothing
    # Of each cache group besides `tokens`: writes to its own page table, as `new_pages`. Of a
    # `snapshot` or `write_once` group, entry 0 of a slot is the page of its state or block.
    group_pages: list[np.ndarray] = []
    state_loads: np.ndarray | None = None  # int32 [n, 2]; (from, to): states copied before the step, all at once; 0: the initial state
    state_saves: np.ndarray | None = None  # int32 [n, 2]; (from, to): states copied after the step
    num_drafts: np.ndarray | None = None  # int32 [rows]; drafted tokens at the row's end; the row samples one more; None: all 0
    draft_parents: np.ndarray | None = None  # int32 [sum of num_drafts]; as `Drafts.parents`; None: all drafts are chains
    draft_order: DraftOrder | None = None  # None: there is no device drafter
    # int32 [rows]: the most drafted tokens of the row that the step in flight may accept, which
    # `num_computed` counts as accepted. Then the ids of drafts and the parents of trees are on the
    # device, and the ids in `token_ids` have no meaning. None: all lengths and ids are known.
    num_pending: np.ndarray | None = None
    grammar_mask: np.ndarray | None = None  # int32 [samples, ceil(vocab / 32)]; bit set = allowed
    has_deferred_grammar_mask: bool = False  # the mask depends on tokens in flight; `UnsampledStep.sample` brings it
    # Of an engine with attention groups: the batch of each group, None for one without rows. The
    # arrays of rows above are then those of all groups, one after another.
    groups: list[ScheduledBatch | None] = []


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step on the host.

    The samples of a step are the sampled tokens of its sampling rows, in row order: one of each
    row, or `num_drafts + 1` where it has a draft. Without drafts, samples and sampling rows are the
    same.
    """

    step: int
    token_ids: np.ndarray  # int32 [samples]
    counts: np.ndarray | None = None  # int32 [sampling rows]; leading samples of the row that are output; None: 1 each
    order: np.ndarray | None = None  # int64 [samples]; of trees: the sample that each output is; None: as drawn
    # int32 [sampling rows, k]: tokens that the device drafter proposes after the row's last one; of
    # trees [sampling rows, 2, k]: these tokens, and `Drafts.parents`
    drafts: np.ndarray | None = None
    logprobs: np.ndarray | None = None  # float32 [samples]; of the sampled token
    top_ids: np.ndarray | None = None  # int32 [samples, k]; k = the largest number asked for in the batch
    top_logprobs: np.ndarray | None = None  # float32 [samples, k]
    listed_logprobs: np.ndarray | None = None  # float32 [samples, m]; of `SamplingParams.logprob_token_ids`, in order
    prompt_logprobs: list[PromptLogprobs | None] | None = None  # one per batch row
    hidden_states: list[np.ndarray | None] | None = None  # one per batch row: float32 [tokens of the row, hidden_size]
    invalid: np.ndarray | None = None  # bool [samples]; whether a logit was not finite; None: no row has one
    banned: np.ndarray | None = None  # bool [samples]; of the invalid ones: whether every logit was -inf; None: none is known to be
    faults: dict[int, str] | None = None  # by sample: why a logits processor failed on its request, which ends
    pooled: np.ndarray | None = None  # float32 [sampling rows, width]; of pooling tasks, whose `token_ids` are empty
    alignments: dict[int, np.ndarray] = {}  # float32 [tokens, positions], by request slot; see `AlignedText`
    groups: list[StepResult] = []  # of each attention group, for a batch with groups, whose `token_ids` are empty


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive prompt tokens. The first token of a prompt has none."""

    first: int  # index of the first of these tokens in the prompt
    logprobs: np.ndarray  # float32 [n]
    top_ids: np.ndarray  # int32 [n, k]
    top_logprobs: np.ndarray  # float32 [n, k]
    ranks: np.ndarray | None = None  # int32 [n]; 1 + the number of likelier tokens; None: not counted


class KVCache(Protocol):
    """The KV pool, as layers and backends see it. Every tensor has one row per page of its layer's
    cache group."""

    page_size: int

    def store(self, spec: AttentionSpec, slots: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Write this step's tokens to `spec.layer`: slots int64 [tokens]; MHA: (k [tokens,
        kv_heads, head_dim], v [tokens, kv_heads, v_head_dim]); MLA: (latent [tokens, rank +
        rope],). An fp8 cache divides them by the spec's scales; an int8 cache has a scale for each
        token and head."""
        ...

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Layout "paged_nhd": (k [pages, page_size, kv_heads, head_dim], v [pages, page_size,
        kv_heads, v_head_dim]). Layout "paged_latent": (latent [pages, page_size, rank + rope],). A
        `LayerCache`: its tensors, [pages, page_size, *shape], of kind `snapshot` [pages,
        *shape]."""
        ...

    def scales(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The scales of an int8 cache, float16, for each tensor of `layer` without its last
        dimension: a code times its scale is the number. Empty for other caches."""
        ...


@dataclass(frozen=True, slots=True)
class HostView:
    """Host copies of the arrays that plans read, so that no plan synchronises with the device."""

    slots: np.ndarray  # int32 [rows]
    query_lens: np.ndarray  # int32 [rows]
    seq_lens: np.ndarray  # int32 [rows]; cached tokens after this step; for backends with `device_lengths` upper bounds
    page_table: np.ndarray  # int32 [slots, max pages]; the whole table, row = request slot; stays until the step's `run`s return
    min_lens: np.ndarray | None = None  # int32 [rows]; lower bounds of these tokens; None: `seq_lens` are exact


@dataclass(frozen=True, slots=True)
class TokenTypes:
    """Extension for encoders with pairs of texts."""

    types: torch.Tensor  # int64 [tokens]; 0: first text of the pair, 1: second text


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """Extension for encoder-decoder models: what the encoder gets in this step. The model writes
    the keys and values of each encoder position to the layers of kind `write_once`."""

    features: torch.Tensor  # float32 [n, *ModelConfig.encoder_input]
    kv_slots: torch.Tensor  # int64 [n, positions]; where the positions are stored
    aligned: tuple[AlignedText | None, ...] = ()  # one a sequence, or none at all
    # float32 [tokens, positions], by request slot; the model adds those of the aligned texts
    alignments: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlignedText:
    """A text that a speech model aligns with the audio in the step that encodes it."""

    slot: int  # of the request
    token_ids: torch.Tensor  # int64 [n]; the prompt, then the text
    prompt_len: int
    positions: int  # of the encoder, from the first on, that have sound


@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """Extension for models with `supports_token_selection`: the tokens whose hidden states
    `forward` returns, in this order."""

    indices: torch.Tensor  # int64 [n]; n may be 0


@dataclass(frozen=True, slots=True)
class StageInput:
    """Extension on all stages of a pipeline but the first: what the stage before computed."""

    hidden: torch.Tensor  # [tokens, hidden_size]; the residual stream after its last layer


class StateLayer(Protocol):
    """A layer that reads and writes the states of the batch's rows."""

    num_heads: int
    v_head_dim: int

    def mix(self, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Inputs of this step's tokens, [tokens, …] -> [tokens, heads, v_head_dim]."""
        ...

    def replay(self, inputs: tuple[torch.Tensor, ...], kv: KVCache, pages: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write the states of `pages`, int64 [rows], after the first tokens of their rows. inputs:
        those of `mix`, of these rows. rows: (`query_starts` int32 [rows + 1]; tokens that count,
        int32 [rows], at least 1)."""
        ...


@dataclass(frozen=True, slots=True)
class DraftedStates:
    """Rows of a step whose last tokens are drafts. Their states are written after the verification:
    a layer adds its inputs, by which it replays the accepted tokens (`StateLayer.replay`)."""

    targets: torch.Tensor  # int64 [rows]; where rows write their states: those with drafts to a spare page
    tokens: torch.Tensor  # int64 [n]; the tokens of rows with drafts
    inputs: dict[int, tuple[StateLayer, tuple[torch.Tensor, ...]]] = field(default_factory=dict)  # by layer: of these tokens


@dataclass(frozen=True, slots=True)
class SequenceStates:
    """Extension for models with layers of kind `snapshot`: where their rows' states are.

    A layer reads the state of row r from page `pages[r]` of its tensors (`batch.kv.layer`) before
    the row's first token, and writes it there after the row's last token. The state of a new
    sequence is zero. Rows of padding have a page of their own.
    """

    pages: torch.Tensor  # int64 [rows]
    drafted: DraftedStates | None = None  # None: no row has drafts


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Extension of steps with trees of drafted tokens: which of the 30 tokens before it a token of
    such a row attends to, beside all earlier ones. Backends that say `tree_mask` read it.

    The tokens of a row are stored at consecutive places, as those of other rows. `batch.positions`
    differ: tokens of one depth have the same position.
    """

    rows: np.ndarray  # int64 [n]; ascending
    bits: torch.Tensor  # int32 [tokens]; bit d: the token attends to the one d places before it; -1 for tokens of other rows


@dataclass(frozen=True, slots=True)
class SparseKeys:
    """Extension of layers with sparse attention: the keys that each token attends to. Backends that
    say `sparse` read it in `run_mla`."""

    slots: torch.Tensor  # int64 [tokens, n]; KV slots; -1: no key, which is never the first


@dataclass(frozen=True, slots=True)
class HiddenStateOutputs:
    """Extension for models with a residual stream: hidden states that a drafter reads.

    Tap i is the residual stream [tokens, hidden_size] that layer i gets; tap 0 is the embedding,
    and tap `num_layers` what `forward` returns. The model adds each of `layers` to `states`.
    """

    layers: frozenset[int]
    states: dict[int, torch.Tensor] = field(default_factory=dict)

    def add_state(self, layer: int, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Add the stream `x`, or `x + residual`, if the layer is tapped."""
        if layer in self.layers:
            self.states[layer] = x if residual is None else x + residual


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """Extension: a buffer for the result of `AttentionBackend.run`, which saves a copy."""

    tensor: torch.Tensor  # [tokens, heads, v_head_dim]

    @staticmethod
    def get_buffer(batch: ForwardBatch, like: torch.Tensor, heads: int, width: int) -> torch.Tensor:
        """A tensor [tokens of `like`, heads, width] of its dtype: the batch's buffer where it fits,
        else a new tensor."""
        shape = (like.shape[0], heads, width)
        output = batch.extensions.get(AttentionOutput)
        if output is not None and output.tensor.shape == shape and output.tensor.dtype == like.dtype:
            buffer: torch.Tensor = output.tensor
            return buffer
        return like.new_empty(shape)

    def slice_tokens(self, tokens: slice) -> AttentionOutput:
        """The buffer of these tokens."""
        return AttentionOutput(self.tensor[tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """All that a model, a layer or a backend gets at run time: device tensors, frozen after
    construction.

    The tensors of a feature are typed extensions: `batch.get(SelectedTokens)`.
    """

    num_decodes: int
    token_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    kv_slots: torch.Tensor  # int64 [tokens]; page * page_size + offset of the token's K and V
    request_slots: torch.Tensor  # int64 [rows]; rows of the page table
    seq_lens: torch.Tensor  # int32 [rows]; cached tokens after this step
    query_lens: torch.Tensor  # int32 [rows]
    query_starts: torch.Tensor  # int32 [rows + 1]
    page_table: torch.Tensor  # int32 [slots, max pages]
    logits_indices: torch.Tensor  # int64 [n]; tokens that need logits
    kv: KVCache
    host: HostView
    plan: Any = None  # the value of the attention backend's `plan`
    extensions: dict[type, Any] = field(default_factory=dict)
    group: int = 0  # the cache group whose page table this is
    views: Mapping[int, ForwardBatch] | None = None  # by layer, of cache groups with a page table of their own

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.request_slots.shape[0])

    def view(self, layer: int) -> ForwardBatch:
        """The batch as attention in this layer needs it: with the page table, the KV slots and the
        plan of the layer's cache group."""
        return self if self.views is None else self.views.get(layer, self)

    def get(self, kind: type[T]) -> T | None:
        """The extension of this type, or None."""
        return self.extensions.get(kind)

    def store_kv(self, spec: AttentionSpec, *tensors: torch.Tensor) -> None:
        """Write this step's K and V (or latent) of one layer to the cache."""
        self.kv.store(spec, self.kv_slots, *tensors)
