"""Linear layers of a tensor-parallel model: replicated, column-parallel, row-parallel, and
query-key-value (Megatron-LM, arXiv 1909.08053).

A layer has the whole sizes, this rank's range and the checkpoint names. Its `LayerWeight` stores
and multiplies the values; its `LayerDelta` (`frame.adapters.pooled_layers`) adds those of adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from frame.core.errors import ConfigurationError
from frame.core.interfaces.collective import SupportsReduceMatmul
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule
from frame.models.layers.weights.layer_weight import LayerWeight

if TYPE_CHECKING:
    from frame.core.interfaces.adapter_layers import LayerDelta
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.collective import Collective
    from frame.core.interfaces.gemm_kernel import Gemm
    from frame.core.interfaces.weight_format import LayerKind


class Linear(nn.Module):
    """A linear layer whose outputs are the concatenation of `outputs`, read from the checkpoint
    layers `names` (same order).

    `inputs` and each of `outputs` are this rank's ranges of the whole layer. x [..., inputs.size]
    -> [..., sum of output sizes].
    """

    def __init__(
        self,
        context: BuildContext,
        names: Sequence[str],
        inputs: Range,
        outputs: Sequence[Range],
        bias: bool = False,
        kind: LayerKind = "linear",
    ) -> None:
        super().__init__()
        self.weights = LayerWeight(self, context, names, inputs, [span.size for span in outputs], kind)
        self.gemm: Gemm | None = None
        self.delta: LayerDelta | None = None
        if context.adapters is not None and kind != "head":  # whose rows are sequences, not tokens
            self.delta = context.adapters.add_layer(names, inputs, outputs)
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = ShardedParameter(torch.empty(sum(span.size for span in outputs), dtype=context.dtype), ShardRule(output=0))
        local = 0
        for part, (name, span) in enumerate(zip(names, outputs, strict=True)):
            placed = Range(span.full, span.start, span.size, local)
            self.weights.bind(part, placed, inputs)
            if isinstance(self.bias, ShardedParameter):
                self.bias.bind(f"{name}.bias", placed)
            local += span.size

    def process_weights_after_loading(self) -> None:
        """Select the GEMM of the loaded weights."""
        self.gemm = self.weights.prepare_gemm()
        if self.delta is not None:
            self.delta.gemm = self.gemm

    @property
    def is_adapted(self) -> bool:
        """Whether a row of this step may have an adapter."""
        return self.delta is not None and self.delta.is_active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.bias)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product, with the deltas of the rows' adapters."""
        if self.delta is None or not self.delta.is_active:
            return self.gemm(x, bias)  # type: ignore[misc]
        shrunk = self.delta.shrink(x)
        return self.delta.expand(self.gemm(x, bias), shrunk, bias)  # type: ignore[misc]

    def apply_gated(self, x: torch.Tensor) -> torch.Tensor | None:
        """SiLU(first half of the outputs) * second half, fused; None where the GEMM has no fused
        form for these rows, or, if a row has an adapter, the deltas have none."""
        if self.delta is not None and self.delta.is_active:
            if not self.delta.can_gate:
                return None
            shrunk = self.delta.shrink(x)
            return self.delta.expand_gated(self.gemm(x, self.bias), shrunk, self.bias)  # type: ignore[misc]
        gated = getattr(self.gemm, "multiply_gated", None)
        return None if gated is None else gated(x, self.bias)  # type: ignore[no-any-return]

    def release(self) -> None:
        """Free the weights; a later load and `process_weights_after_loading` make them again."""
        self.gemm = self.weights.gemm = None
        for parameter in self.parameters(recurse=False):
            if isinstance(parameter, ShardedParameter):
                parameter.release()
        for name, _ in list(self.named_buffers(recurse=False)):
            setattr(self, name, None)


class ReplicatedLinear(Linear):
    """The whole layer on every rank, without communication."""

    def __init__(
        self, context: BuildContext, names: Sequence[str], input_size: int, output_sizes: Sequence[int], bias: bool = False
    ) -> None:
        super().__init__(context, names, Range.whole(input_size), [Range.whole(size) for size in output_sizes], bias)


class ColumnLinear(Linear):
    """Outputs split over the ranks. Several checkpoint layers with the same input make one GEMM
    (gate and up)."""

    def __init__(
        self, context: BuildContext, names: Sequence[str], input_size: int, output_sizes: Sequence[int], bias: bool = False
    ) -> None:
        outputs = [split_range(context, f"{name} outputs", size) for name, size in zip(names, output_sizes, strict=True)]
        super().__init__(context, names, Range.whole(input_size), outputs, bias)


