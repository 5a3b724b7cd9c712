"""The interface of attention backends, and the capabilities that they declare (kind
`attention_backend`).

A backend computes attention over the paged KV cache. It gets one `ForwardBatch` a step and one
layer's queries at a time. It must not know a request, the scheduler or a model file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from frame.core.interfaces.attention_spec import AttentionSpec, LatentProjections
from frame.core.interfaces.plugin import Reason, list_batch_obstacles

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch, StateLayer
    from frame.core.interfaces.rank_context import RankContext

__all__ = [
    "AttentionBackend",
    "AttentionCapabilities",
    "AttentionKind",
    "AttentionRequirements",
    "AttentionSpec",
    "LatentProjections",
    "Measured",
    "Phase",
]


PROMPT_DIVISOR = 40  # dequantized keys take at most one part of so many of the device's memory

AttentionKind = Literal["mha", "mla"]
Phase = Literal["extend", "decode", "mixed", "verify"]


@dataclass(frozen=True, slots=True)
class AttentionRequirements:
    """What model, device and configuration require of a backend. None: left open, or not used."""

    device: str  # name of the platform: "cpu", "cuda"
    compute_capability: tuple[int, int] | None
    kind: AttentionKind
    head_dim: int  # of queries and keys; for mla: qk_nope_head_dim + qk_rope_head_dim
    v_head_dim: int
    latent: tuple[int, int] | None  # mla only: (kv_lora_rank, qk_rope_head_dim)
    dtype: str  # "float32", "bfloat16", "float16"
    kv_dtype: str  # of the cache: as `dtype`, "fp8_e4m3" or "int8"
    page_size: int | None  # tokens
    sliding_window: bool = False
    chunked: bool = False  # attention in chunks (`AttentionSpec.chunked`)
    soft_cap: bool = False
    sinks: bool = False
    sparse: bool = False  # layers select the keys of each token (`SparseKeys`)
    bidirectional: bool = False  # an encoder: every token attends to the whole row
    tree_mask: bool = False  # drafts are trees (`TreeMask`)
    spans: bool = False  # placeholders of an item attend to each other in both directions (`MediaSpans`)
    graphs: bool = False  # CUDA-graph capture of decode
    phases: tuple[Phase, ...] = ("extend", "decode")  # one of them, where another backend computes the other
    other_head_dims: tuple[int, ...] = ()  # of layers with heads of another size
    group: int | None = None  # query heads per KV head; no backend refuses one, but speeds differ
    device_name: str | None = None  # the driver's name of the card, for speeds that were measured on it
    compatible: tuple[str, ...] = ()  # further platforms whose plugins run on this device too
    deterministic: bool = False  # execution.deterministic: only what is `batch_invariant` fits


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured speed of a backend in one phase on one card, which `auto` compares when several
    backends fit.

    Speeds are comparable if they were measured on the same card with the same shapes.
    """

    device_name: str  # the driver's name of the card
    compute_capability: tuple[int, int]
    kind: AttentionKind
    phase: Phase
    speed: float  # TFLOP/s of extends, TB/s of decodes
    group: int | None = None  # query heads per KV head; None: layers of any other number

    def __str__(self) -> str:
        unit = "TB/s" if self.phase == "decode" else "TFLOP/s"
        group = "" if self.group is None else f" ({self.group} heads per KV head)"
        return f"{self.device_name} {self.kind} {self.phase}{group}: {self.speed:g} {unit}"


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """What a backend can do, as plain data. None: any."""

    devices: tuple[str, ...]
    compute_capability: tuple[tuple[int, int], tuple[int, int]] | None = None  # inclusive range, cuda only
    kinds: tuple[AttentionKind, ...] = ("mha",)
    phases: tuple[Phase, ...] = ("extend", "decode", "mixed")
    head_dims: tuple[int, ...] | None = None
    head_dim_multiple: int = 1  # head sizes are multiples of it
    max_head_dim: int | None = None
    latents: tuple[tuple[int, int], ...] | None = None  # mla: (kv_lora_rank, qk_rope_head_dim)
    page_sizes: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    kv_dtypes: tuple[str, ...] | None = None  # None: only the model's own dtype
    sliding_window: bool = False
    chunked: bool = False
    soft_cap: bool = False
    sinks: bool = False
    sparse: bool = False  # `run_mla` reads `SparseKeys`
    latent_heads: bool = False  # `run_mla` computes heads as wide as the latent; without it, adapters change no `kv_b_proj`
    bidirectional: bool = False
    tree_mask: bool = False  # `run` and `run_mla` read `TreeMask`
    spans: bool = False  # `run` reads `MediaSpans`
    graphs: Literal["none", "decode"] = "none"  # steps that a CUDA graph may capture
    shared_prefixes: bool = False  # decodes read a prefix that rows share once
    device_lengths: bool = False  # lengths are read on the device; those of `HostView` may be bounds
    stores_kv: bool = False  # True: `run` writes K and V itself; False: the layer stores them before `run`
    expanded_bytes: int = 0  # mla: most that the expanded latents of a step's prompts take in a layer
    dequantized_bytes: int = 0  # mha, a quantized cache: most that the keys and values of a step's prompts take in a layer when dequantized
    compiles_at_start: bool = False  # `prepare` may take minutes the first time; another backend may serve meanwhile
    batch_invariant: bool = False  # under `RankContext.deterministic`, the bits of a token's result depend on its query and keys alone
    layout: str = "paged_nhd"  # two backends may share a cache only when their layouts are equal
    measured: tuple[Measured, ...] = ()

    def speeds(self, requirements: AttentionRequirements, phase: Phase) -> dict[str, float]:
        """Measured speed by card, in the phase's unit: cards of the required compute capability, a
        cache of the model's own dtype."""
        if requirements.kv_dtype != requirements.dtype:
            return {}
        fits = [
            m
            for m in self.measured
            if (m.compute_capability, m.kind, m.phase) == (requirements.compute_capability, requirements.kind, phase)
        ]
        speeds = {m.device_name: m.speed for m in fits if m.group is None}
        return speeds | {m.device_name: m.speed for m in fits if m.group is not None and m.group == requirements.group}

    def bound_prompt_bytes(self, kind: AttentionKind, memory: int, *, is_quantized: bool) -> int:
        """Most bytes that a step's prompts take for keys in another form than the cache's, on a
        device with `memory` bytes. is_quantized: the cache is."""
        if kind == "mla":
            return self.expanded_bytes
        return min(self.dequantized_bytes, memory // PROMPT_DIVISOR) if is_quantized else 0

    def unsupported(self, requirements: AttentionRequirements) -> list[Reason]:
        """All reasons why these capabilities do not meet `requirements`; empty: they do."""
        checks = (self._device, self._shape, self._types, self._features)
        return [reason for check in checks for reason in check(requirements)]

    def _device(self, requirements: AttentionRequirements) -> list[Reason]:
        if requirements.device not in self.devices:
            return [Reason(f"runs on {_one_of(self.devices)}, not on {requirements.device}", f"execution.device: {self.devices[0]}")]
        if self.compute_capability and requirements.compute_capability:
            low, high = self.compute_capability
            if not low <= requirements.compute_capability <= high:
                have = ".".join(map(str, requirements.compute_capability))
                return [Reason(f"needs compute capability {_dots(low)} to {_dots(high)}, this card has {have}")]
        return []

    def _shape(self, requirements: AttentionRequirements) -> list[Reason]:
        reasons: list[Reason] = []
        if requirements.kind not in self.kinds:
            return [Reason(f"computes {_one_of(self.kinds)} attention, the model uses {requirements.kind}")]
        if requirements.kind == "mla":
            if self.latents is not None and requirements.latent not in self.latents:
                reasons.append(Reason(f"latent and rope sizes {requirements.latent} are not among {list(self.latents)}"))
        else:
            sizes = {requirements.head_dim, requirements.v_head_dim, *requirements.other_head_dims}
            if self.head_dims is not None and not sizes <= set(self.head_dims):
                other = min(sizes - set(self.head_dims))
                reasons.append(Reason(f"head size {other} is not among {list(self.head_dims)}"))
            if self.max_head_dim is not None and max(sizes) > self.max_head_dim:
                reasons.append(Reason(f"head size {max(sizes)} is above {self.max_head_dim}"))
            if any(size % self.head_dim_multiple for size in sizes):
                other = next(size for size in sorted(sizes) if size % self.head_dim_multiple)
                reasons.append(Reason(f"head size {other} is not a multiple of {self.head_dim_multiple}"))
        if self.page_sizes is not None and requirements.page_size is not None and requirements.page_size not in self.page_sizes:
            nearest = min(self.page_sizes, key=lambda size: (abs(size - (requirements.page_size or 0)), size))
            reasons.append(
                Reason(f"page size {requirements.page_size} is not among {list(self.page_sizes)}", f"cache.page_size: {nearest}")
            )
        return reasons

    def _types(self, requirements: AttentionRequirements) -> list[Reason]:
        reasons: list[Reason] = []
        if requirements.dtype not in self.dtypes:
            reasons.append(Reason(f"computes in {_one_of(self.dtypes)}, not in {requirements.dtype}", f"model.dtype: {self.dtypes[0]}"))
        allowed = (requirements.dtype, *(self.kv_dtypes or ()))
        if requirements.kv_dtype not in allowed:
            reasons.append(Reason(f"cannot read a {requirements.kv_dtype} KV cache", f"cache.kv_dtype: {allowed[0]}"))
        return reasons

    def _features(self, requirements: AttentionRequirements) -> list[Reason]:
        missing = [_PHASE_WORDS[phase] for phase in requirements.phases if phase not in self.phases]
        checks = (
            (bool(missing), f"does not compute {' and '.join(missing)}; name another backend for them as well"),
            (requirements.sliding_window and not self.sliding_window, "has no sliding window"),
            (requirements.chunked and not self.chunked, "has no attention in chunks"),
            (requirements.soft_cap and not self.soft_cap, "has no logit soft cap"),
            (requirements.sinks and not self.sinks, "has no attention sinks"),
            (requirements.sparse and not self.sparse, "does not attend to selected keys (sparse attention)"),
            (requirements.bidirectional and not self.bidirectional, "computes causal attention only, and the model is an encoder"),
            (requirements.tree_mask and not self.tree_mask, "has no mask for trees of drafted tokens"),
            (requirements.spans and not self.spans, "has no mask for images whose tokens attend in both directions"),
            (requirements.graphs and self.graphs == "none", "cannot be captured in a CUDA graph"),
        )
        return [*(Reason(sentence) for missing, sentence in checks if missing), *list_batch_obstacles(self, requirements)]


class AttentionBackend(ABC):
    """Computes causal attention of a mixed batch over the paged cache, and bidirectional attention
    where it says `bidirectional`.

    Contract:
    - `plan` is called once a step on the host, before any `run` of that step; its value arrives as
      `batch.plan`. It may run while the
      previous step is on the device, so it reads `batch.host` and never synchronises.
    - `run` and `run_mla` do device work only. Row r's query tokens are positions `seq_len -
      query_len … seq_len - 1` and attend to all
      cached positions up to their own. This step's K and V are already in the cache, unless the
      capabilities say `stores_kv`.
    - Rows `[0, num_decodes)` have one query token each, the rest are extends. Both kinds may be
      absent. Several decodes may be of one
      slot, at one position each: a prompt's tokens one by one.
    - Where `spec.spans`, a token of `MediaSpans` also attends to later keys, up to its span's end.
    - Tokens of rows that `TreeMask` names attend to those of the nearest tokens before them that it
      says, and to all others before them.
    - A step of decodes alone may be captured in a CUDA graph, if the capabilities say `graphs`. Its
      `run`s see `capture_plan`'s plan: what the first layer computes for all is captured with it.
      `replay_plan` makes the plan describe another batch of as many rows before each replay. The
      batch's tensors are at the same addresses in all replays; its host view and Python numbers are
      the captured ones, with upper bounds of the lengths.
    - A batch may have the extension `AttentionOutput`. A result that `run` or `run_mla` writes to
      `AttentionOutput.get_buffer` is not
      copied.
    - Plans of two steps may exist at once: `run` reads the plan of its batch and no other.
    - `plan` and `run` write to none of their arguments, and to the cache only under `stores_kv`.
    - The result of a row depends on that row alone, up to rounding. Where the capabilities say
      `batch_invariant` and the context `deterministic`, it does so to the bit, and the result of a
      token is the same in a decode and in an extend of any length; masks of trees and spans are not
      used then.
    - One backend object serves all layers of one model on one rank.
    - `prepare` is called once, after construction and before the first `plan`. Where the
      capabilities say `compiles_at_start`, it may run
      in its own thread while another backend serves: it uses no stream and no buffer of the device.
    """

    capabilities: ClassVar[AttentionCapabilities]

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        self.context = context

    def prepare(self, layers: Sequence[AttentionSpec | LatentProjections], on_compile: Callable[[str], None] | None = None) -> None:
        """Import, compile and load the kernels for `layers`; by default nothing. Calls `on_compile`
        with the kernels' names before a compilation that may take minutes. Raises
        ConfigurationError where the compilation fails."""

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> Any:
        """Host work of one step for all layers. -> `batch.plan` of the step's `run`s."""

    def capture_plan(self, batch: ForwardBatch) -> Any:
        """The plan of a batch of decodes for capture, valid for any sequence lengths up to the
        limits. The tensors that kernels read keep their device addresses. Called only if the
        capabilities say `graphs`."""
        raise TypeError(f"{type(self).__name__} cannot be captured in a CUDA graph")

    def replay_plan(self, plan: Any, batch: ForwardBatch) -> None:
        """Update a captured plan to `batch`, by copies on the current stream; never synchronises.
        By default nothing, for kernels that read all they need from the batch."""

    @abstractmethod
    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, …] of this step -> [tokens,
        heads, v_head_dim]."""

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """q_nope [tokens, heads, nope], q_rope [tokens, heads, rope] (rotated), latent [tokens,
        rank + rope] of this step (normed latent, then rotated key) -> [tokens, heads, v_head_dim].
        Only for backends whose kinds include "mla"."""
        raise TypeError(f"{type(self).__name__} does not compute multi-head latent attention")

    def run_states(
        self, layer: StateLayer, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Compute a recurrent layer, which brings its own kernels: `StateLayer.mix`. Not to be
        overridden."""
        return layer.mix(mixed, decay, beta, batch)


_PHASE_WORDS: Mapping[Phase, str] = MappingProxyType(
    {"extend": "prompts", "decode": "decodes", "mixed": "mixed steps", "verify": "drafted tokens"}
)


def _one_of(values: tuple[str, ...]) -> str:
    return " or ".join(values)


def _dots(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
