"""Parameters that know where their numbers come from: which checkpoint tensors, and which part of each is this rank's.

A method (quantized or plain) says what the dimensions of a parameter mean (`ShardRule`); the layer knows the whole sizes and its own
share and `bind`s checkpoint names to parts. Knows no file format and no collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from frame.core.errors import CheckpointError

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor


@dataclass(frozen=True, slots=True)
class ShardRule:
    """What the dimensions of a parameter are: indices of the output, input and expert dimension, None where there is none.

    `output_block` and `input_block`: so many outputs (inputs) share one entry, as in block scales and packed integers.
    """

    output: int | None = None
    input: int | None = None
    expert: int | None = None
    output_block: int = 1
    input_block: int = 1


@dataclass(frozen=True, slots=True)
class Range:
    """`size` entries of a dimension of `full` entries, from `start`; on this rank they lie at `local`."""

    full: int
    start: int
    size: int
    local: int = 0

    @classmethod
    def whole(cls, size: int, local: int = 0) -> Range:
        return cls(size, 0, size, local)

    @classmethod
    def split(cls, full: int, rank: int, ranks: int, local: int = 0) -> Range:
        """The rank's share of a dimension that `ranks` divides."""
        size = full // ranks
        return cls(full, rank * size, size, local)

    def blocks(self, block: int) -> Range:
        if block == 1:
            return self
        return Range(-(-self.full // block), self.start // block, -(-self.size // block), self.local // block)


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor's share in a parameter: its whole shape, what to read of it, where to write that."""

    shape: tuple[int, ...]
    read: tuple[slice, ...]
    write: tuple[slice | int, ...]


class ShardedParameter(nn.Parameter):
    """A parameter with a shard rule; `sources` maps the checkpoint names that make it up to their parts, `loaded` are those set."""

    rule: ShardRule
    whole_shape: torch.Size
    sources: dict[str, Part]
    loaded: set[str]
    version: int  # counts loads, for what is derived from the numbers

    def __new__(cls, data: torch.Tensor, rule: ShardRule | None = None) -> ShardedParameter:
        parameter = super().__new__(cls, data, requires_grad=False)
        parameter.rule = rule or ShardRule()
        parameter.whole_shape = data.shape
        parameter.sources = {}
        parameter.loaded = set()
        parameter.version = 0
        return parameter

    def bind(self, name: str, output: Range | None = None, input: Range | None = None, expert: int | None = None) -> None:  # noqa: A002
        """The checkpoint tensor `name` fills the given ranges (of the layer's outputs and inputs; None: a dimension not cut)."""
        rule = self.rule
        shape: list[int] = []
        read: list[slice] = []
        write: list[slice | int] = []
        for dim, size in enumerate(self.whole_shape):
            if dim == rule.expert and expert is not None:
                write.append(expert)
                continue
            if dim == rule.output and output is not None:
                span = output.blocks(rule.output_block)
            elif dim == rule.input and input is not None:
                span = input.blocks(rule.input_block)
            else:
                span = Range.whole(size)
            shape.append(span.full)
            read.append(slice(span.start, span.start + span.size))
            write.append(slice(span.local, span.local + span.size))
        self.sources[name] = Part(tuple(shape), tuple(read), tuple(write))

    def load(self, name: str, tensor: LazyTensor) -> None:
        """Read this rank's part of a checkpoint tensor into its place. Raises CheckpointError for a wrong shape or kind of number."""
        part = self.sources[name]
        if tuple(tensor.shape) != part.shape:
            raise CheckpointError(
                f"{name} has the shape {list(tensor.shape)}, {list(part.shape)} is expected: is this checkpoint's config.json its own?"
            )
        value = tensor[part.read] if part.read else tensor[...]
        if value.is_floating_point() != self.is_floating_point():
            raise CheckpointError(
                f"{name} is stored as {_kind(value)}, {_kind(self)} is expected: choose the quantization method that reads it."
            )
        if self.data.numel() == 0:
            self.data = torch.zeros(self.whole_shape, dtype=self.dtype, device=self.device)
        self.data[part.write].copy_(value)
        self.loaded.add(name)
        self.version += 1

    def release(self) -> None:
        """Give the memory back once the numbers live in another form; a later `load` allocates again."""
        self.data = torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def pending(self) -> list[str]:
        """Checkpoint names not yet loaded."""
        return [name for name in self.sources if name not in self.loaded]


def own_parameters(module: nn.Module) -> Iterator[tuple[str, ShardedParameter]]:
    """The module's direct parameters that know a shard rule, by name."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, ShardedParameter):
            yield name, parameter


def load_parameters(module: nn.Module, weights: Iterable[tuple[str, LazyTensor]], ignored: Iterable[str] = ()) -> set[str]:
    """Load a stream of checkpoint tensors; return the names of the parameters that are complete.

    `ignored` are regular expressions, matched from the start of a name. Plain parameters (of foreign modules) take the tensor of
    their own name. Raises CheckpointError for a name that nothing takes.
    """
    import re

    skip = re.compile("|".join(f"(?:{pattern})" for pattern in ignored)) if ignored else None
    parameters = dict(module.named_parameters(remove_duplicate=False))
    sinks: Mapping[str, ShardedParameter] = {
        source: parameter for parameter in parameters.values() if isinstance(parameter, ShardedParameter) for source in parameter.sources
    }
    plain = {name: parameter for name, parameter in parameters.items() if not isinstance(parameter, ShardedParameter)}
    for parameter in sinks.values():
        parameter.loaded.clear()
    done: set[str] = set()
    for name, tensor in weights:
        if name in sinks:
            sinks[name].load(name, tensor)
        elif name in plain:
            _load_plain(name, plain[name], tensor)
            done.add(name)
        elif skip is None or not skip.match(name):
            raise CheckpointError(f"the checkpoint holds {name}, which the model does not have: is this checkpoint's config.json its own?")
    return done | {name for name, parameter in parameters.items() if isinstance(parameter, ShardedParameter) and not parameter.pending}


def _load_plain(name: str, parameter: nn.Parameter, tensor: LazyTensor) -> None:
    if tuple(tensor.shape) != tuple(parameter.shape):
        raise CheckpointError(f"{name} has the shape {list(tensor.shape)}, {list(parameter.shape)} is expected.")
    parameter.data.copy_(tensor[...])


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
