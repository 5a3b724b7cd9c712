"""`AdapterReader`: reads an adapter's files into the layout of the pool's pages, for one rank.

Used by a rank's loading thread. A format plugin has the deltas; the model maps their names to its
layers. Must not know requests or places.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from frame.adapters.checkpoint_names import PlacedDelta, Rename, place_delta, place_experts
from frame.adapters.host_adapters import HostAdapter
from frame.adapters.latent_layers import LatentLayer
from frame.core.interfaces.platform import SupportsStreams
from frame.interfaces.adapter import PAGE_RANKS, AdapterConfig, AdapterError, AdapterFormat, LowRankDelta

if TYPE_CHECKING:
    from frame.adapters.adapter_pool import AdapterPool

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class ChosenFormat:
    """An adapter format, and whether it reads a configuration."""

    name: str
    reads: Callable[[Mapping[str, Any]], bool]
    plugin: AdapterFormat


class AdapterReader:
    """Reads adapters for one rank. `read` is called by one thread at a time.

    rename: (name, tensor) of a checkpoint -> the same under the names that the model's layers bind.
    foreign: regular expressions of names that other ranks or stages bind. tensors: names that the
    model's layers bind, with and without adapters. routers: those that `adapters.routers` excludes.
    """

    def __init__(
        self,
        formats: Sequence[ChosenFormat],
        pool: AdapterPool,
        rename: Rename,
        foreign: Sequence[str],
        tensors: Iterable[str],
        routers: Iterable[str] = (),
    ) -> None:
        self._formats = formats
        self._pool = pool
        self._rename = rename
        self._foreign = re.compile("|".join(f"(?:{pattern})" for pattern in foreign)) if foreign else None
        self._tensors = tuple(tensors)
        self._routers = frozenset(routers)
        self._bound = {name: (layer, place) for layer in pool.layers for place, name in enumerate(layer.names)}
        self._placed: dict[tuple[str, tuple[int, ...]], list[PlacedDelta]] = {}  # what renaming depends on

    def read(self, folder: Path) -> HostAdapter:
        """Raises AdapterError, one sentence, if the adapter does not fit the model."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            config = json.loads((folder / CONFIG).read_bytes())
            tensors = load_file(folder / TENSORS)
        except (OSError, ValueError, SafetensorError) as error:
            raise AdapterError(f"the adapter cannot be read: {error}; save it again with safetensors") from error
        if not isinstance(config, dict):
            raise AdapterError(f"{CONFIG} holds no JSON object; save the adapter again")
        chosen = next((each for each in self._formats if each.reads(config)), None)
        if chosen is None:
            known = " and ".join(each.name for each in self._formats)
            raise AdapterError(f"peft_type {config.get('peft_type')!r} is read by no adapter format here, which read {known}")
        parsed = chosen.plugin.read_config(config)
        limit = self._pool.sizes.max_pages * PAGE_RANKS
        if parsed.rank > limit:
            raise AdapterError(f"the adapter has rank {parsed.rank}, above adapters.max_rank {limit}; set --max-lora-rank {parsed.rank}")
        return self._fill(parsed, chosen.plugin.read_deltas(config, tensors))

    def _fill(self, config: AdapterConfig, deltas: Iterable[tuple[str, LowRankDelta]]) -> HostAdapter:
        pool, count = self._pool, -(-config.rank // PAGE_RANKS)
        streams = pool.platform if isinstance(pool.platform, SupportsStreams) else None
        shape = (count, pool.page_elements)
        try:
            pages = torch.empty(shape, dtype=pool.dtype) if streams is None else streams.allocate_pinned(shape, pool.dtype)
        except (RuntimeError, MemoryError) as error:
            raise AdapterError(f"host memory does not hold the adapter ({error}); lower adapters.max_loaded") from error
        host = HostAdapter(config, pages.zero_(), torch.zeros(len(pool.layers), dtype=torch.int32))
        names: set[str] = set()
        for name, delta in deltas:
            if name in names:
                raise AdapterError(f"the adapter changes {name} twice")
            names.add(name)
            _check_values(name, delta, config.rank)
            for placed in self._place(name, delta):
                self._write(host, name, delta, placed)
        if not names:
            raise AdapterError("the adapter changes no layer; save it again")
        return host

    def _place(self, name: str, delta: LowRankDelta) -> list[PlacedDelta]:
        """Where the layers of this rank bind parts of the delta's weight. Raises AdapterError
        for a name that no layer binds on any rank."""
        shape = (*delta.b.shape[:-1], delta.a.shape[-1])
        if (name, shape) not in self._placed:
            stacks = [layer.names for layer in self._pool.layers if layer.num_experts]
            self._placed[name, shape] = (
                list(place_experts(name, shape, self._rename, self._find_size, stacks))
                if len(shape) == 3
                else list(place_delta(name, shape, self._rename))
            )
        placed = self._placed[name, shape]
        for part in placed or [PlacedDelta(name, None, *(torch.empty(0),) * 2, is_transposed=False)]:
            if part.name not in self._bound and not (self._foreign is not None and self._foreign.match(f"{part.name}.weight")):
                if part.name in self._routers:
                    raise AdapterError(f"the adapter changes {name}, a router of experts; start the server with --lora-routers")
                is_known = any(tensor.startswith(f"{part.name}.") for tensor in self._tensors)
                why = "which takes no adapter here" if is_known else "and this model has no such layer"
                raise AdapterError(f"the adapter changes {name}, {why}; train it without this target module")
        return [part for part in placed if part.name in self._bound]

    def _find_size(self, name: str) -> tuple[int, int] | None:
        """Outputs and inputs of a bound layer of the whole model; None: this rank has no such
        layer."""
        if name not in self._bound:
            return None
        layer, place = self._bound[name]
        return layer.outputs[place % len(layer.outputs)].full, layer.inputs.full

    def _write(self, host: HostAdapter, name: str, delta: LowRankDelta, placed: PlacedDelta) -> None:
        layer, place = self._bound[placed.name]
        part = place % len(layer.outputs)
        output, span = layer.outputs[part], layer.inputs
        rows, columns = (span, output) if layer.is_lookup else (output, span)
        if (len(placed.outputs), len(placed.inputs)) != (rows.full, columns.full):
            raise AdapterError(
                f"the adapter's delta of {name} is [{len(placed.outputs)}, {len(placed.inputs)}], and the layer "
                f"[{rows.full}, {columns.full}]; train the adapter on this model"
            )
        if host.config.invocation and isinstance(layer, LatentLayer):
            raise AdapterError(
                f"the adapter starts at its invocation tokens and changes {name}, which makes keys and values of the tokens before "
                "them too; train it without this target module"
            )
        if placed.expert is not None and placed.expert >= len(delta.a):
            raise AdapterError(f"the adapter changes {len(delta.a)} experts of {name}, and the model has more; train it on this model")
        a, b = placed.cut(delta, rows, columns)
        if layer.is_lookup:
            a, b = b.t(), a.t()
        b = b.float() * delta.scale
        count = -(-len(a) // PAGE_RANKS)
        for page, some_a, some_b in zip(host.pages[:count], a.split(PAGE_RANKS), b.split(PAGE_RANKS, 1), strict=True):
            layer.write_page(page, place, some_a, some_b)
        host.counts[layer.index] = max(int(host.counts[layer.index]), count)
        first = sum(each.size for each in layer.outputs[:part])
        for values, table, filler in ((delta.output_scale, host.scales, 1.0), (delta.output_norm, host.norms, float("nan"))):
            if values is None:
                continue
            if layer.num_experts or layer.gemm is None:
                raise AdapterError(f"the adapter scales the rows of {name}, which is no linear layer; train it without DoRA there")
            row = table.setdefault(layer.index, torch.full((layer.num_outputs,), filler))
            row[first : first + output.size] = values.float()[placed.outputs[output.start : output.start + output.size]]


def _check_values(name: str, delta: LowRankDelta, rank: int) -> None:
    """Raise AdapterError for values that are not finite, or axes that do not fit each other."""
    a, b = delta.a, delta.b
    if a.dim() != b.dim() or a.dim() not in (2, 3) or a.shape[-2] != b.shape[-1] or a.shape[:-2] != b.shape[:-2]:
        raise AdapterError(f"the matrices of {name} are {list(a.shape)} and {list(b.shape)}, which do not fit each other")
    if a.shape[-2] > rank:
        raise AdapterError(f"the delta of {name} has rank {a.shape[-2]}, above the adapter's own rank {rank}")
    for values in (a, b, delta.output_scale, delta.output_norm):
        if values is None:
            continue
        if not values.is_floating_point() or not bool(torch.isfinite(values).all()):
            raise AdapterError(f"the adapter's values of {name} are not finite numbers; train it again")
        if values.dim() == 1 and len(values) != b.shape[-2]:
            raise AdapterError(f"the adapter scales {len(values)} outputs of {name}, which has {b.shape[-2]}")
