"""The extend rows of a step: tile sizes and launches, kept from one step to the next. Knows no request.

The host launches these one by one, so what layers that are alike have in common is found once: their kind for good, and what a step's
rows add to it once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from frame.attention_backends.triton.extend import extend_kernel
from frame.attention_backends.triton.launch import Operands, other, scales
from frame.attention_backends.triton.tiles import Device, Tile, choose_extend
from frame.core.interfaces.attention import AttentionSpec
from frame.kernels import INTERPRETED
from frame.kernels.launch import Prepared

if TYPE_CHECKING:
    from frame.attention_backends.triton.plan import StepPlan
    from frame.core.interfaces.batch import ForwardBatch


@dataclass(frozen=True, slots=True, eq=False)
class ExtendKind:
    """Layers that are alike, and where their keys lie."""

    constants: dict[str, Any]  # but for those of a tile
    group: int  # query heads that share keys
    kv_heads: int
    loaded: tuple[int, int, int]
    itemsize: int
    gathers: bool  # some keys are read from the cache
    describable: bool
    launches: dict[tuple[Tile, bool], Prepared] = field(default_factory=dict)  # by tile, and whether keys are described


@dataclass(slots=True)
class ExtendStep:
    """What the layers of a kind share in one step."""

    tile: Tile
    launch: Prepared | None
    grid: tuple[int, int, int]
    boxes: tuple[TensorDescriptor | None, ...] | None  # for own keys and values; each layer puts its own tensors under them
    tensors: tuple[torch.Tensor, ...]  # those that follow the sinks
    numbers: tuple[int, ...]  # those before the scales


class Extends:
    """Launches the extend kernel."""

    def __init__(self, device: torch.device, model_config: Device) -> None:
        self._facts, self._device = model_config, device
        # from compute capability 9.0 on, boxes of consecutive rows are copied by a unit of their own
        self._describes = INTERPRETED or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))
        self._kinds: dict[tuple[Any, ...], ExtendKind] = {}
        self._layers: dict[tuple[Any, ...], tuple[AttentionSpec, ExtendKind, tuple[float, float]]] = {}  # by layer and strides

    def run(
        self,
        spec: AttentionSpec,
        cached: Operands | None,
        own: Operands | None,
        out: torch.Tensor,
        batch: ForwardBatch,
        plan: StepPlan,
        key_starts: torch.Tensor | None = None,
    ) -> None:
        """All extend rows. Queries, `out` and `own`, this step's keys and values, are indexed by the step's tokens; without `own`
        those are read from the cache as well. With `key_starts`, `own` has all keys of a row, from there on."""
        if own is not None and not plan.has_prefixes:
            cached = None
        some, beside = cached or own, own or cached
        assert some is not None
        assert beside is not None
        key = (spec.layer, cached is None, beside.layout)  # the cache's strides are always the same
        found = self._layers.get(key)
        if found is None or found[0] is not spec:
            found = spec, self._kind(spec, cached, own, out), scales(spec, some)
            self._layers[key] = found
        kind = found[1]
        described = own is not None and kind.describable and own.is_aligned
        step: ExtendStep | None = plan.extends.get((kind, described))
        if step is None:
            step = self._step(kind, own if described else None, batch, plan, key_starts)
            plan.extends[kind, described] = step
        if step.boxes is None:
            keys: tuple[Any, ...] = beside.pointers()[2:]
        else:
            keys = tuple([_under(box, part, beside.k1) for box, part in zip(step.boxes, beside[2:5], strict=True)])
        tensors = (*some.pointers(), *keys, out, other(spec.sinks, out), *step.tensors)
        numbers = (*step.numbers, *found[2])
        if step.launch is None:
            step.launch = self._prepare(kind, step.tile, described, (*tensors, *numbers))
        step.launch(step.grid, tensors, numbers)

    def _kind(self, spec: AttentionSpec, cached: Operands | None, own: Operands | None, out: torch.Tensor) -> ExtendKind:
        """Of a layer that was not met before: that of the layers like it."""
        some, beside = cached or own, own or cached
        assert some is not None
        assert beside is not None
        names = [f"{part}_{what}" for part in ("OWN1", "OWN2", "OWN_V") for what in ("STRIDE", "HEAD")]
        constants = {
            **some.constants(spec, out),
            **dict(zip(names, beside.strides()[4:], strict=True)),
            "WINDOW": spec.sliding_window or 0,
            "PAGED": cached is not None,
            "BESIDE": own is not None,
            "WHOLE": own is not None and own.are_whole,
        }
        kind = ExtendKind(
            constants,
            group=some.group,
            kv_heads=some.k1.shape[1],
            loaded=some.loaded,
            itemsize=some.q1.element_size(),
            gathers=cached is not None,
            describable=own is not None and self._describes and own.describable,
        )
        types = some.q1.dtype, some.k1.dtype, beside.k1.dtype
        return self._kinds.setdefault((*types, kind.kv_heads, *constants.values()), kind)

    def _step(
        self, kind: ExtendKind, described: Operands | None, batch: ForwardBatch, plan: StepPlan, key_starts: torch.Tensor | None
    ) -> ExtendStep:
        tile = choose_extend(kind.group, plan.longest_query, kind.loaded, kind.itemsize, self._facts.shared_memory, gathers=kind.gathers)
        heads = min(kind.group, tile.queries)
        tiles = plan.tiles(tile.queries // heads)
        return ExtendStep(
            tile,
            kind.launches.get((tile, described is not None)),
            (kind.kv_heads * -(-kind.group // heads), tiles.shape[1], 1),
            None if described is None else described.descriptors(tile.keys),
            (tiles, batch.query_starts, batch.seq_lens, batch.request_slots, batch.page_table, other(key_starts, batch.seq_lens)),
            (tiles.shape[1], plan.num_decodes, batch.page_table.stride(0)),
        )

    def _prepare(self, kind: ExtendKind, tile: Tile, described: bool, example: tuple[Any, ...]) -> Prepared:
        constants = kind.constants | tile.constants(kind.group) | {"DESCRIBED": described}
        launch = Prepared(extend_kernel, example, constants, self._device, tile.warps)
        kind.launches[tile, described] = launch
        return launch


def _under(box: TensorDescriptor | None, part: torch.Tensor | None, instead: torch.Tensor) -> TensorDescriptor | torch.Tensor:
    """The box over another tensor of the same shape and strides; where there is no such part, a pointer that no kernel uses."""
    if box is None:
        return instead
    box.base = part
    return box
