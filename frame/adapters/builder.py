"""Builds what serves adapters: a rank's `DeviceAdapters` before its model, its loader after it, and
rank 0's commands.

Used by the builders of `frame.entrypoints.processes`. Must not know a format by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from frame import kernels
from frame.adapters.adapter_pool import AdapterPool, AdapterSizes
from frame.adapters.adapter_reader import AdapterReader, ChosenFormat
from frame.adapters.commands import AdapterCommands, AdapterLoader
from frame.adapters.deltas import DeltaOperations, TorchDeltas
from frame.adapters.device_adapters import DeviceAdapters
from frame.adapters.places import AdapterPlaces, AdapterVersions
from frame.interfaces.adapter import PAGE_RANKS

if TYPE_CHECKING:
    import torch

    from frame.core.execution.model_runner import TorchModelRunner
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.collective import Collective
    from frame.core.interfaces.platform import Platform
    from frame.core.interfaces.runner import ModelRunner

# seconds after which a thread that reads files lets the thread that launches steps go on
_SWITCH_INTERVAL = 0.0005


def plan_sizes(max_active: int, max_rank: int, pages: int | None) -> AdapterSizes:
    """The sizes of the pool, from the settings of these names."""
    max_pages = -(-max_rank // PAGE_RANKS)
    return AdapterSizes(max_active, pages or max_active * max_pages, max_pages)


def make_device_adapters(
    sizes: AdapterSizes, platform: Platform, dtype: torch.dtype, tp: Collective, routers: bool, *, deterministic: bool = False
) -> DeviceAdapters:
    """What the layers of a model register with. routers: adapters may change them. deterministic:
    no row's delta depends on other rows."""
    operations: DeltaOperations = TorchDeltas()
    if deterministic and platform.device.type != "cpu" and kernels.can_use_triton(platform.device):
        from frame.adapters.triton_deltas import FixedDeltas

        operations = FixedDeltas()
    elif deterministic:
        from frame.adapters.invariant_deltas import InvariantDeltas

        operations = InvariantDeltas()
    elif kernels.can_use_triton(platform.device):
        from frame.adapters.triton_deltas import TritonDeltas

        operations = TritonDeltas()
    return DeviceAdapters(AdapterPool(sizes, platform, dtype, tp), operations, adapts_routers=routers)


def allocate_adapters(context: BuildContext) -> DeviceAdapters | None:
    """Allocate the pool of a rank whose model is built; None: adapters are off."""
    if not isinstance(context.adapters, DeviceAdapters):
        return None
    context.adapters.allocate(context.limits)
    return context.adapters


def count_bytes(context: BuildContext) -> int:
    """Bytes of the pool, once the model is built."""
    return context.adapters.pool.num_bytes if isinstance(context.adapters, DeviceAdapters) else 0


def attach_loader(runner: TorchModelRunner, formats: Sequence[ChosenFormat]) -> None:
    """Let a rank load adapters of these formats."""
    adapters = runner.adapters
    if isinstance(adapters, DeviceAdapters):
        sys.setswitchinterval(_SWITCH_INTERVAL)
        make_reader = partial(_make_reader, formats, adapters.pool, runner.model)
        adapters.start_order = AdapterLoader(make_reader, adapters.host, adapters.pool.platform.activate).start_order


def build_commands(
    runner: ModelRunner, rank: TorchModelRunner, versions: AdapterVersions, places: Sequence[AdapterPlaces]
) -> AdapterCommands | None:
    """What carries out the commands for adapters; None: they are off."""
    adapters = rank.adapters
    if not isinstance(adapters, DeviceAdapters):
        return None
    return AdapterCommands(runner, adapters.host, versions, places)


def _make_reader(formats: Sequence[ChosenFormat], pool: AdapterPool, model: Any) -> AdapterReader:
    foreign = [pattern for module in model.modules() for pattern in getattr(module, "foreign_weights", ())]
    tensors = [name for parameter in model.parameters() for name in getattr(parameter, "sources", ())]
    routers = [name for module in model.modules() if (name := getattr(module, "unadapted_router", ""))]
    return AdapterReader(formats, pool, partial(_rename, model), foreign, tensors, routers)


def _rename(model: Any, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The tensors under the names that the layers of the model bind."""
    rename, split = getattr(model, "rename_weights", None), getattr(model, "map_weights", None)
    renamed = tensors if rename is None else rename(tensors)
    yield from renamed if split is None else split(renamed)
