"""Builds what serves adapters: a rank's `DeviceAdapters` before its model, its loader after it, and
rank 0's places and orders.

Used by the builders of `frame.entrypoints.processes`. Must not know a format by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from frame.adapters.deltas import TorchDeltas
from frame.adapters.device_adapters import AdapterSizes, DeviceAdapters
from frame.adapters.host_adapters import AdapterReader, ChosenFormat
from frame.adapters.orders import AdapterLoader, AdapterOrders
from frame.adapters.places import AdapterPlaces, AdapterVersions
from frame.core.interfaces.adapter import PAGE_RANKS

if TYPE_CHECKING:
    import torch

    from frame.config.resolved import Resolved
    from frame.core.execution.model_runner import TorchModelRunner
    from frame.core.interfaces.collective import Collective
    from frame.core.interfaces.platform import Platform
    from frame.core.interfaces.runner import ModelRunner

# seconds after which a thread that reads files lets the thread that launches steps go on
_SWITCH_INTERVAL = 0.0005


def plan_sizes(resolved: Resolved) -> AdapterSizes:
    """The sizes of the pool."""
    settings = resolved.user.adapters
    max_pages = -(-settings.max_rank // PAGE_RANKS)
    return AdapterSizes(settings.max_active, settings.pages or settings.max_active * max_pages, max_pages)


def make_device_adapters(resolved: Resolved, platform: Platform, dtype: torch.dtype, tp: Collective) -> DeviceAdapters | None:
    """What the layers of a model register with; None: adapters are off."""
    if not resolved.user.adapters.enabled:
        return None
    return DeviceAdapters(TorchDeltas(), plan_sizes(resolved), platform, dtype, tp)


def attach_loader(runner: TorchModelRunner, formats: Sequence[ChosenFormat]) -> None:
    """Let a rank load adapters of these formats, where adapters are on."""
    adapters = runner.adapters
    if isinstance(adapters, DeviceAdapters):
        sys.setswitchinterval(_SWITCH_INTERVAL)
        make_reader = partial(_make_reader, formats, adapters, runner.model)
        adapters.loader = AdapterLoader(make_reader, adapters.host, adapters.platform.activate)


def build_orders(
    runner: ModelRunner, rank: TorchModelRunner, versions: AdapterVersions, places: Sequence[AdapterPlaces]
) -> AdapterOrders | None:
    """What carries out the commands for adapters; None: they are off."""
    adapters = rank.adapters
    if not isinstance(adapters, DeviceAdapters):
        return None
    return AdapterOrders(runner, adapters.host, versions, places, adapters.page_elements * adapters.dtype.itemsize)


def _make_reader(formats: Sequence[ChosenFormat], adapters: DeviceAdapters, model: Any) -> AdapterReader:
    foreign = [pattern for module in model.modules() for pattern in getattr(module, "foreign_weights", ())]
    return AdapterReader(formats, adapters, partial(_rename, model), foreign)


def _rename(model: Any, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The tensors under the names that the layers of the model bind."""
    rename, split = getattr(model, "rename_weights", None), getattr(model, "map_weights", None)
    renamed = tensors if rename is None else rename(tensors)
    yield from renamed if split is None else split(renamed)
