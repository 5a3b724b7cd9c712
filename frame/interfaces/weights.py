"""The interface of weight sources: where the tensors of a checkpoint come from (kind
`weight_source`).

Used by the loader, which asks for tensors by name, and by the plugins. Must not know layers or file
formats. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from frame.core.interfaces.plugin import Reason

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.model import LazyTensor


@dataclass(frozen=True, slots=True)
class WeightSourceContext:
    """The checkpoint that a source reads, and the parameters that it is read for."""

    folder: Path  # with config.json
    device: torch.device  # of the parameters; `open_tensor` may return tensors of any device
    dtype: torch.dtype  # of the model's matrices before quantization
    seed: int = 0  # model.seed, for sources that make weights up
    expected_shapes: Callable[[], Mapping[str, tuple[int, ...]]] = dict  # by checkpoint name, not split over ranks
    integer_dtypes: Callable[[], Mapping[str, torch.dtype]] = dict  # of the expected tensors that hold integers


@dataclass(frozen=True, slots=True)
class WeightSourceRequirements:
    """What a configuration needs of its weight source."""

    ranks: int = 1  # processes that open it at the same time
    is_named: bool = True  # the user chose it by name
    quantization: str | None = None  # `quant_method` of the checkpoint


@dataclass(frozen=True, slots=True)
class WeightSourceCapabilities:
    """What a weight source can do."""

    reads_checkpoint: bool = True  # False: it makes weights up, and `auto` does not choose it
    several_ranks: bool = True  # several processes may open it at the same time
    checkpoints: tuple[str, ...] | None = None  # values of `quant_method` for which `auto` chooses it; None: all, and unquantized ones

    def unsupported(self, requirements: WeightSourceRequirements) -> list[Reason]:
        """All reasons why it cannot be used; empty: it can."""
        reasons = []
        if not self.reads_checkpoint and not requirements.is_named:
            reasons.append(Reason("makes weights up, so that it has to be named"))
        elif self.checkpoints is not None and requirements.quantization not in self.checkpoints and not requirements.is_named:
            reasons.append(Reason(f"reads {' and '.join(self.checkpoints)} checkpoints, so that it has to be named for others"))
        if not self.several_ranks and requirements.ranks > 1:
            reasons.append(Reason(f"is opened by one rank alone, not by {requirements.ranks}", "parallel.tp: 1"))
        return reasons


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a local file that hold a tensor: uncompressed, contiguous, little-endian."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of the first byte


class WeightSource(ABC):
    """The tensors of one checkpoint, by name.

    Contract:
    - The constructor finds all tensors. It raises CheckpointError, one sentence with the remedy,
      for a checkpoint that is missing, incomplete or damaged.
    - Nothing of a checkpoint is executed or unpickled.
    - Every rank opens its own source and reads slices of the tensors that it needs. The same name
      has the same values on all ranks.
    """

    def __init__(self, context: WeightSourceContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def list_names(self) -> Sequence[str]:
        """All tensors, each once, in the order in which they are read fastest."""

    @abstractmethod
    def open_tensor(self, name: str) -> LazyTensor:
        """A tensor of the checkpoint: its shape, and its values by slices. A scalar has the shape
        () and is read by `...`."""

    def find_range(self, name: str) -> FileRange | None:
        """Where a tensor lies in a local file; None: in none. The loader reads ranges ahead with
        several threads, directly into the memory of a GPU. The values must be those of
        `open_tensor`."""
        return None

    @classmethod
    def write_checkpoint(cls, folder: Path, tensors: Mapping[str, torch.Tensor], num_files: int = 1) -> None:
        """Write a checkpoint that the source can read into an empty folder; the conformance suite
        calls it. By default safetensors files, with an index if there are several. A source of
        other files needs no `num_files`."""
        import json

        from safetensors.torch import save_file

        names = [f"model-{number + 1:05}-of-{num_files:05}.safetensors" for number in range(num_files)]
        placed = {tensor: names[number % num_files] for number, tensor in enumerate(tensors)}
        for name in names:
            file = folder / (name if num_files > 1 else "model.safetensors")
            save_file({tensor: tensors[tensor] for tensor, at in placed.items() if at == name}, file, metadata={"format": "pt"})
        if num_files > 1:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": placed}))

    def close(self) -> None:
        """Close files and connections; tensors are not read afterwards."""
        return
