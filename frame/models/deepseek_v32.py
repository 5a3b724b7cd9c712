"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention (DSA, arXiv 2512.02556). An indexer of
each layer scores all keys, and attention reads the best `index_topk` of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.core.errors import ConfigurationError
from frame.core.interfaces.batch import SparseKeys
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.interfaces.model import find_dense_layers
from frame.kernels.linear.invariant import InvariantMatmul, add_halves
from frame.models.deepseek_v3 import DeepseekV3ForCausalLM
from frame.models.layers.linear import ReplicatedLinear
from frame.models.layers.mla import LatentAttention
from frame.models.layers.norm import LayerNorm
from frame.models.layers.parameter import ShardedParameter
from frame.models.layers.rotary import Rotary, read_rope_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext

_NORM_EPS = 1e-6
_SCORES = 1 << 25  # numbers that scoring some tokens may allocate at a time


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """`mlp_layer_types` may say which layers are dense. In GLM-5 some layers have no indexer: they
    attend to the keys that the last indexer before them selected."""

    def build_rotary(self) -> Rotary:
        config = self.model_config.config
        if not config.get("q_lora_rank"):
            raise ConfigurationError("sparse attention without q_lora_rank is not implemented here: check config.json.")
        self.indexer: Indexer | None = None  # of the layer built last that has one
        interleaved = bool(config.get("indexer_rope_interleave", self.model_config.architecture.startswith("Glm")))
        self.index_rotary = Rotary(self.context, config["qk_rope_head_dim"], read_rope_parameters(self.model_config), interleaved)
        return super().build_rotary()

    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        attention: LatentAttention = super().build_attention(layer, prefix)  # type: ignore[assignment]
        is_shared = not has_indexer(self.model_config.config, layer)
        if not is_shared:
            self.indexer = Indexer(self.context, self.model_config.config, layer, f"{prefix}.indexer", self.index_rotary)
        if self.indexer is None:
            raise ConfigurationError(f"layer {layer} shares the indexer of an earlier layer, and there is none: check config.json.")
        attention.select_keys = self.indexer.get_selected if is_shared else self.indexer
        return attention

    def is_dense(self, layer: int) -> bool:
        return layer in find_dense_layers(self.model_config.config, self.model_config.num_layers)


