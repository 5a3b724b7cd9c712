"""A rank's adapters without a model: layers of given sizes, and adapters in memory."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from frame.adapters.adapter_pool import AdapterPool, AdapterSizes
from frame.adapters.adapter_reader import AdapterReader, ChosenFormat
from frame.adapters.deltas import TorchDeltas
from frame.adapters.device_adapters import DeviceAdapters
from frame.core.interfaces.batch import AdapterLoad, ScheduledBatch, SlotSetup
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.platform import HOST
from frame.core.interfaces.rank_context import Limits
from frame.core.interfaces.sampling_params import SamplingParams
from frame.interfaces.adapter import AdapterConfig, AdapterContext, AdapterFormat, LowRankDelta
from frame.models.layers.parameter import Range

LIMITS = Limits(max_running_requests=4, max_tokens_per_step=32, max_context=64, page_size=1)


class Plain(AdapterFormat):
    """`name.a` and `name.b`; `norm` of a name is its magnitude."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        return AdapterConfig(config["rank"], invocation=tuple(config.get("invocation", ())))

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterable[tuple[str, LowRankDelta]]:
        for name in sorted({name.rpartition(".")[0] for name in tensors}):
            yield (
                name,
                LowRankDelta(tensors[f"{name}.a"], tensors[f"{name}.b"], config.get("scale", 1.0), output_norm=tensors.get(f"{name}.norm")),
            )


def make_adapters(sizes: AdapterSizes, layers: Mapping[str, tuple[int, Sequence[int]]], lookup: str = "") -> DeviceAdapters:
    """Adapters of layers: names joined by "+", inputs, outputs of each."""
    adapters = DeviceAdapters(AdapterPool(sizes, HOST, torch.float32, LocalGroup()), TorchDeltas())
    for names, (inputs, outputs) in layers.items():
        adapters.add_layer(names.split("+"), Range.whole(inputs), [Range.whole(size) for size in outputs], lookup=names == lookup)
    adapters.allocate(LIMITS)
    return adapters


def make_reader(adapters: DeviceAdapters, foreign: Sequence[str] = ()) -> AdapterReader:
    plain = ChosenFormat("plain", lambda config: config.get("peft_type") != "OTHER", Plain(AdapterContext(torch.float32)))
    return AdapterReader([plain], adapters.pool, lambda tensors: tensors, foreign, ())


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], config: str = '{"rank": 4}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(config)
    return folder


def make_batch(slots: Sequence[int], setups: Sequence[tuple[int, int, int]] = (), loads: Sequence[AdapterLoad] = ()) -> ScheduledBatch:
    """A step of decodes. setups: (slot, place, first position)."""
    import numpy as np

    ones = np.ones(len(slots), np.int32)
    return ScheduledBatch(
        step=0, num_decodes=len(slots), slots=np.array(slots), num_computed=ones * 7, num_scheduled=ones, token_ids=ones[:0],
        samples=ones > 0, new_pages=np.zeros((0, 3), np.int32), adapter_loads=list(loads),
        setups=[
            SlotSetup(slot, SamplingParams(), 0, 1, ones, adapter=place, adapter_start=start) for slot, place, start in setups
        ],
    )  # fmt: skip