class QKVLinear(Linear):
    """Queries, keys and values in one GEMM, split by heads. With more ranks than key-value
    heads, those heads are replicated. `gated`: each query is followed by a gate of its size.

    x [tokens, hidden] -> [tokens, (num_heads + 2 * num_kv_heads) * head_dim] of this rank's heads.
    """

    def __init__(
        self, context: BuildContext, names: Sequence[str], input_size: int, heads: HeadLayout, bias: bool = False, gated: bool = False
    ) -> None:
        queries, *others = heads.get_ranges()
        first = Range(2 * queries.full, 2 * queries.start, 2 * queries.size) if gated else queries
        super().__init__(context, names, Range.whole(input_size), (first, *others), bias)


@dataclass(frozen=True, slots=True)
class RankSum:
    """A layer's result before the sum over the tensor-parallel ranks, so that the next norm can
    join the sum, and several parts of a layer need one.

    `summand` [tokens, hidden]: this rank's. All ranks of the group have one.
    """

    summand: torch.Tensor
    group: Collective

    def __len__(self) -> int:
        return len(self.summand)

    def index_select(self, dim: int, index: torch.Tensor) -> RankSum:
        """Those rows of the sum."""
        return RankSum(self.summand.index_select(dim, index), self.group)


def add_up(x: torch.Tensor | RankSum) -> torch.Tensor:
    """The tensor, or the sum over the ranks."""
    if not isinstance(x, RankSum):
        return x
    return x.group.all_reduce(x.summand) if len(x) else x.summand


def defer_sum(module: nn.Module) -> None:
    """Let a module return its result as a `RankSum`, if it can."""
    defer = getattr(module, "defer_sum", None)
    if defer is not None:
        defer()


class RowLinear(Linear):
    """Inputs split over the ranks; the result is summed over the ranks, here or by the caller."""

    def __init__(self, context: BuildContext, name: str, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(context, (name,), split_range(context, f"{name} inputs", input_size), (Range.whole(output_size),), bias)
        self.tp = context.tp
        self.columns = output_size
        self._reduce_matmul = self.tp.reduce_matmul if self.tp.size > 1 and isinstance(self.tp, SupportsReduceMatmul) else None
        self.sends_pieces = True  # of large results, while others are computed; False: another summand joins the sum
        self._defers = False

    def defer_sum(self) -> None:
        """Return a `RankSum` on several ranks."""
        self._defers = self.tp.size > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor | RankSum:  # type: ignore[override]
        if self._reduce_matmul is not None and self.sends_pieces and x.dim() == 2 and not torch.compiler.is_compiling():
            # pieces are other rows than those of the step, which have adapters
            total = None if self.is_adapted else self._reduce_matmul(self._compute_summand, x, self.columns)
            if total is not None:
                return total
        out = self._compute_summand(x)
        if self._defers and not torch.compiler.is_compiling():
            return RankSum(out, self.tp)
        return self.tp.all_reduce(out) if self.tp.size > 1 else out

    def _compute_summand(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.bias if self.tp.rank == 0 else None)


class HeadLinear(Linear):
    """A small linear layer of a classification head: replicated, and unquantized by formats that
    exclude heads."""

    def __init__(self, context: BuildContext, name: str, input_size: int, output_size: int, bias: bool = True) -> None:
        super().__init__(context, (name,), Range.whole(input_size), (Range.whole(output_size),), bias, kind="head")


class HeadLayout:
    """The attention heads of this rank. `num_heads` and `num_kv_heads` are the rank's own
    counts."""

    def __init__(self, context: BuildContext, num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int | None = None) -> None:
        rank, ranks = context.tp.rank, context.tp.size
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim or head_dim
        self.queries = split_range(context, "attention heads", num_heads)
        if num_kv_heads >= ranks:
            self.keys = split_range(context, "key-value heads", num_kv_heads)
        else:
            if ranks % num_kv_heads:
                raise ConfigurationError(
                    f"{num_kv_heads} key-value heads cannot be replicated over {ranks} ranks: "
                    f"set parallel.tp to a multiple of {num_kv_heads}."
                )
            self.keys = Range(num_kv_heads, rank * num_kv_heads // ranks, 1)
        self.num_heads = self.queries.size
        self.num_kv_heads = self.keys.size

    def get_ranges(self) -> list[Range]:
        """The output ranges of the query, key and value layers."""
        return [scale_range(self.queries, self.head_dim), scale_range(self.keys, self.head_dim), scale_range(self.keys, self.v_head_dim)]


def split_range(context: BuildContext, what: str, size: int) -> Range:
    """This rank's range of `size`. Raises ConfigurationError if `size` is not a multiple of the
    number of ranks."""
    if size % context.tp.size:
        raise ConfigurationError(
            f"{size} {what} cannot be split into {context.tp.size} equal parts: set parallel.tp to a divisor of {size}."
        )
    return Range.split(size, context.tp.rank, context.tp.size)


def scale_range(heads: Range, size: int) -> Range:
    """The range of the entries of `heads`, each of `size` entries."""
    return Range(heads.full * size, heads.start * size, heads.size * size)
