"""Builds a model and loads its weights, and reports the seconds of each phase (vLLM:
`DefaultModelLoader`).

Used by the model runners. A model is built on the meta device, its parameters are allocated, filled
and finished. It must not know layers or file formats: the model maps checkpoint tensors to
parameters; a weight source has the tensors.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from frame.core.errors import CheckpointError, PluginError
from frame.core.interfaces.attention import AttentionSpec, LatentProjections
from frame.core.interfaces.build import BuildContext
from frame.core.interfaces.device_drafter import DraftModel
from frame.core.interfaces.model import Model
from frame.core.interfaces.platform import HOST, Platform, SupportsStreams
from frame.interfaces.weights import WeightSource, WeightSourceContext
from frame.loading.weight_reader import ReadAhead, read_headers, read_weights

M = TypeVar("M", bound=Model | DraftModel)
T = TypeVar("T")

_NAMED = 4  # missing tensors that an error names; the others are counted


@dataclass
class LoadReport:
    """How a model was loaded."""

    seconds: dict[str, float] = field(default_factory=dict)  # by phase: build, allocate_parameters, load, finish
    bytes: int = 0  # of parameters and buffers
    planned: int = 0  # the same, of the model on the meta device

    @contextlib.contextmanager
    def measure_phase(self, name: str) -> Iterator[None]:
        """Measure the seconds of a with block."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint, and the weight source that reads it."""

    folder: Path
    open_source: Callable[[WeightSourceContext], WeightSource]
    seed: int = 0  # for sources that make weights up


@dataclass(frozen=True, slots=True)
class UpdatedModel:
    """A loaded model whose weights change, and what builds another one of the same sizes."""

    model: Any
    make: Callable[[], Any]


def load_model(
    make: Callable[[], M], context: BuildContext, checkpoint: Checkpoint, on_built: Callable[[M], object] = lambda model: None
) -> tuple[M, LoadReport]:
    """Build and load a model on `context.device`, ready to run. `make` constructs it; `on_built` is
    called with it while it is on the meta device. Raises CheckpointError, one sentence, if the
    checkpoint does not fit, and PluginError for a model of an earlier interface."""
    report = LoadReport()
    with report.measure_phase("build"), torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{type(model).__name__} is a Model, but not a torch.nn.Module")
    _check_hooks(model)
    report.planned = plan_bytes(model)
    on_built(model)
    layers = attention_layers(model)
    if context.attention is not None and layers:  # starts compiling kernels while the weights are read
        context.attention.prepare(layers)
    with report.measure_phase("allocate_parameters"):
        try:
            allocate_parameters(model, context.device)
        except torch.OutOfMemoryError:  # of a GPU, which has a sentence of its own
            raise
        except RuntimeError as error:
            raise CheckpointError(
                f"{checkpoint.folder}: the sizes in config.json make a model of {report.planned / 2**30:,.0f} GiB, which cannot be "
                "allocated: check that config.json belongs to this checkpoint."
            ) from error
    allocated = count_bytes(model)
    with report.measure_phase("load"):
        load_weights(model, checkpoint, progress=context.tp.rank == 0, platform=context.platform)
        context.platform.release_memory()  # so that no packed weight is put between freed blocks
    if report.planned:  # a tied head may turn out to be stored
        report.planned += count_bytes(model) - allocated
    with report.measure_phase("finish"):
        process_weights_after_loading(model)
        context.platform.release_memory()  # so that temporary memory counts as free when the KV cache is sized
    report.bytes = count_bytes(model)
    model.eval().requires_grad_(False)
    return model, report


def _check_hooks(model: nn.Module) -> None:
    """Raise PluginError for a module whose hook has the name of an earlier frame."""
    for each in map(type, model.modules()):
        if callable(getattr(each, "finish", None)) and not hasattr(each, "process_weights_after_loading"):
            name = f"{each.__module__}.{each.__qualname__}"
            raise PluginError(f"{name} was written for an earlier interface: rename its finish() to process_weights_after_loading().")


def count_bytes(model: nn.Module) -> int:
    """Bytes of the parameters and buffers, on the meta device too; a shared one counts once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in {*model.parameters(), *model.buffers()})


def plan_bytes(model: nn.Module) -> int:
    """The bytes that a model on the meta device takes once its weights are in the form that is
    multiplied."""
    size = count_bytes(model)
    with torch.device("meta"):
        for module in model.modules():
            count_growth = getattr(module, "count_growth", None) or getattr(getattr(module, "weights", None), "count_growth", None)
            size += 0 if count_growth is None else count_growth()
    return size


def attention_layers(model: nn.Module) -> list[AttentionSpec | LatentProjections]:
    """The specs of the model's attention layers, in order; for latent attention the module itself,
    which has the projections."""
    modules: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "spec", None), AttentionSpec)]
    return [module if hasattr(module, "kv_lora_rank") else module.spec for module in modules]


def record_form(model: nn.Module) -> tuple[dict[str, int], list[tuple[float, float]]]:
    """What captured graphs have read: the addresses of the tensors, and the scales of the KV
    cache, which are numbers there."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    specs: list[Any] = [getattr(layer, "spec", layer) for layer in attention_layers(model)]
    places = {name: tensor.data_ptr() for name, tensor in tensors if not tensor.is_mkldnn}
    return places, [(spec.k_scale, spec.v_scale) for spec in specs]


