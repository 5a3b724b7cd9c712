"""Launches the extend kernel: tile sizes and compiled variants, kept from step to step. Depends on
no request.

The host launches one kernel per layer, so work that layers of equal shape share is done once: their
variant for the whole run, and the step's part of it once per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from frame import kernels
from frame.attention_backends.triton.extend_kernel import extend_kernel
from frame.attention_backends.triton.online_softmax import CAUSAL, SPAN, TREE
from frame.attention_backends.triton.operands import Operands, compute_scales, get_window, or_unused
from frame.attention_backends.triton.tile_sizes import DeviceLimits, Tile, choose_extend
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import TreeMask
from frame.core.interfaces.media import MediaSpans
from frame.kernels import INTERPRETED, nvidia
from frame.kernels.launch import PreparedLaunch

if TYPE_CHECKING:
    from frame.attention_backends.triton.plan import StepPlan
    from frame.core.interfaces.batch import ForwardBatch


# query-key pairs of all heads, from which on `expanded_extend` is used where it can: its launch
# takes the host longer
_PAIRS = 1 << 27
_MAX_TILE = 128  # queries of a tile at most
_KEYS = 5  # where this step's keys and values stand among the kernel's arguments


@dataclass(frozen=True, slots=True, eq=False)
class ExtendVariant:
    """A compiled variant: layers of equal shape and key layout."""

    constants: dict[str, Any]  # constants except those of the tile
    group: int  # query heads per key head
    kv_heads: int
    loaded_widths: tuple[int, int, int]
    itemsize: int
    gathers: bool  # some keys are read from the paged cache
    can_use_tma: bool
    # by tile, and whether keys are loaded by TMA
    launches: dict[tuple[Tile, bool], PreparedLaunch] = field(default_factory=dict)


@dataclass(slots=True)
class ExtendStep:
    """What the layers of a variant share in one step."""

    tile: Tile
    launch: PreparedLaunch | None
    grid: tuple[int, int, int]
    # for ragged keys and values; each layer sets its own tensors
    descriptors: tuple[TensorDescriptor | None, ...] | None
    tensors: tuple[torch.Tensor, ...]  # kernel arguments after the sinks
    numbers: tuple[int, ...]  # kernel arguments before the scales


class ExtendLauncher:
    """Launches the extend kernel."""

    def __init__(self, device: torch.device, device_limits: DeviceLimits) -> None:
        self._limits, self._device = device_limits, device
        # the TMA unit of compute capability 9.0 and later loads boxes of consecutive rows
        self._has_tma = INTERPRETED or (device.type == "cuda" and nvidia.get_compute_capability(device) >= (9, 0))
        self._has_gluon = not INTERPRETED and kernels.supports_tma_streaming(device)
        self._variants: dict[tuple[Any, ...], ExtendVariant] = {}
        # by layer and strides
        self._layers: dict[tuple[Any, ...], tuple[AttentionSpec, ExtendVariant, tuple[float, float]]] = {}

    def run(
        self,
        spec: AttentionSpec,
        cached: Operands | None,
        ragged: Operands | None,
        out: torch.Tensor,
        batch: ForwardBatch,
        plan: StepPlan,
        key_starts: torch.Tensor | None = None,
    ) -> None:
        """All extend rows.

        Queries, `out` and `ragged` (this step's keys and values) are indexed by the step's tokens.
        Without `ragged`, all keys are read from the cache. With `key_starts`, `ragged` has all keys
        of each row, from that start on.
        """
        if ragged is not None and not plan.has_prefixes:
            cached = None
        if ragged is not None and key_starts is not None and self._takes_expanded(spec, ragged, batch, plan):
            rows = batch.query_starts, batch.seq_lens, key_starts
            _expanded().attend_prompts(ragged, out, plan.get_tiles(_expanded().QUERIES), rows, plan.num_decodes, spec.scale)
            return
        cached_or_ragged, ragged_or_cached = cached or ragged, ragged or cached
        assert cached_or_ragged is not None
        assert ragged_or_cached is not None
        mask, bits = _get_mask(spec, batch)
        key = (spec.layer, cached is None, mask, ragged_or_cached.layout)  # the cache's strides never change
        known = self._layers.get(key)
        if known is None or known[0] is not spec:
            known = spec, self._find_variant(spec, cached, ragged, out, mask), compute_scales(spec, cached_or_ragged)
            self._layers[key] = known
        variant = known[1]
        use_tma = ragged is not None and variant.can_use_tma and ragged.is_aligned
        step: ExtendStep | None = plan.launch_state.get((variant, use_tma))
        if step is None:
            step = self._make_step(variant, ragged if use_tma else None, batch, plan, key_starts)
            plan.launch_state[variant, use_tma] = step
        if step.descriptors is None:
            keys: tuple[Any, ...] = ragged_or_cached.get_tensors()[2:]
        else:
            keys = tuple(
                [_retarget(box, piece, ragged_or_cached.k1) for box, piece in zip(step.descriptors, ragged_or_cached[2:5], strict=True)]
            )
        tensors = (*cached_or_ragged.get_tensors(), *keys, out, or_unused(spec.sinks, out), *step.tensors, *cached_or_ragged.get_scales())
        tensors = (*tensors, bits)
        numbers = (*step.numbers, *known[2])
        if step.launch is None:
            self._prepare(variant, ragged if use_tma else None, (*tensors, *numbers))
            if spec.spans and mask == CAUSAL.value:  # the first image must not wait for a compiler either
                self._prepare(self._find_variant(spec, cached, ragged, out, SPAN.value), ragged if use_tma else None, (*tensors, *numbers))
            step.launch = variant.launches[step.tile, use_tma]
        step.launch(step.grid, tensors, numbers)

    def _takes_expanded(self, spec: AttentionSpec, ragged: Operands, batch: ForwardBatch, plan: StepPlan) -> bool:
        """Whether `expanded_extend` computes this step's extends of a layer."""
        return (
            plan.num_pairs * spec.num_heads >= _PAIRS and _get_mask(spec, batch)[0] == CAUSAL.value and self._can_run_expanded(spec, ragged)
        )

    def _can_run_expanded(self, spec: AttentionSpec, ragged: Operands) -> bool:
        return self._has_gluon and ragged.can_use_tma and ragged.is_aligned and _expanded().can_run(spec, ragged)

    def _find_variant(
        self, spec: AttentionSpec, cached: Operands | None, ragged: Operands | None, out: torch.Tensor, mask: int
    ) -> ExtendVariant:
        """The variant of a layer that was not seen before."""
        if ragged is not None and self._can_run_expanded(spec, ragged):
            _expanded().prepare(out.dtype, self._device)  # at start-up, so that no long prompt waits for it
        cached_or_ragged, ragged_or_cached = cached or ragged, ragged or cached
        assert cached_or_ragged is not None
        assert ragged_or_cached is not None
        names = [f"{piece}_{what}" for piece in ("RAGGED1", "RAGGED2", "RAGGED_V") for what in ("STRIDE", "HEAD")]
        constants = {
            **cached_or_ragged.make_constants(spec, out),
            **dict(zip(names, ragged_or_cached.get_strides()[4:], strict=True)),
            "WINDOW": get_window(spec),
            "PAGED": cached is not None,
            "HAS_RAGGED": ragged is not None,
            "RAGGED_HAS_ALL": ragged is not None and ragged.has_all_keys,
            "MASK": mask,
        }
        variant = ExtendVariant(
            constants,
            group=cached_or_ragged.group,
            kv_heads=cached_or_ragged.k1.shape[1],
            loaded_widths=cached_or_ragged.loaded_widths,
            itemsize=cached_or_ragged.q1.element_size(),
            gathers=cached is not None,
            can_use_tma=ragged is not None and self._has_tma and ragged.can_use_tma,
        )
        types = cached_or_ragged.q1.dtype, cached_or_ragged.k1.dtype, ragged_or_cached.k1.dtype
        return self._variants.setdefault((*types, variant.kv_heads, *constants.values()), variant)

    def _make_step(
        self, variant: ExtendVariant, use_tma: Operands | None, batch: ForwardBatch, plan: StepPlan, key_starts: torch.Tensor | None
    ) -> ExtendStep:
        tile = self._choose_tile(variant, plan.max_query_len)
        heads = min(variant.group, tile.queries)
        tiles = plan.get_tiles(tile.queries // heads)
        return ExtendStep(
            tile,
            variant.launches.get((tile, use_tma is not None)),
            (variant.kv_heads * -(-variant.group // heads), tiles.shape[1], 1),
            None if use_tma is None else use_tma.make_descriptors(tile.keys),
            (tiles, batch.query_starts, batch.seq_lens, batch.request_slots, batch.page_table, or_unused(key_starts, batch.seq_lens)),
            (tiles.shape[1], plan.num_decodes, batch.page_table.stride(0)),
        )

    def _choose_tile(self, variant: ExtendVariant, max_length: int) -> Tile:
        """The tile for rows of at most `max_length` queries."""
        return choose_extend(
            variant.group, max_length, variant.loaded_widths, variant.itemsize, self._limits.shared_memory, gathers=variant.gathers
        )

    def _prepare(self, variant: ExtendVariant, ragged: Operands | None, example: tuple[Any, ...]) -> None:
        """Compile a variant for rows of every length, at its first launch in the warm-up: a later
        step with shorter or longer rows must not wait for a compiler.

        ragged: keys and values that are loaded by TMA, whose descriptors depend on the tile.
        example: arguments for some tile.
        """
        for tile in dict.fromkeys(self._choose_tile(variant, length) for length in range(1, _MAX_TILE + 1)):
            arguments = example
            if ragged is not None:
                boxes = [ragged.k1 if box is None else box for box in ragged.make_descriptors(tile.keys)]
                arguments = *example[:_KEYS], *boxes, *example[_KEYS + len(boxes) :]
            constants = variant.constants | tile.make_constants(variant.group) | {"USE_TMA": ragged is not None}
            launch = PreparedLaunch(extend_kernel, arguments, constants, self._device, tile.warps)
            variant.launches[tile, ragged is not None] = launch


def _get_mask(spec: AttentionSpec, batch: ForwardBatch) -> tuple[int, torch.Tensor]:
    """What hides keys of the step's queries besides their positions, and the numbers that say it,
    int32 [tokens]; an unused tensor for CAUSAL."""
    trees, spans = batch.get(TreeMask), batch.get(MediaSpans)
    if trees is not None and spans is not None:
        raise ValueError("a step has trees of drafted tokens, and images whose tokens attend in both directions; use a drafter of chains")
    if trees is not None:
        return TREE.value, trees.bits
    return (CAUSAL.value, batch.seq_lens) if spans is None or not spec.spans else (SPAN.value, spans.ends)


@cache
def _expanded() -> ModuleType:
    from frame.attention_backends.triton.hopper import expanded_extend

    return expanded_extend


def _retarget(box: TensorDescriptor | None, piece: torch.Tensor | None, instead: torch.Tensor) -> TensorDescriptor | torch.Tensor:
    """The descriptor with another tensor of the same shape and strides; without a descriptor, a
    pointer that the kernel does not use."""
    if box is None:
        return instead
    box.base = piece
    return box
