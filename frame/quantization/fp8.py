"""fp8 (e4m3) weights with scales: from fp8 checkpoints, or quantized while loading.

On a GPU with fp8 products the weights stay fp8 (`fp8_matmul`). Elsewhere, and for sizes that no
kernel supports, they are dequantized after loading, which gives the same results at the size and
speed of unquantized weights. Depends on no model; `fp8_format` reads the checkpoint's
configuration.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from frame import kernels
from frame.core.interfaces.quantization import ExpertsMethod, LayerKind, LinearMethod, QuantizationMethod
from frame.models.layers.parameter import ShardedParameter, ShardRule
from frame.quantization import Fp8Options
from frame.quantization.fp8_format import Fp8Format, read_format
from frame.quantization.fp8_matmul import Fp8Matmul
from frame.quantization.fp8_weights import BLOCK, FP8, Fp8Parameter, RoundedParameter, Scales, dequantize, make_scale_parameter
from frame.quantization.none import PlainExperts, PlainLinear

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.moe import Fp8Scale
    from frame.core.interfaces.quantization import QuantizationContext


class Fp8(QuantizationMethod):
    """fp8 for linear layers and experts: those that the checkpoint stores in fp8, or, in an
    unquantized checkpoint, all that the option `ignore` does not match."""

    def __init__(self, context: QuantizationContext, options: BaseModel | None = None) -> None:
        self._format = read_format(context.checkpoint_config) if context.checkpoint_config else None
        if self._format is not None and self._format.input_scale:
            # dynamic per-token scales are finer than the checkpoint's one static scale
            self.ignored_weights = (rf".*\.{re.escape(self._format.input_scale)}$",)
        ignore = options.ignore if isinstance(options, Fp8Options) else Fp8Options().ignore
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignore)) if ignore else None

    def linear(self, prefix: str, kind: LayerKind = "linear") -> LinearMethod:
        if kind != "linear" or not self._quantizes(prefix):
            return PlainLinear()
        return Fp8Linear(self._format) if self._format else RoundedLinear()

    def experts(self, prefix: str) -> ExpertsMethod:
        if not self._quantizes(prefix):
            return PlainExperts()
        return Fp8Experts(self._format) if self._format else RoundedExperts()

    def _quantizes(self, prefix: str) -> bool:
        if self._format is not None:
            return self._format.stores_layer(prefix)
        return self._ignored is None or self._ignored.search(prefix) is None


class Fp8Linear:
    """`weight` e4m3 [outputs, inputs] and its scale under the checkpoint's own name. After loading,
    `product` multiplies it; where no kernel does, the dequantized layer `plain` replaces it."""

    def __init__(self, stored: Fp8Format) -> None:
        self._stored = stored
        self._plain = PlainLinear()

    def create_weights(self, layer: nn.Module, input_size: int, output_sizes: Sequence[int], dtype: torch.dtype) -> None:
        stored = self._stored
        weight = torch.empty(sum(output_sizes), input_size, dtype=FP8)
        layer.register_parameter("weight", Fp8Parameter(weight, ShardRule(output=0, input=1)))
        layer.register_parameter(stored.scale, make_scale_parameter(stored.sharing, stored.block, output_sizes, input_size))
        _init_layer(layer, dtype)

    def process_weights(self, layer: nn.Module) -> None:
        """Select how a weight that was loaded since the last call is multiplied."""
        weight: Fp8Parameter = layer.weight  # type: ignore[assignment]
        if not weight.numel():
            return  # already dequantized
        scales = self._scales(layer)
        layer.product = Fp8Matmul.create(weight, scales, layer.plain_dtype)  # type: ignore[assignment, arg-type]
        layer.plain = None  # type: ignore[assignment]
        if layer.product is None:
            layer.plain = self._make_plain(dequantize(weight, scales, layer.plain_dtype))  # type: ignore[assignment, arg-type]
            weight.release()

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.product is not None:
            return layer.product(x, layer.weight, bias)  # type: ignore[operator, no-any-return]
        return self._plain.apply(layer.plain, x, bias)  # type: ignore[arg-type]

    def apply_gated(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """SiLU(first half of the outputs) * second half; None where a separate activation is
        faster."""
        if layer.product is not None:
            return layer.product.multiply_gated(x, layer.weight, bias)  # type: ignore[union-attr, operator, no-any-return]
        return self._plain.apply_gated(layer.plain, x, bias)  # type: ignore[arg-type]

    def _scales(self, layer: nn.Module) -> Scales:
        scale: ShardedParameter = getattr(layer, self._stored.scale)
        if self._stored.sharing != "block":
            return Scales(scale.data.flatten())
        return Scales(scale.data, scale.rule.output_step, scale.rule.input_step).coarsen(*self._stored.block)

    def _make_plain(self, weight: torch.Tensor) -> nn.Module:
        plain = nn.Module()
        self._plain.create_weights(plain, weight.shape[1], [weight.shape[0]], weight.dtype)
        plain.weight = ShardedParameter(weight, ShardRule(output=0, input=1))
        self._plain.process_weights(plain)
        return plain


class RoundedLinear(Fp8Linear):
    """The weight of an unquantized checkpoint, quantized while loading: one scale per output."""

    def __init__(self) -> None:
        super().__init__(Fp8Format("channel"))

    def create_weights(self, layer: nn.Module, input_size: int, output_sizes: Sequence[int], dtype: torch.dtype) -> None:
        weight = torch.empty(sum(output_sizes), input_size, dtype=FP8)
        layer.register_parameter("weight", RoundedParameter(weight, ShardRule(output=0, input=1)))
        _init_layer(layer, dtype)

    def _scales(self, layer: nn.Module) -> Scales:
        weight: RoundedParameter = layer.weight  # type: ignore[assignment]
        return Scales(weight.scales if weight.scales is not None else torch.ones(len(weight), device=weight.device))


class Fp8Experts:
    """`gate_up` and `down` in e4m3, with `gate_up_fp8_scale` and `down_fp8_scale` float32, per
    block of 128 x 128 or per output, if the layer's runner takes them. Otherwise, and for sizes
    that are no multiples of 128, they are dequantized after loading."""

    def __init__(self, stored: Fp8Format) -> None:
        self._stored = stored
        self._plain = PlainExperts()

    def create_weights(self, layer: nn.Module, num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        self._plain.create_weights(layer, num_experts, hidden, inner, dtype)
        stored = self._stored
        for name, outputs, inputs in (("gate_up", (inner, inner), hidden), ("down", (hidden,), inner)):
            weight = torch.empty(num_experts, sum(outputs), inputs, dtype=FP8)
            layer.register_parameter(name, Fp8Parameter(weight, ShardRule(expert=0, output=1, input=2)))
            scale = make_scale_parameter(stored.sharing, stored.block, outputs, inputs, num_experts)
            layer.register_parameter(name + stored.scale.removeprefix("weight"), scale)
        layer.plain_dtype = dtype  # type: ignore[assignment]

    def process_weights(self, layer: nn.Module) -> None:
        """Dequantize what was loaded since the last call, unless the runner multiplies it as
        fp8."""
        weights: list[Fp8Parameter] = [layer.gate_up, layer.down]  # type: ignore[list-item]
        if weights[0].dtype != FP8:
            return
        scales = [self._scales(layer, name) for name in ("gate_up", "down")]
        selected = self._select_scales(layer, scales)
        if selected is not None:
            for name, values in zip(("gate_up", "down"), selected, strict=True):
                _store_scales(layer, f"{name}_fp8_scale", values)
            return
        dtype: torch.dtype = layer.plain_dtype  # type: ignore[assignment]
        for weight, scale in zip(weights, scales, strict=True):
            dense = torch.empty(weight.shape, dtype=dtype, device=weight.device)
            for numbers, stored, values in zip(dense, weight, scale.values, strict=True):
                numbers.copy_(dequantize(stored, Scales(values, scale.rows, scale.columns), dtype))
            weight.data = dense
        self._plain.process_weights(layer)

    def _scales(self, layer: nn.Module, name: str) -> Scales:
        """The scales of all experts: one dimension more than those of a linear layer."""
        scale: ShardedParameter = getattr(layer, name + self._stored.scale.removeprefix("weight"))
        if self._stored.sharing != "block":
            return Scales(scale.data.flatten(1))
        return Scales(scale.data, scale.rule.output_step, scale.rule.input_step)

    @staticmethod
    def _select_scales(layer: nn.Module, scales: Sequence[Scales]) -> list[torch.Tensor] | None:
        """The scales in a form that the layer's runner takes; None if it takes none, on this device
        and for these sizes."""
        down: torch.Tensor = layer.down  # type: ignore[assignment]
        takes: tuple[Fp8Scale, ...] = getattr(layer, "takes_fp8", ())
        if any(size % BLOCK for size in down.shape[1:]) or not (kernels.can_use_triton(down.device) and kernels.supports_fp8(down.device)):
            return None
        weights: list[torch.Tensor] = [layer.gate_up, down]  # type: ignore[list-item]
        blocks = [_to_block_scales(weight, scale) for weight, scale in zip(weights, scales, strict=True)]
        found = [each for each in blocks if each is not None]
        if "block" in takes and len(found) == len(scales):
            return found
        return [scale.values for scale in scales] if "output" in takes and not any(scale.columns for scale in scales) else None


class RoundedExperts(Fp8Experts):
    """The experts of an unquantized checkpoint, quantized while loading by blocks of 128 x 128; of
    other sizes they stay unquantized."""

    def __init__(self) -> None:
        super().__init__(Fp8Format("block"))

    def create_weights(self, layer: nn.Module, num_experts: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
        self._plain.create_weights(layer, num_experts, hidden, inner, dtype)
        layer.plain_dtype = dtype  # type: ignore[assignment]
        if hidden % BLOCK or inner % BLOCK:
            return
        rule = ShardRule(expert=0, output=1, input=2)
        layer.register_parameter("gate_up", RoundedParameter(torch.empty(num_experts, 2 * inner, hidden, dtype=FP8), rule))
        layer.register_parameter("down", RoundedParameter(torch.empty(num_experts, hidden, inner, dtype=FP8), rule))

    def process_weights(self, layer: nn.Module) -> None:
        if layer.gate_up.dtype == FP8:
            super().process_weights(layer)
        else:
            self._plain.process_weights(layer)

    def _scales(self, layer: nn.Module, name: str) -> Scales:
        weight: RoundedParameter = getattr(layer, name)
        if weight.scales is None:
            experts, outputs, inputs = weight.shape
            return Scales(torch.ones(experts, outputs // BLOCK, inputs // BLOCK, device=weight.device), BLOCK, BLOCK)
        return Scales(weight.scales, BLOCK, BLOCK)


def _to_block_scales(weight: torch.Tensor, scales: Scales) -> torch.Tensor | None:
    """The scales of weights [experts, outputs, inputs] as [experts, outputs / 128, inputs / 128];
    None if they differ inside a block."""
    if scales.columns:
        return scales.values if (scales.rows, scales.columns) == (BLOCK, BLOCK) else None
    outputs = scales.values.unflatten(1, (-1, BLOCK))
    first = outputs[..., :1]
    if not torch.equal(first.expand_as(outputs), outputs):
        return None
    return first.expand(-1, -1, weight.shape[2] // BLOCK).contiguous()


def _store_scales(layer: nn.Module, name: str, scale: torch.Tensor) -> None:
    """Register a buffer, or update it in place: a captured graph reads it at its old address."""
    before: torch.Tensor | None = getattr(layer, name, None)  # type: ignore[assignment]
    if before is None:
        layer.register_buffer(name, scale, persistent=False)
    elif before.data_ptr() != scale.data_ptr():
        before.copy_(scale)


def _init_layer(layer: nn.Module, dtype: torch.dtype) -> None:
    """Initialise the attributes that `finish` sets."""
    layer.plain_dtype = dtype  # type: ignore[assignment]
    layer.product = None  # type: ignore[assignment]
    layer.plain = None  # type: ignore[assignment]
