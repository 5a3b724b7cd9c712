"""Parameters that know their checkpoint tensors, and which part of each belongs to this rank.

A weight format describes the dimensions of a parameter (`ShardRule`); the layer has the whole sizes
and its own range, and binds checkpoint names to shards. Depends on no file format and no
collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from frame.core.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # types whose values need a scale


@dataclass(frozen=True, slots=True)
class ShardRule:
    """The dimensions of a parameter: indices of the output, input and expert dimension; None if
    there is none.

    `output_block`, `input_block`: outputs (inputs) that share `output_entries` (`input_entries`)
    entries of the checkpoint's tensor, as in block scales and packed integers. `output_step`,
    `input_step`: outputs (inputs) per entry of the parameter, a divisor of the block (0: the
    block), so that parts that end inside a block can be concatenated. `scalar`: the checkpoint has
    one number, which fills the whole range.
    """

    output: int | None = None
    input: int | None = None
    expert: int | None = None
    output_block: int = 1
    input_block: int = 1
    output_step: int = 0
    input_step: int = 0
    output_entries: int = 1
    input_entries: int = 1
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    """`size` entries of a dimension of `full` entries, from `start`. On this rank they are at
    `local`."""

    full: int
    start: int
    size: int
    local: int = 0

    @classmethod
    def whole(cls, size: int, local: int = 0) -> Range:
        return cls(size, 0, size, local)

    @classmethod
    def split(cls, full: int, rank: int, ranks: int, local: int = 0) -> Range:
        """The rank's part of a dimension that `ranks` divides."""
        size = full // ranks
        return cls(full, rank * size, size, local)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The shard of one checkpoint tensor in a parameter: its whole shape, the slices to read, and
    where to write them.

    `spread`: (dimension, times, first, size) for each dimension whose entries are repeated before
    they are cut and written.
    """

    shape: tuple[int, ...]
    read: tuple[slice, ...]
    write: tuple[slice | int, ...]
    spread: tuple[tuple[int, int, int, int], ...] = ()

    def repeat_entries(self, value: torch.Tensor) -> torch.Tensor:
        for dim, times, first, size in self.spread:
            value = value.repeat_interleave(times, dim).narrow(dim, first, size)
        return value


class ShardedParameter(nn.Parameter):
    """A parameter with a shard rule. `sources` maps checkpoint names to shards; `loaded` holds the
    names that are loaded."""

    rule: ShardRule
    whole_shape: torch.Size
    stored_dtype: torch.dtype  # as loaded; `data` may be replaced by values of another dtype
    sources: dict[str, TensorShard]
    loaded: set[str]
    version: int  # number of loads, for values derived from the parameter
    optional: bool  # the checkpoint may lack it

    def __new__(cls, data: torch.Tensor, rule: ShardRule | None = None, optional: bool = False) -> ShardedParameter:
        parameter = super().__new__(cls, data, requires_grad=False)
        parameter.rule = rule or ShardRule()
        parameter.whole_shape = data.shape
        parameter.stored_dtype = data.dtype
        parameter.sources = {}
        parameter.loaded = set()
        parameter.version = 0
        parameter.optional = optional
        return parameter

    def bind(self, name: str, output: Range | None = None, input: Range | None = None, expert: int | None = None) -> None:  # noqa: A002
        """Bind the checkpoint tensor `name` to the given ranges of the layer's outputs and inputs
        (None: not split).

        Raises ConfigurationError if the rank's part starts inside a quantization block.
        """
        rule = self.rule
        shape: list[int] = []
        read: list[slice] = []
        write: list[slice | int] = []
        spread: list[tuple[int, int, int, int]] = []
        for dim, size in enumerate(self.whole_shape):
            if dim == rule.expert and expert is not None:
                write.append(expert)
                continue
            span, block, step, entries = Range.whole(size), 1, 1, 1
            if dim == rule.output and output is not None:
                span, block, step, entries = output, rule.output_block, rule.output_step or rule.output_block, rule.output_entries
            elif dim == rule.input and input is not None:
                span, block, step, entries = input, rule.input_block, rule.input_step or rule.input_block, rule.input_entries
            first, last, local = span.start // block, -(-(span.start + span.size) // block), span.local // step
            times, count = block // step, -(-span.size // step)
            if span.start % step or span.local % step:
                raise ConfigurationError(
                    f"this rank's part of {name} starts inside a quantization block of {step}: set parallel.tp to a smaller number."
                )
            if times > 1:
                spread.append((len(shape), times, span.start // step - first * times, count))
            shape.append(-(-span.full // block) * entries)
            read.append(slice(first * entries, last * entries))
            write.append(slice(local * entries, (local + count) * entries))
        whole = TensorShard(tuple(shape), tuple(read), tuple(write), tuple(spread))
        self.sources[name] = TensorShard((), (), tuple(write)) if rule.scalar else whole

    def load(self, name: str, tensor: LazyTensor) -> None:
        """Load this rank's part of a checkpoint tensor. Raises CheckpointError for a wrong shape or
        number type."""
        shard = self.sources[name]
        if tuple(tensor.shape) != shard.shape and not (self.rule.scalar and tuple(tensor.shape) == (1,)):
            remedy = "check that config.json belongs to this checkpoint"
            if not self.stored_dtype.is_floating_point:
                remedy += ", and that gate and up, and all experts of a layer, have one quantized format"
            raise CheckpointError(f"{name} has the shape {list(tensor.shape)}, but {list(shard.shape)} is expected", f"{remedy}.")
        value = tensor[shard.read] if shard.read else tensor[...]
        expected = self.stored_dtype
        if value.dtype.is_floating_point != expected.is_floating_point or (value.dtype in _FP8 and expected != value.dtype):
            raise CheckpointError(
                f"{name} is stored as {_kind(value.dtype)}, but {_kind(expected)} is expected", "choose the weight format that reads it."
            )
        self.allocate()
        self.write(shard, value.reshape(()) if self.rule.scalar else shard.repeat_entries(value))
        self.loaded.add(name)
        self.version += 1

    def allocate(self) -> None:
        """Allocate the memory that `release` freed, or whose values another form replaced."""
        if self.shape != self.whole_shape or self.dtype != self.stored_dtype:
            self.data = torch.zeros(self.whole_shape, dtype=self.stored_dtype, device=self.device)

    def write(self, shard: TensorShard, value: torch.Tensor) -> None:
        """Write a part that was read into its place."""
        self.data[shard.write].copy_(value)

    def release(self) -> None:
        """Free the memory once the values live in another form; a later `load` allocates it
        again."""
        self.data = torch.empty(0, dtype=self.stored_dtype, device=self.device)

    @property
    def pending(self) -> list[str]:
        """Checkpoint names that must be loaded and are not."""
        if self.optional:
            return []
        return [name for name in self.sources if name not in self.loaded]


def find_sharded_parameters(module: nn.Module) -> Iterator[tuple[str, ShardedParameter]]:
    """The module's direct sharded parameters, by name."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, ShardedParameter):
            yield name, parameter


