"""The parameters of one weight, as its format stores them, and their canonical form.

Used by linear layers and experts. The axes of a stored tensor give its shard rule, so merged
pieces, ranks and experts need nothing of a format. Depends on no kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import nn

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import Axis, CanonicalWeight, LayerFormat, StoredTensor
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule, TensorShard

_NAMED = 3  # tensors that an error names
PLAIN = "weight"  # name of an unquantized weight after the layer's name

ROWS_ON_CPU = 256  # that a CPU quantizes at a time, so that intermediate values stay in its caches; a multiple of all blocks


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """The sizes of a weight on this rank: inputs, those of the whole layer, outputs of each merged
    part, and experts (0: one matrix)."""

    inputs: int
    full_inputs: int
    outputs: tuple[int, ...]
    experts: int = 0


class StoredWeight:
    """Registers the parameters of one weight on `module` and makes its canonical form of them.

    `dtype`: of unquantized weights. `name`: empty, or what replaces "weight" at the beginning of
    the parameters' names on the module.
    """

    def __init__(self, module: nn.Module, layout: LayerFormat, sizes: WeightSizes, dtype: torch.dtype, name: str = "") -> None:
        self.module, self.layout, self.sizes = module, layout, sizes
        self.inputs, self.outputs, self.experts = sizes.inputs, list(sizes.outputs), sizes.experts
        self.stored = dict(layout.list_tensors(sizes.inputs, sizes.outputs))
        self.keys = {suffix: _parameter_name(suffix, name) for suffix in self.stored}
        for suffix, stored in self.stored.items():
            module.register_parameter(self.keys[suffix], self._make_parameter(stored))
        self.plain_key: str | None = None  # the parameter of a plain weight that is quantized while loading
        if layout.quantizes:
            self.plain_key = _parameter_name(PLAIN, name)
            lead = (sizes.experts,) if sizes.experts else ()
            first = len(lead)
            rule = ShardRule(first, first + 1, 0 if lead else None)
            shape = (*lead, sum(sizes.outputs), sizes.inputs)
            module.register_parameter(self.plain_key, QuantizingParameter(self, shape, dtype, rule))

    @property
    def version(self) -> int:
        """The number of loads."""
        return sum(parameter.version for parameter in self._parameters())

    @property
    def num_bytes(self) -> int:
        """Of the parameters."""
        return sum(parameter.nbytes for parameter in self._parameters())

    def bind(self, piece: int, name: str, output: Range, input: Range, expert: int | None = None) -> None:  # noqa: A002
        """Bind the tensors of the checkpoint layer `name` to merged piece `piece`, whose ranges are
        `output` and `input`."""
        if self.plain_key is not None:
            self._get(self.plain_key).bind(f"{name}.{PLAIN}", output, input, expert)
            return
        for suffix, stored in self.stored.items():
            index = expert
            if self._is_by_piece(stored):
                index = (expert or 0) * len(self.outputs) + piece
            self._get(self.keys[suffix]).bind(f"{name}.{suffix}", output, input, index)

    def quantize_part(self, piece: TensorShard, value: torch.Tensor) -> None:
        """Quantize a part of a plain weight and write it."""
        *expert, rows, _ = piece.write
        assert isinstance(rows, slice)
        step = ROWS_ON_CPU if value.device.type == "cpu" and self._is_split_by_rows else max(1, len(value))
        for start in range(0, len(value), step):
            some = value[start : start + step]
            place = slice(rows.start + start, rows.start + start + len(some))
            self._write_rows([index for index in expert if isinstance(index, int)], place, some)

    @property
    def _is_split_by_rows(self) -> bool:
        """Whether `ROWS_ON_CPU` rows have entries of their own in every tensor."""
        axes = [[axis for axis in stored.axes if isinstance(axis, Axis) and axis.of == "output"] for stored in self.stored.values()]
        return all(outputs and ROWS_ON_CPU % outputs[0].block == 0 for outputs in axes)

    def _write_rows(self, expert: Sequence[int], rows: slice, value: torch.Tensor) -> None:
        quantized = self.layout.quantize_weight(value, self.outputs)
        for suffix, stored in self.stored.items():
            parameter = self._get(self.keys[suffix])
            parameter.allocate()
            place: list[int | slice] = [*expert]
            for axis in stored.axes:
                if isinstance(axis, Axis) and axis.of == "output":
                    place.append(slice(rows.start // axis.block, -(-rows.stop // axis.block)))
                else:
                    place.append(slice(None))
            parameter.data[tuple(place)].copy_(quantized[suffix])

    def to_canonical(self) -> list[CanonicalWeight]:
        """The canonical forms, which follow one another in the outputs: one, unless the order of
        inputs differs between merged pieces."""
        for key, stored in zip(self.keys.values(), self.stored.values(), strict=True):
            if stored.optional:
                self._get(key).allocate()  # zeros where the checkpoint lacks it
        tensors = {suffix: self._get(key).data for suffix, key in self.keys.items()}
        if any(self._is_by_piece(stored) for stored in self.stored.values()):
            weights = join([self.layout.to_canonical(self._slice_piece(tensors, piece), self.inputs) for piece in range(len(self.outputs))])
        else:
            weights = [self.layout.to_canonical(tensors, self.inputs)]
        for weight in weights:
            self._check_scales(weight)
        return weights

    def _check_scales(self, weight: CanonicalWeight) -> None:
        """Raise CheckpointError for scales that make all results of a layer NaN."""
        if all(_is_finite(tensor) for tensor in (weight.scales, weight.outer, weight.minima) if tensor is not None):
            return
        kept = [self._get(key) for key in self.keys.values()]
        wrong = [parameter for parameter in kept if parameter.is_floating_point() and not _is_finite(parameter.data)] or kept
        names = sorted(source for parameter in wrong for source in parameter.sources)
        more = f" or another of {len(names)} such tensors" if len(names) > _NAMED else ""
        raise CheckpointError(f"{' or '.join(names[:_NAMED])}{more} has scales that are not finite numbers: download the checkpoint again.")

    def release(self, kept: Sequence[torch.Tensor] = ()) -> None:
        """Free the parameters whose memory none of the `kept` tensors shares."""
        places = {tensor.untyped_storage().data_ptr() for tensor in kept if not tensor.is_mkldnn}
        for parameter in self._parameters():
            if parameter.numel() and parameter.untyped_storage().data_ptr() not in places:
                parameter.release()

    def _get(self, key: str) -> ShardedParameter:
        parameter = getattr(self.module, key)
        assert isinstance(parameter, ShardedParameter)
        return parameter

    def _parameters(self) -> list[ShardedParameter]:
        return [self._get(key) for key in (*self.keys.values(), *([self.plain_key] if self.plain_key else []))]

    def _is_by_piece(self, stored: StoredTensor) -> bool:
        return len(self.outputs) > 1 and not any(isinstance(axis, Axis) and axis.of == "output" for axis in stored.axes)

    def _make_parameter(self, stored: StoredTensor) -> ShardedParameter:
        pieces = len(self.outputs) if self._is_by_piece(stored) else 1
        lead = (max(1, self.experts) * pieces,) if self.experts or self._is_by_piece(stored) else ()
        rule, shape = ShardRule(expert=0 if lead else None, scalar=stored.scalar), list(lead)
        for axis in stored.axes:
            if not isinstance(axis, Axis):
                shape.append(axis)
                continue
            if axis.whole:
                shape.append(-(-self.sizes.full_inputs // axis.block) * axis.entries)
                continue
            sizes = self.outputs if axis.of == "output" else [self.inputs]
            step = gcd(axis.block, *sizes) if axis.splits else axis.block
            if axis.of == "output":
                rule = replace(rule, output=len(shape), output_block=axis.block, output_step=step, output_entries=axis.entries)
            else:
                rule = replace(rule, input=len(shape), input_block=axis.block, input_step=step, input_entries=axis.entries)
            shape.append(-(-sum(sizes) // step) * axis.entries)
        data = torch.zeros(shape, dtype=stored.dtype) if stored.optional else torch.empty(shape, dtype=stored.dtype)
        return ShardedParameter(data, rule, stored.optional)

    def _slice_piece(self, tensors: Mapping[str, torch.Tensor], piece: int) -> dict[str, torch.Tensor]:
        """The tensors of one merged piece."""
        pieces, lead = {}, 1 if self.experts else 0
        start, total = sum(self.outputs[:piece]), sum(self.outputs)
        for suffix, stored in self.stored.items():
            tensor = tensors[suffix]
            if self._is_by_piece(stored):
                whole = tensor.unflatten(0, (-1, len(self.outputs)))[:, piece]
                pieces[suffix] = whole if lead else whole[0]
                continue
            dim = lead + next(index for index, axis in enumerate(stored.axes) if isinstance(axis, Axis) and axis.of == "output")
            size = tensor.shape[dim]
            first, last = start * size // total, (start + self.outputs[piece]) * size // total
            pieces[suffix] = tensor.narrow(dim, first, last - first)
        return pieces


class QuantizingParameter(ShardedParameter):
    """A plain weight that is quantized tensor by tensor while loading, so that the unquantized
    weights are never all in memory. It holds no memory of its own."""

    owner: StoredWeight

    def __new__(cls, owner: StoredWeight, shape: Sequence[int], dtype: torch.dtype, rule: ShardRule) -> QuantizingParameter:
        parameter = super().__new__(cls, torch.empty(0, dtype=dtype), rule)
        assert isinstance(parameter, QuantizingParameter)
        parameter.owner, parameter.whole_shape = owner, torch.Size(shape)
        return parameter

    def allocate(self) -> None:
        """Nothing: the values go to the tensors of the format."""

    def write(self, piece: TensorShard, value: torch.Tensor) -> None:
        self.owner.quantize_part(piece, value.to(self.device))


def _is_finite(scales: torch.Tensor) -> bool:
    """Whether all are finite, read without a copy."""
    if scales.is_meta:
        return True
    if scales.dtype == torch.float8_e4m3fn:  # it has NaN, and no infinity
        return not bool((scales.view(torch.uint8) & 0x7F == 0x7F).any())
    return bool(scales.sum(dtype=torch.float32).isfinite())


def join(weights: Sequence[CanonicalWeight]) -> list[CanonicalWeight]:
    """Concatenate the outputs of weights of one scheme and order; others are returned as they
    are."""
    first = weights[0]
    for other in weights[1:]:
        same_order = first.order is None if other.order is None else first.order is not None and torch.equal(first.order, other.order)
        if other.scheme != first.scheme or not same_order or first.tensors.keys() != other.tensors.keys():
            return list(weights)
    lead = first.quantized.dim() - 2
    joined: dict[str, Any] = {name: torch.cat([each.tensors[name] for each in weights], lead) for name in first.tensors if name != "order"}
    return [replace(first, **joined)]


def _parameter_name(suffix: str, name: str) -> str:
    if not name:
        return suffix
    return name + suffix.removeprefix(PLAIN) if suffix.startswith(PLAIN) else f"{name}_{suffix}"
