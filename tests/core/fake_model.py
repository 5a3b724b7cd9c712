"""A model without weights whose next token is a checksum of what the cache holds for its row.

Any mistake in pages, positions, slots or last tokens changes the tokens: `next_token` says what
they must be. `frame.testing.fake_runner` is a whole runner without torch. Must not know the
scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn

from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec
from frame.core.interfaces.batch import ForwardBatch, SelectedTokens
from frame.core.interfaces.build import BuildContext
from frame.core.interfaces.model import CausalLM, LazyTensor, ModelConfig
from tests.model_configs import LLAMA

_WEIGHT = 7919
_PRIME = 10007
FAKE_SPEC = AttentionSpec(layer=0, num_heads=1, num_kv_heads=1, head_dim=2, v_head_dim=1, scale=1.0)


def fake_model_config(vocab_size: int = 128, max_context: int = 256, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The facts of the fake model: one layer, one KV head of size 2 (token id, position) and 1
    (unused)."""
    return replace(
        LLAMA, architecture="FakeForCausalLM", num_layers=1, hidden_size=1, vocab_size=vocab_size, num_heads=1, num_kv_heads=1,
        head_dim=2, v_head_dim=1, max_context=max_context, dtype="float32", eos_token_ids=eos_token_ids, config={},
    )  # fmt: skip


def next_token(tokens: Sequence[int] | np.ndarray, vocab_size: int) -> int:
    """The token that the fake model puts after `tokens`."""
    ids = np.asarray(tokens, np.int64)
    return int(_checksum(ids, np.arange(len(ids))).sum() % vocab_size)


def continuation(tokens: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The `count` tokens that greedy decoding puts after `tokens`."""
    row = list(tokens)
    for _ in range(count):
        row.append(next_token(row, vocab_size))
    return row[len(tokens) :]


def _checksum(ids: Any, positions: Any) -> Any:
    return (ids + 1) * ((positions + 1) * _WEIGHT % _PRIME)


class FakeModel(nn.Module, CausalLM):
    """Stores (token id, position) as keys, sums a checksum over each query's cached tokens, and
    puts a peak on the sum modulo the vocabulary; the logit falls by 1 for each step away from the
    peak, upwards and around.
    """

    supports_token_selection: ClassVar[bool] = True

    def __init__(self, model_config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.vocab_size = model_config.vocab_size

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        keys = torch.stack([batch.token_ids, batch.positions], dim=-1).float().unsqueeze(1)
        batch.store_kv(FAKE_SPEC, keys, keys.new_zeros(len(keys), 1, 1))
        cached = batch.kv.layer(0)[0]
        pages = batch.page_table[batch.request_slots].long()
        rows = cached[pages].reshape(len(pages), -1, 2).long()
        per_token = torch.repeat_interleave(rows, batch.query_lens.long(), dim=0, output_size=batch.num_tokens)
        seen = torch.arange(rows.shape[1], device=rows.device) <= batch.positions.unsqueeze(1)
        sums = torch.where(seen, _checksum(per_token[..., 0], per_token[..., 1]), 0).sum(-1)
        wanted = batch.get(SelectedTokens)
        sums = sums if wanted is None else sums[wanted.indices]
        return (sums % self.vocab_size).float().unsqueeze(-1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return -((torch.arange(self.vocab_size, device=hidden.device) - hidden) % self.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return set()


class FakeAttention(AttentionBackend):
    """A backend that the fake model never asks anything."""

    capabilities = AttentionCapabilities(devices=("cpu",), graphs="decode")

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)

    def plan(self, batch: ForwardBatch) -> Any:
        return batch.num_rows

    def capture_plan(self, batch: ForwardBatch) -> Any:
        return batch.num_rows

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        raise AssertionError("the fake model computes no attention")