@torch.no_grad()
def load_weights(
    model: nn.Module, checkpoint: Checkpoint, progress: bool = False, platform: Platform = HOST, *, is_dry: bool = False
) -> None:
    """Load every parameter; call `process_weights_after_loading` afterwards. Raises CheckpointError
    if tensors are missing. `progress`: show a bar. is_dry: of a model on the meta device, compare
    the names and shapes, and read no values."""
    context = WeightSourceContext(
        checkpoint.folder,
        *_device_and_dtype(model),
        seed=checkpoint.seed,
        expected_shapes=partial(expected_shapes, model),
        integer_dtypes=partial(_integer_dtypes, model),
    )
    forget_loaded(model)
    with contextlib.closing(checkpoint.open_source(context)) as source:
        tensors = read_headers(source) if is_dry else read_weights(source, progress, _plan_read_ahead(model, platform))
        loaded = model.load_weights(tensors)  # type: ignore[operator]
    if missing := list_missing(model, loaded):
        names = join_names(missing)
        raise CheckpointError(f"{checkpoint.folder} lacks {names}: is the checkpoint complete, and this config.json its own?")


def beat_for_each(tensors: Iterable[T], beat: Callable[[], object]) -> Iterator[T]:
    """The tensors; calls `beat` for each, so that a long update is not taken for a hang."""
    for each in tensors:
        beat()
        yield each


def forget_loaded(model: nn.Module) -> None:
    """Forget which tensors are loaded, before all are loaded anew."""
    for parameter in model.parameters():
        if (loaded := getattr(parameter, "loaded", None)) is not None:
            loaded.clear()


def list_missing(model: nn.Module, complete: Container[str]) -> list[str]:
    """Checkpoint names that must be loaded and are not. complete: names of the parameters that
    are."""
    return [name for key, parameter in model.named_parameters() if key not in complete for name in _pending(key, parameter)]


def join_names(names: Sequence[str]) -> str:
    """The first names, for a sentence."""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def allocate_parameters(model: nn.Module, device: torch.device) -> None:
    """Allocate every meta parameter on `device`. A parameter that two modules share stays shared
    and keeps its attributes.

    Parameters that the checkpoint does not fill completely (padded vocabularies) are zeroed; the
    others are not written twice.
    """
    allocated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in allocated:
                make = torch.empty if _is_filled_whole(parameter) else torch.zeros
                data = make(parameter.shape, dtype=parameter.dtype, device=device)
                real = torch.Tensor._make_subclass(type(parameter), data, False)  # noqa: SLF001 - a Parameter subclass keeps its class
                real.__dict__.update(parameter.__dict__)
                allocated[id(parameter)] = real
            setattr(module, name, allocated[id(parameter)])


@torch.no_grad()
def process_weights_after_loading(model: nn.Module) -> None:
    """Call the method of this name of every module that has one, inner modules first."""
    for module in reversed(list(model.modules())):
        if callable(act := getattr(module, "process_weights_after_loading", None)):
            act()


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Checkpoint name -> unsharded shape, from the parameters' `sources`; a plain parameter is
    expected under its own name.

    A model may have a method of this name that returns its own table.
    """
    list_shapes = getattr(model, "expected_shapes", None)
    if callable(list_shapes):
        return list_shapes()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        sources = getattr(parameter, "sources", None)
        if sources is None:
            shapes[name] = tuple(parameter.shape)
        elif not getattr(parameter, "optional", False):
            shapes.update({source: shard.shape for source, shard in sources.items()})
    return shapes


def _is_filled_whole(parameter: nn.Parameter) -> bool:
    """Whether the parameter's checkpoint tensors cover all of it."""
    if getattr(parameter, "optional", False):
        return False
    shards = getattr(parameter, "sources", {}).values()
    filled = sum(math.prod(span.stop - span.start for span in shard.write if isinstance(span, slice)) for shard in shards)
    return filled == parameter.numel()


def _plan_read_ahead(model: nn.Module, platform: Platform) -> ReadAhead | None:
    """The rows of each tensor that this rank needs, for a model on a GPU. None on the CPU, where
    mapped files are faster."""
    if not isinstance(platform, SupportsStreams):
        return None
    rows: dict[str, slice | None] = {}
    for parameter in model.parameters():
        for name, shard in getattr(parameter, "sources", {}).items():
            rows[name] = shard.read[0] if shard.read else None
    return ReadAhead(platform, rows)


def _integer_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of the checkpoint tensors that hold integers."""
    dtypes: dict[str, torch.dtype] = {}
    for parameter in model.parameters():
        dtype = getattr(parameter, "stored_dtype", parameter.dtype)
        if not dtype.is_floating_point:
            dtypes.update(dict.fromkeys(getattr(parameter, "sources", {}), dtype))
    return dtypes


def _device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device and dtype of the model's first matrix with a floating-point dtype of 16 or 32
    bits."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.dtype in (torch.float32, torch.float16, torch.bfloat16):
            return parameter.device, parameter.dtype
    return torch.device("cpu"), torch.float32


def _pending(name: str, parameter: nn.Parameter) -> list[str]:
    return getattr(parameter, "pending", None) or [name]
