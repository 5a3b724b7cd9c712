"""The weights of one layer's experts, from their stored tensors to the form that is multiplied.

A MoE runner multiplies unquantized experts, and float8 ones that it takes. Other experts are
multiplied by the grouped GEMMs of a GEMM kernel. Depends on no format and no kernel by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.models.layers.packed import can_pack, pack_weight
from frame.models.layers.weights.expert_activation import activate
from frame.models.layers.weights.gemms import build_grouped, find_kernel
from frame.models.layers.weights.layer_weight import count_growth, describe_layer, register_tensors, replace_values, set_buffer
from frame.models.layers.weights.stored_weight import StoredWeight, WeightSizes
from frame.models.layers.weights.tiled_experts import run_tiled

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.gemm_kernel import GroupedGemm
    from frame.core.interfaces.moe import DispatchOutput
    from frame.core.interfaces.weight_format import CanonicalWeight
    from frame.models.layers.parameter import Range
    from frame.models.layers.weights.expert_deltas import ExpertDeltas

# hidden times inner: below this size, multiplying idle experts costs less than sorting tokens
# (measured by benchmarks/moe_cpu.py)
_SMALL_EXPERT = 1 << 17
_SMALL_LAYER = 32 << 20  # bytes of `down`: the packed forms of a layer's experts take three times as much each
_BLOCK = 128  # of scales that runners take


class ExpertWeights:
    """`gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner] of `module`,
    stored under `prefix`. `names`: checkpoint names of an expert's gate, up and down, or of up and
    down alone, whose `gate_up` is [experts, inner, hidden]. `sizes`: (this rank's experts, hidden,
    its range of inner)."""

    def __init__(
        self, module: nn.Module, context: BuildContext, prefix: str, names: tuple[str, ...], sizes: tuple[int, int, Range]
    ) -> None:
        experts, hidden, inner = sizes
        self.module, self.prefix, self.names, self.choices, self.dtype = module, prefix, names, context.gemm_kernels, context.dtype
        self.is_deterministic = context.deterministic
        # the scales of float8 tokens are not tested for batch invariance
        self.takes_fp8 = context.moe_runner.takes_fp8 if context.moe_runner is not None and not context.deterministic else ()
        first, second = (describe_layer(context, f"{prefix}.0.{name}", "experts") for name in (names[0], names[-1]))
        outer = WeightSizes(hidden, hidden, (inner.size,) * (len(names) - 1), experts)
        self.stored = {
            "gate_up": StoredWeight(module, first, outer, context.dtype, "gate_up"),
            "down": StoredWeight(module, second, WeightSizes(inner.size, inner.full, (hidden,), experts), context.dtype, "down"),
        }
        self.version = -1
        self.exposed: dict[str, torch.Tensor] = {}  # the values of parameters that the runner multiplies, by name
        self.grouped: dict[str, GroupedGemm] = {}  # by name of the weight; empty: the runner multiplies

    def bind(self, place: int, expert: int, hidden: Range, inner: Range) -> None:
        """Bind the checkpoint tensors of the model's `expert` to a place of this rank. `inner` is
        this rank's range."""
        *first, down = (f"{self.prefix}.{expert}.{name}" for name in self.names)
        for piece, name in enumerate(first):
            span = type(inner)(inner.full, inner.start, inner.size, piece * inner.size)
            self.stored["gate_up"].bind(piece, name, span, hidden, place)
        self.stored["down"].bind(0, down, hidden, inner, place)

    def count_growth(self) -> int:
        """As `LayerWeight.count_growth`. A runner that takes float8 multiplies what is stored."""
        return count_growth(self.choices, list(self.stored.values()), self.prefix, kept="e4m3" if self.takes_fp8 else "plain")

    def prepare_gemms(self) -> None:
        """Bring the weights that were loaded last into the form that is multiplied."""
        version = sum(stored.version for stored in self.stored.values())
        if version == self.version:
            return
        self.version = version
        canonical = {name: stored.to_canonical() for name, stored in self.stored.items()}
        weights = {name: parts[0] for name, parts in canonical.items()}
        is_whole = all(len(parts) == 1 for parts in canonical.values())
        if is_whole and all(weight.scheme.quant_type == "plain" for weight in weights.values()):
            self._expose({name: weight.quantized for name, weight in weights.items()})
            return
        scales = self._select_scales(weights) if is_whole else None
        if scales is not None:
            for name, weight in weights.items():
                self._expose_tensor(name, weight.quantized)
                self._expose_tensor(f"{name}_fp8_scale", scales[name])
                self.stored[name].release([weight.quantized, scales[name]])
            return
        if all(find_kernel(self.choices, piece, self.prefix).unpacks for parts in canonical.values() for piece in parts):
            dense = {name: _dequantize(parts, self.dtype) for name, parts in canonical.items()}
            for stored in self.stored.values():
                stored.release()
            self._expose(dense)
            return
        for name, parts in canonical.items():
            gemm = build_grouped(self.choices, parts, f"{self.prefix} ({name})")
            if name not in self.grouped or not replace_values(self.grouped[name].tensors, gemm.tensors, self.prefix):
                self.grouped[name] = gemm
            register_tensors(self.module, f"{name}_packed", self.grouped[name].tensors)
            self.stored[name].release(self.grouped[name].tensors)

    def run(self, tokens: DispatchOutput, parts: bool = False) -> torch.Tensor:
        """The experts' weighted sum over dispatched tokens, by the grouped GEMMs; with `parts`,
        its summands [tokens, k, hidden] where they cost less. Its shapes do not depend on the
        routing."""
        mix = getattr(self.grouped["gate_up"], "mix", None)
        mixed: torch.Tensor | None = None if mix is None else mix(self.grouped["down"], tokens, self.module, parts)
        return self.run_sorted(tokens) if mixed is None else mixed

    def run_sorted(self, tokens: DispatchOutput, deltas: ExpertDeltas | None = None) -> torch.Tensor:
        """As `run`, for any weights, one product after another: first those of the pairs' experts,
        in their order, with the deltas of the tokens' adapters."""
        if self.is_deterministic:
            return run_tiled(tokens, self.module, deltas)
        count, top = tokens.ids.shape
        ids = tokens.ids.flatten()
        order = ids.argsort()
        source = order.div(top, rounding_mode="floor")
        ends = ids.new_zeros(self.stored["down"].experts).scatter_add_(0, ids, torch.ones_like(ids)).cumsum(0).to(torch.int32)
        ids = ids[order]
        x = tokens.x.index_select(0, source)
        if deltas is None:
            out = self._multiply("down", activate(self.module, self._multiply("gate_up", x, ends), ids), ends)
        else:
            out = deltas.run_pairs(x, (source, ids), self.module, lambda name, x: self._multiply(name, x, ends))
        if (bias := getattr(self.module, "down_bias", None)) is not None:
            out = out + bias.index_select(0, ids)
        weighed = out.float() * tokens.weights.flatten()[order].unsqueeze(-1)
        total = weighed.new_zeros(count, tokens.x.shape[1])
        return total.index_add_(0, source, weighed).to(tokens.x.dtype)

    def _multiply(self, name: str, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """As `GroupedGemm`, by PyTorch where a runner multiplies."""
        if self.grouped:
            return self.grouped[name](x, ends)
        weights: torch.Tensor = getattr(self.module, name)
        if x.is_cuda and x.dtype == torch.bfloat16 and not any(size % 8 for size in weights.shape[1:]):
            return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return torch.cat([F.linear(rows, weight) for rows, weight in zip(x.split(counts), weights, strict=True)])

    def _expose(self, weights: dict[str, torch.Tensor]) -> None:
        """Give the runner unquantized weights, and small ones in packed form too."""
        for name, weight in weights.items():
            self._expose_tensor(name, weight)
        self.derive()

    def derive(self) -> None:
        """Make the further forms of the exposed weights, which may have been written."""
        module: Any = self.module
        is_plain = not self.grouped and not hasattr(module, "down_fp8_scale")
        if is_plain and not self.is_deterministic and getattr(module, "activation", None) is None:  # the packed forms compute SiLU
            pack_small_experts(module, module.gate_up, module.down)

    def _expose_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Set an attribute that the runner reads, at the address of the one before."""
        parameter = getattr(self.module, name, None)
        if not isinstance(parameter, nn.Parameter):
            set_buffer(self.module, name, tensor)
            return
        before = self.exposed.setdefault(name, tensor)
        replace_values([before], [tensor], self.prefix)
        parameter.data = before

    def _select_scales(self, weights: dict[str, CanonicalWeight]) -> dict[str, torch.Tensor] | None:
        """The float8 scales in a form that the runner takes; None if it takes none, on this device
        and for these sizes."""
        first = weights["down"]
        device = first.quantized.device
        if any(weight.scheme.quant_type != "e4m3" or weight.order is not None or weight.outer is not None for weight in weights.values()):
            return None
        can_run = kernels.can_use_triton(device) and kernels.supports_fp8(device)
        if any(size % _BLOCK for size in first.quantized.shape[1:]) or not can_run:
            return None
        blocks = {name: _to_block_scales(weight) for name, weight in weights.items()}
        block_scales = {name: scales for name, scales in blocks.items() if scales is not None}
        if "block" in self.takes_fp8 and len(block_scales) == len(weights):
            return block_scales
        if "output" in self.takes_fp8 and all(weight.scheme.group == (1, 0) for weight in weights.values()):
            return {name: weight.scales[..., 0].contiguous() for name, weight in weights.items() if weight.scales is not None}
        return None


def pack_small_experts(layer: nn.Module, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    """Give small experts on a CPU with packed weights two more forms, from which the runner
    selects.

    All experts concatenated, for small batches, as `packed_gate_up` (of the matrix [experts * 2 *
    inner, hidden]) and `packed_down` ([hidden, experts * inner]); and one by one, as the lists
    `packed_each_gate_up` and `packed_each_down`.
    """
    all_gate_up, all_down = gate_up.flatten(0, 1), down.transpose(0, 1).flatten(1)
    if down[0].numel() <= _SMALL_EXPERT and down.nbytes <= _SMALL_LAYER and can_pack(all_gate_up) and can_pack(all_down):
        layer.packed_gate_up, layer.packed_down = pack_weight(all_gate_up), pack_weight(all_down)
        layer.packed_each_gate_up = [pack_weight(piece) for piece in gate_up]  # type: ignore[assignment]
        layer.packed_each_down = [pack_weight(piece) for piece in down]  # type: ignore[assignment]


def _dequantize(parts: Sequence[CanonicalWeight], dtype: torch.dtype) -> torch.Tensor:
    """[experts, outputs, inputs], one expert after another, to need little memory besides."""
    first = parts[0].quantized
    dense = torch.empty(len(first), sum(piece.outputs for piece in parts), parts[0].inputs, dtype=dtype, device=first.device)
    for expert, numbers in enumerate(dense):
        numbers.copy_(torch.cat([piece.expert(expert).dequantize(dtype) for piece in parts]))
    return dense


def _to_block_scales(weight: CanonicalWeight) -> torch.Tensor | None:
    """The scales of weights [experts, outputs, inputs] as [experts, outputs / 128, inputs / 128];
    None if they differ inside a block."""
    scales = weight.scales
    assert scales is not None
    if weight.scheme.group == (_BLOCK, _BLOCK):
        return scales
    if weight.scheme.group != (1, 0):
        return None
    outputs = scales[..., 0].unflatten(1, (-1, _BLOCK))
    first = outputs[..., :1]
    if not torch.equal(first.expand_as(outputs), outputs):
        return None
    return first.expand(-1, -1, weight.inputs // _BLOCK).contiguous()
