"""Token embedding and output head, split over the vocabulary. Both may share one parameter (tied
embeddings)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.interfaces.weight_format import CanonicalWeight, WeightScheme
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule
from frame.models.layers.weights.gemms import build_gemm
from frame.models.layers.weights.layer_weight import LayerWeight, describe_layer, register_tensors, replace_values
from frame.models.layers.weights.plain_gemm import InvariantGemm, PlainGemm
from frame.models.layers.weights.stored_weight import ROWS_ON_CPU, StoredWeight, WeightSizes

if TYPE_CHECKING:
    from frame.core.interfaces.adapter_layers import LayerDelta
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.gemm_kernel import Gemm
    from frame.core.interfaces.model import LazyTensor
    from frame.core.interfaces.weight_format import LayerFormat

_ROWS = 16384  # of a tied head that a GPU quantizes, or that is compared, at a time


def split_vocabulary(context: BuildContext, vocab_size: int) -> tuple[int, Range]:
    """(rows on every rank, this rank's range). The last ranks may hold padding, so any vocabulary
    size can be split."""
    rows = -(-vocab_size // context.tp.size)
    start = min(rows * context.tp.rank, vocab_size)
    return rows, Range(vocab_size, start, min(rows, vocab_size - start))


class VocabEmbedding(nn.Module):
    """ids int64 [tokens] -> [tokens, hidden]. Each rank looks up the ids that it holds; the sum
    over the ranks is the embedding."""

    def __init__(self, context: BuildContext, name: str, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tp = context.tp
        rows, self.range = split_vocabulary(context, vocab_size)
        self.weight = ShardedParameter(torch.empty(rows, hidden_size, dtype=context.dtype), ShardRule(output=0))
        self.weight.bind(f"{name}.weight", self.range)
        self.delta: LayerDelta | None = None
        if context.adapters is not None:
            self.delta = context.adapters.add_layer((name,), self.range, (Range.whole(hidden_size),), lookup=True)

    def is_equal(self, stored: LazyTensor) -> bool:
        """Whether this rank's rows of a checkpoint's tensor equal the loaded ones, in their
        dtype."""
        rows, (vocab_size, hidden) = self.range, (self.range.full, self.weight.shape[1])
        if tuple(stored.shape) != (vocab_size, hidden):
            return False
        for start in range(0, rows.size, _ROWS):
            size = min(_ROWS, rows.size - start)
            other = stored[rows.start + start : rows.start + start + size]
            mine = self.weight.data[start : start + size]
            if other.is_meta:  # only the names and shapes of a checkpoint are compared
                continue
            if not other.is_floating_point() or not torch.equal(mine, other.to(mine)):
                return False
        return True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self._add_delta(F.embedding(ids, self.weight), ids)
        local = ids - self.range.start
        foreign = (local < 0) | (local >= self.range.size)
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill_(foreign.unsqueeze(-1), 0)
        return self.tp.all_reduce(self._add_delta(rows, local))

    def _add_delta(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The rows of this rank's `ids`, with the deltas of the tokens' adapters."""
        if self.delta is None or not self.delta.is_active:
            return rows
        return self.delta.expand(rows, self.delta.look_up(ids))


class Head(nn.Module):
    """[n, hidden] -> logits [n, vocab], the full vocabulary on every rank. With `tied`, the weight
    is that of the embedding, unless the checkpoint stores another one (`untie`)."""

    def __init__(self, context: BuildContext, name: str, vocab_size: int, hidden_size: int, tied: VocabEmbedding | None = None) -> None:
        super().__init__()
        self.tp = context.tp
        self.name = name
        self.vocab_size = vocab_size
        self._context = context
        self.delta: LayerDelta | None = None
        if context.adapters is not None:
            self.range = split_vocabulary(context, vocab_size)[1]
            self.delta = context.adapters.add_layer((name,), Range.whole(hidden_size), (self.range,))
        self.weights: LayerWeight | None = None
        self.gemm: Gemm | None = None
        if tied is not None:
            self.weight = tied.weight
            self._layout = None if context.weight_format is None else describe_layer(context, name, "head")
            if self.weight.is_meta and self._layout is not None and self._layout.quantizes:  # the memory plan counts it
                sizes = WeightSizes(hidden_size, hidden_size, (len(self.weight),))
                for weight in StoredWeight(nn.Module(), self._layout, sizes, context.dtype).to_canonical():
                    for key, tensor in weight.tensors.items():
                        self.register_buffer(key, tensor, persistent=False)
            return
        self._create_weights(hidden_size)

    def _create_weights(self, hidden_size: int) -> None:
        rows, span = split_vocabulary(self._context, self.vocab_size)
        self.weights = LayerWeight(self, self._context, (self.name,), Range.whole(hidden_size), (rows,), "head")
        self.weights.bind(0, span, Range.whole(hidden_size))

    @property
    def is_tied(self) -> bool:
        """Whether the weight is that of the embedding."""
        return self.weights is None

    def untie(self) -> None:
        """Replace the embedding's weight by one of the head's own, which is to be loaded."""
        device, hidden_size = self.weight.device, self.weight.shape[1]
        self.gemm = None
        self._buffers.clear()
        del self.weight
        with device:
            self._create_weights(hidden_size)
        for parameter in self.parameters():
            parameter.data.zero_()  # the rows that pad the vocabulary

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to canonical form and select their GEMM."""
        if self.weights is not None:
            self.gemm = self.weights.prepare_gemm()
        elif self._layout is None or not self._layout.quantizes:
            self.gemm = self._share_weight()
        else:
            weight = self._quantize(self._layout)
            built = build_gemm(self._context.gemm_kernels, [weight], self.name)
            for key in weight.tensors:
                setattr(self, key, None)
            if self.gemm is None or not replace_values(self.gemm.tensors, built.tensors, self.name):
                self.gemm = built
            register_tensors(self, "packed", self.gemm.tensors)
        if self.delta is not None:
            self.delta.gemm = self._multiply

    def _multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's logits, without the rows that pad the vocabulary."""
        return self.gemm(hidden)[..., : self.range.size]  # type: ignore[misc]

    def _share_weight(self) -> Gemm:
        """The GEMM with the embedding's weight, by a kernel that makes no copy of it."""
        if self._context.deterministic:
            return InvariantGemm(self.weight)
        weight = CanonicalWeight(WeightScheme("plain"), self.weight.shape[1], self.weight.data)
        for choice in self._context.gemm_kernels:
            if choice.kernel.in_place and choice.multiplies("plain") and choice.kernel.find_obstacle(weight) is None:
                return choice.kernel.prepare(weight)
        return PlainGemm(self.weight)

    def _quantize(self, layout: LayerFormat) -> CanonicalWeight:
        """The embedding's weight, quantized in parts to need little memory besides."""
        rows, inputs = self.weight.shape
        size = ROWS_ON_CPU if self.weight.device.type == "cpu" else _ROWS
        quantized = [layout.quantize_weight(piece, (len(piece),)) for piece in self.weight.data.split(size)]
        return layout.to_canonical(
            {name: torch.cat([piece[name] for piece in quantized]) for name in layout.list_tensors(inputs, (rows,))}, inputs
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.delta is None or not self.delta.is_active:
            logits = self.gemm(hidden)  # type: ignore[misc]
        else:
            shrunk = self.delta.shrink(hidden)
            logits = self.gemm(hidden)  # type: ignore[misc]
            self.delta.expand(logits[..., : self.range.size], shrunk)  # without the rows that pad the vocabulary
        if self.tp.size == 1:
            return logits
        return self.tp.all_gather(logits)[..., : self.vocab_size]