def load_parameters(module: nn.Module, weights: Iterable[tuple[str, LazyTensor]], ignored: Iterable[str] = ()) -> set[str]:
    """Load a stream of checkpoint tensors, and return the names of the parameters that are
    complete, with what earlier calls loaded.

    `ignored`: regular expressions, matched from the start of a name. A module's attribute
    `foreign_weights` holds those of tensors that other ranks load. Plain parameters (of
    third-party modules) take the tensor of their own name. Raises CheckpointError for a name that
    no parameter takes.
    """
    import re

    unused = [*ignored, *(pattern for shard in module.modules() for pattern in getattr(shard, "foreign_weights", ()))]
    skip = re.compile("|".join(f"(?:{pattern})" for pattern in unused)) if unused else None
    parameters = dict(module.named_parameters(remove_duplicate=False))
    sinks: Mapping[str, ShardedParameter] = {
        source: parameter for parameter in parameters.values() if isinstance(parameter, ShardedParameter) for source in parameter.sources
    }
    plain = {name: parameter for name, parameter in parameters.items() if not isinstance(parameter, ShardedParameter)}
    done: set[str] = set()
    for name, tensor in weights:
        if name in sinks:
            sinks[name].load(name, tensor)
        elif name in plain:
            _load_plain(name, plain[name], tensor)
            done.add(name)
        elif skip is None or not skip.match(name):
            raise CheckpointError(
                f"the checkpoint holds {name}, which the model does not have", "check that config.json belongs to this checkpoint."
            )
    return done | {name for name, parameter in parameters.items() if isinstance(parameter, ShardedParameter) and not parameter.pending}


def _load_plain(name: str, parameter: nn.Parameter, tensor: LazyTensor) -> None:
    if tuple(tensor.shape) != tuple(parameter.shape):
        raise CheckpointError(f"{name} has the shape {list(tensor.shape)}, but {list(parameter.shape)} is expected.")
    parameter.data.copy_(tensor[...])


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