class Indexer(nn.Module):
    """Scores keys by several small heads, sum over heads of weight * ReLU(q · k), and selects the
    best for each token. A constant factor of the scores is left out. `prefix` is the checkpoint
    name that holds wq_b, wk, k_norm and weights_proj. Whole on every rank, so that all ranks select
    the same keys."""

    def __init__(self, context: BuildContext, config: Mapping[str, Any], layer: int, prefix: str, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.size, self.top_k = config["index_n_heads"], config["index_head_dim"], config["index_topk"]
        hidden = config["hidden_size"]
        self.rotary = (rotary,)  # a tuple, so that torch registers it once
        self.q_proj = ReplicatedLinear(context, (f"{prefix}.wq_b",), config["q_lora_rank"], (self.heads * self.size,))
        self.k_proj = ReplicatedLinear(context, (f"{prefix}.wk",), hidden, (self.size,))
        self.k_norm = LayerNorm(context, f"{prefix}.k_norm", self.size, _NORM_EPS)
        self.weight = ShardedParameter(torch.empty(self.heads, hidden, dtype=context.dtype))
        self.weight.bind(f"{prefix}.weights_proj.weight")
        # attention layers, and those of a drafter, have the numbers from 0 on
        self.cache = LayerCache(-1 - layer, "sidecar", (CacheTensor((self.size,), context.dtype),))
        self.has_kernels = kernels.can_use_triton(context.device)
        self.selected: SparseKeys | None = None
        self._is_deterministic = context.deterministic
        self._always_selects = context.deterministic and context.limits.max_context > self.top_k
        self._invariant: InvariantMatmul | None = None

    def process_weights_after_loading(self) -> None:
        """Test the product of the weights of heads."""
        if self._is_deterministic and self._invariant is None:
            self._invariant = InvariantMatmul(self.weight.data)

    def forward(self, x: torch.Tensor, q_input: torch.Tensor, batch: ForwardBatch) -> SparseKeys | None:
        """Store the keys of this step and select. x [tokens, hidden], q_input [tokens,
        q_lora_rank]. None: no row is longer than the selection."""
        (cached,) = batch.kv.layer(self.cache.layer)
        keys = self._rotate(self.k_norm(self.k_proj(x))[:, None], batch)[:, 0]
        cached.view(-1, self.size).index_copy_(0, batch.kv_slots, keys.to(cached.dtype))
        self.selected = None
        max_length = int(batch.host.seq_lens.max(initial=0))
        if self._always_selects:  # no token takes another kernel because others see more keys
            max_length = max(max_length, self.top_k + 1)
        if max_length > self.top_k:
            q = self._rotate(self.q_proj(q_input).unflatten(-1, (self.heads, self.size)), batch)
            weights = F.linear(x, self.weight) if self._invariant is None else self._invariant(x)
            self.selected = SparseKeys(self._select(q, weights, cached, batch, max_length))
        return self.selected

    def get_selected(self, x: torch.Tensor, q_input: torch.Tensor, batch: ForwardBatch) -> SparseKeys | None:
        """What `forward` selected in this step."""
        return self.selected

    def _rotate(self, heads: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """heads [tokens, heads, size], which may be overwritten."""
        (rotary,) = self.rotary
        if not self.has_kernels:
            return rotary.rotate(heads, rotary.gather_rows(batch.positions))
        from frame.kernels.elementwise.rope import rotate_

        rotate_(heads[..., : rotary.dim], batch.positions, rotary.table, rotary.interleaved)
        return heads

    def _select(self, q: torch.Tensor, weights: torch.Tensor, cached: torch.Tensor, batch: ForwardBatch, max_length: int) -> torch.Tensor:
        """As `select_keys`, for some tokens at a time."""
        owners, chosen_slots = batch.request_slots, []
        if batch.num_decodes < len(q):
            owners = torch.repeat_interleave(owners, batch.query_lens, output_size=len(q))
        select, numbers = select_keys, max_length * self.size
        if self.has_kernels:
            from frame.kernels.index_scores import BINS
            from frame.kernels.index_scores import select_keys as select  # type: ignore[assignment]

            numbers = max_length + BINS
        elif self._is_deterministic:
            select, numbers = select_invariant_keys, self.heads * max_length * self.size
        step = max(1, _SCORES // numbers)
        for start in range(0, len(q), step):
            span = slice(start, start + step)
            positions = batch.positions[span]
            chosen_slots.append(select(q[span], weights[span], cached, batch.page_table, owners[span], positions, max_length, self.top_k))
        return torch.cat(chosen_slots) if len(chosen_slots) > 1 else chosen_slots[0]


def select_keys(
    q: torch.Tensor, weights: torch.Tensor, cached: torch.Tensor, table: torch.Tensor, owners: torch.Tensor,
    positions: torch.Tensor, width: int, top_k: int,
) -> torch.Tensor:  # fmt: skip
    """-> KV slots, int64 [tokens, top_k]: the keys of each token with the best scores; -1 where it
    sees fewer.

    q [tokens, heads, size], weights [tokens, heads], cached [pages, page size, size], table
    int32 [slots, pages of a row], owners int64 [tokens] (the token's row of the table), positions
    int64 [tokens]; width: a bound of the keys that a token sees, above `top_k`.
    """
    size = cached.shape[1]
    rows = table[owners, : -(-width // size)]
    best, places = score_keys(q, weights, cached, rows, positions).topk(top_k, -1)
    slots = rows.gather(1, places // size).long() * size + places % size
    return slots.masked_fill_(best == -torch.inf, -1)


def select_invariant_keys(
    q: torch.Tensor, weights: torch.Tensor, cached: torch.Tensor, table: torch.Tensor, owners: torch.Tensor,
    positions: torch.Tensor, width: int, top_k: int,
) -> torch.Tensor:  # fmt: skip
    """As `select_keys` for the batch-invariant mode: sums in an order that depends on no number of
    keys, and of equal scores the first, in the order of the keys."""
    size = cached.shape[1]
    rows = table[owners, : -(-width // size)]
    keys = cached.index_select(0, rows.flatten()).view(len(q), -1, 1, q.shape[2]).float()
    dots = F.relu(add_halves(q.float()[:, None] * keys, -1))
    scores = add_halves(weights.float()[:, None] * dots, -1)
    hidden = torch.arange(keys.shape[1], device=q.device) > positions[:, None]
    order = scores.masked_fill_(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    places = order.sort(-1).values
    slots = rows.gather(1, places // size).long() * size + places % size
    return slots.masked_fill_(places > positions[:, None], -1)


def score_keys(q: torch.Tensor, weights: torch.Tensor, cached: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Scores of all keys in the pages of each token's row, int32 [tokens, pages], -inf after its
    position. -> float32 [tokens, keys]."""
    keys = cached.index_select(0, rows.flatten()).view(len(q), -1, q.shape[2]).float()
    scores = torch.einsum("th,thk->tk", weights.float(), F.relu(q.float() @ keys.transpose(1, 2)))
    return scores.masked_fill_(torch.arange(keys.shape[1], device=q.device) > positions[:, None], -torch.inf)


def has_indexer(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has an indexer of its own, by `indexer_types`, the letters F and S of
    `index_topk_pattern`, or one in every `index_topk_freq` layers."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds and layer < len(kinds):
        return kinds[layer] in ("full", "F")
    frequency = max(config.get("index_topk_freq") or 1, 1)
    return max(layer - config.get("index_skip_topk_offset", 2) + 1, 0) % frequency == 0
