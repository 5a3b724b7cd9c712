"""Times MoE runners on the experts of one layer and compares them with the roofline of the machine.

The lower bound (floor) of a batch is the time to read the weights of its selected experts once or
to compute the products, whichever is longer. Runners come from the registry; weights are not
quantized. Each call has another random routing, so that weights come from memory and not from a
cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frame.core.errors import ConfigError
from frame.core.interfaces.moe import DispatchOutput, MoERequirements
from frame.entrypoints.tools.bench.attention import figures
from frame.entrypoints.tools.bench.clock import Clock
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.models.layers.weights.expert_weights import pack_small_experts
from frame.plugins.devices import open_platform

if TYPE_CHECKING:
    from frame.core.interfaces.model import ModelConfig
    from frame.core.interfaces.plugin import PluginRecord
    from frame.entrypoints.tools.bench.floors import Ceilings
    from frame.plugins.registry import Registry

ROUTINGS = 8  # random routings per number of tokens


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of one layer: a token selects `active` of `experts`, each a gated MLP [hidden ->
    inner -> hidden]."""

    experts: int
    active: int
    hidden: int
    inner: int

    @classmethod
    def of(cls, model_config: ModelConfig) -> ExpertShape:
        """The shape of a model. Raises ConfigError for a model without experts."""
        config = model_config.config
        inner = config.get("moe_intermediate_size") or config.get("intermediate_size")
        if not model_config.num_experts or not inner:
            raise ConfigError(f"{model_config.architecture} has no experts; name an MoE model, or pass --experts, --hidden and --inner.")
        return cls(model_config.num_experts, int(config.get("num_experts_per_tok") or 1), model_config.hidden_size, int(inner))


@dataclass(frozen=True, slots=True)
class ExpertBench:
    """The parameters that all batches share."""

    registry: Registry
    shape: ExpertShape
    clock: Clock
    ceilings: Ceilings
    dtype: torch.dtype

    def layer(self) -> nn.Module:
        """A layer of experts with random weights that are not quantized."""
        shape, layer = self.shape, nn.Module()
        sizes = {"gate_up": (2 * shape.inner, shape.hidden), "down": (shape.hidden, shape.inner)}
        for name, (outputs, inputs) in sizes.items():
            weight = torch.randn(shape.experts, outputs, inputs, device=self.clock.device, dtype=self.dtype) * inputs**-0.5
            layer.register_buffer(name, weight)
        with torch.inference_mode():
            pack_small_experts(layer, layer.gate_up, layer.down)  # type: ignore[arg-type]
        return layer

    def rows(self, record: PluginRecord, layer: nn.Module, counts: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Measure each number of tokens. -> (number, values); `refused` has the reasons if the
        runner does not support the layer."""
        device = self.clock.device
        capability = open_platform(device).compute_capability
        need = MoERequirements(device.type, capability, str(self.dtype).removeprefix("torch."))
        refused = "; ".join(map(str, record.capabilities.unsupported(need)))
        runner: Any = None
        if not refused:
            runner = self.registry.load(record)(build_context(device, self.dtype, 16), self.registry.options(record, {}))
        for count in counts:
            yield count, {"refused": refused} if runner is None else self._measure(runner, layer, count)

    @torch.inference_mode()
    def _measure(self, runner: Any, layer: nn.Module, count: int) -> dict[str, Any]:
        shape, device = self.shape, self.clock.device
        generator = torch.Generator().manual_seed(count)
        routings = [torch.rand(count, shape.experts, generator=generator).topk(shape.active, dim=1).indices for _ in range(ROUTINGS)]
        x = torch.randn(count, shape.hidden, generator=generator).to(device, self.dtype)
        weights = torch.softmax(torch.rand(count, shape.active, generator=generator), -1).to(device)
        batches = [DispatchOutput(x, ids.to(device), weights) for ids in routings]
        timed = self.clock.time([partial(runner.run, batch, layer) for batch in batches])
        touched = sum(ids.unique().numel() for ids in routings) / len(routings)
        matrices = 3 * shape.hidden * shape.inner
        read = int((touched * matrices + 2 * x.numel()) * self.dtype.itemsize)
        row = figures(timed.seconds, timed.how, read, 2 * count * shape.active * matrices, self.ceilings)
        return row | {"experts_touched": round(touched, 1)}
