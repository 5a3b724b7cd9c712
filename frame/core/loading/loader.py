"""Builds a model and fills it: on the meta device, materialised, loaded, finished; with the seconds of each phase.

Knows no layer and no file format: the model says which parameter takes what, `checkpoint_files` and `random_weights` bring tensors.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frame.core.errors import CheckpointError
from frame.core.interfaces.attention import AttentionSpec, LatentProjections
from frame.core.interfaces.build import BuildContext
from frame.core.interfaces.model import LazyTensor, Model, ModelConfig
from frame.core.loading.dummy_weights import random_weights
from frame.core.loading.safetensors_reader import Ahead, read_weights

_NAMED = 4  # names listed in an error; the rest is counted


@dataclass
class LoadReport:
    """Seconds spent in each phase (build, materialise, load, finish), and the bytes that parameters and buffers take."""

    seconds: dict[str, float] = field(default_factory=dict)
    bytes: int = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where numbers come from: `load_format` auto, safetensors (both of `folder`) or dummy (drawn from `seed`)."""

    folder: Path
    load_format: str = "auto"
    seed: int = 0


def load_model(
    make: Callable[[ModelConfig, BuildContext], Model], model_config: ModelConfig, context: BuildContext, source: WeightSource
) -> tuple[Model, LoadReport]:
    """A model on `context.device`, ready to run. Raises CheckpointError with one sentence for whatever does not fit."""
    report = LoadReport()
    with report.phase("build"), torch.device("meta"):
        model = make(model_config, context)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{type(model).__name__} is a Model, but not a torch.nn.Module")
    layers = attention_layers(model)
    if context.attention is not None and layers:  # kernels may be compiled while the weights are read
        context.attention.prepare(layers)
    with report.phase("allocate_parameters"):
        allocate_parameters(model, context.device)
    with report.phase("load"):
        fill(model, source, progress=context.tp.rank == 0)
        if context.device.type == "cuda":
            torch.cuda.empty_cache()  # what tensors passed through counts as free when the cache is sized
    with report.phase("finish"):
        finish(model)
    report.bytes = sum(tensor.numel() * tensor.element_size() for tensor in {*model.parameters(), *model.buffers()})
    model.eval().requires_grad_(False)
    return model, report


def attention_layers(model: nn.Module) -> list[AttentionSpec | LatentProjections]:
    """What the backend is told of the model's attention layers, in their order: the module itself where attention is latent."""
    found: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "spec", None), AttentionSpec)]
    return [module if hasattr(module, "kv_lora_rank") else module.spec for module in found]


@torch.no_grad()
def fill(model: nn.Module, source: WeightSource, progress: bool = False) -> None:
    """Load every parameter; run `finish` afterwards. Serves the first load and weight updates alike."""
    if source.load_format == "dummy":
        weights: Iterable[tuple[str, LazyTensor]] = random_weights(expected_shapes(model), source.seed, *_place_of_numbers(model))
        where = "the random checkpoint"
    else:
        weights = read_weights(source.folder, progress, _ahead(model))
        where = str(source.folder)
    loaded = model.load_weights(weights)  # type: ignore[operator]
    missing = [name for key, parameter in model.named_parameters() if key not in loaded for name in _pending(key, parameter)]
    if missing:
        rest = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        names = ", ".join(missing[:_NAMED])
        raise CheckpointError(f"{where} lacks {names}{rest}: is the checkpoint complete, and this config.json its own?")


def allocate_parameters(model: nn.Module, device: torch.device) -> None:
    """Give every meta parameter memory on `device`; a parameter shared by two modules stays shared, and keeps what it knows.

    Zeroed where a checkpoint leaves gaps (padded vocabularies); what is filled whole is not written twice.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                make = torch.empty if _is_filled_whole(parameter) else torch.zeros
                data = make(parameter.shape, dtype=parameter.dtype, device=device)
                real = torch.Tensor._make_subclass(type(parameter), data, False)  # noqa: SLF001 - a Parameter subclass keeps its class
                real.__dict__.update(parameter.__dict__)
                made[id(parameter)] = real
            setattr(module, name, made[id(parameter)])


@torch.no_grad()
def finish(model: nn.Module) -> None:
    """Run `finish` of every module that has one, inner modules first."""
    for module in reversed(list(model.modules())):
        act = getattr(module, "finish", None)
        if callable(act):
            act()


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> whole shape, as far as the parameters know them; a plain parameter is expected under its own name.

    A model that knows better has a method of this name.
    """
    own = getattr(model, "expected_shapes", None)
    if callable(own):
        return own()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        sources = getattr(parameter, "sources", None)
        if sources is None:
            shapes[name] = tuple(parameter.shape)
        elif not getattr(parameter, "optional", False):
            shapes.update({source: part.shape for source, part in sources.items()})
    return shapes


def _is_filled_whole(parameter: nn.Parameter) -> bool:
    """Whether the checkpoint tensors that make it up leave no gap."""
    parts = getattr(parameter, "sources", {}).values()
    filled = sum(math.prod(span.stop - span.start for span in part.write if isinstance(span, slice)) for part in parts)
    return filled == parameter.numel()


def _ahead(model: nn.Module) -> Ahead | None:
    """What this rank takes of which tensors, for a model on a GPU. On the CPU the files' own pages are the faster source."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return None
    rows: dict[str, slice | None] = {}
    for parameter in model.parameters():
        for name, part in getattr(parameter, "sources", {}).items():
            rows[name] = part.read[0] if part.read else None
    return Ahead(device, rows)


def _place_of_numbers(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where random numbers are to be made, and in which type: those of the model's first matrix that has a common one."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.dtype in (torch.float32, torch.float16, torch.bfloat16):
            return parameter.device, parameter.dtype
    return torch.device("cpu"), torch.float32


def _pending(name: str, parameter: nn.Parameter) -> list[str]:
    return getattr(parameter, "pending", None) or [name]
