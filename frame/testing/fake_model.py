"""A model without weights whose next token is a checksum of what the cache holds for its row.

Any mistake in pages, positions, slots or last tokens changes the tokens: `next_token` says what they must be.
`FakeRunner` is the same without torch, for tests and benchmarks of schedulers, engines and servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn

from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec
from frame.core.interfaces.batch import ForwardBatch, ScheduledBatch, StepResult
from frame.core.interfaces.build import BuildContext
from frame.core.interfaces.model import CausalLM, LazyTensor, ModelFacts
from frame.core.interfaces.runner import ModelRunner

_WEIGHT = 7919
_PRIME = 10007
FAKE_SPEC = AttentionSpec(layer=0, num_heads=1, num_kv_heads=1, head_dim=2, v_head_dim=1, scale=1.0)


def fake_facts(vocab_size: int = 128, max_context: int = 256, eos_token_ids: tuple[int, ...] = ()) -> ModelFacts:
    """The facts of the fake model: one layer, one KV head of size 2 (token id, position) and 1 (unused)."""
    return ModelFacts(
        architecture="FakeForCausalLM",
        num_layers=1,
        hidden_size=1,
        vocab_size=vocab_size,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        v_head_dim=1,
        kind="mha",
        latent=None,
        max_context=max_context,
        dtype="float32",
        eos_token_ids=eos_token_ids,
    )


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
    """Stores (token id, position) as keys, sums a checksum over each query's cached tokens, and puts a peak on the sum modulo the vocabulary.

    The logit falls by 1 for each step away from the peak, upwards and around.
    """

    def __init__(self, facts: ModelFacts, context: BuildContext) -> None:
        super().__init__()
        self.vocab_size = facts.vocab_size

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        keys = torch.stack([batch.token_ids, batch.positions], dim=-1).float().unsqueeze(1)
        batch.store_kv(FAKE_SPEC, keys, torch.zeros(len(keys), 1, 1))
        cached = batch.kv.layer(0)[0]
        lens = batch.query_lens.long()
        pages = batch.page_table[batch.request_slots].long()
        rows = cached[pages].reshape(len(pages), -1, 2).long()
        per_token = torch.repeat_interleave(rows, lens, dim=0)
        seen = torch.arange(rows.shape[1]) <= batch.positions.unsqueeze(1)
        sums = torch.where(seen, _checksum(per_token[..., 0], per_token[..., 1]), 0).sum(-1)
        return (sums % self.vocab_size).float().unsqueeze(-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return -((torch.arange(self.vocab_size) - hidden) % self.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return set()


class FakeAttention(AttentionBackend):
    """A backend that the fake model never asks anything."""

    capabilities = AttentionCapabilities(devices=("cpu",))

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)

    def plan(self, batch: ForwardBatch) -> Any:
        return batch.num_rows

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        raise AssertionError("the fake model computes no attention")


@dataclass(frozen=True, slots=True)
class FakeStep:
    """A step that is done."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class FakeRunner(ModelRunner):
    """Greedy steps of the fake model in numpy: the same tokens, from the same use of pages and slots.

    The cache holds each token's running checksum, so that a step reads one number a row; a page or position that is wrong changes it.
    """

    def __init__(self, num_slots: int, num_pages: int, page_size: int, max_context: int, vocab_size: int = 128) -> None:
        self.vocab_size = vocab_size
        self._page_size = page_size
        self._cache = np.full(num_pages * page_size, -1, np.int64)
        self._table = np.zeros((num_slots, -(-max_context // page_size) + 1), np.int32)
        self._last = np.zeros(num_slots, np.int64)

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        self._table[batch.new_pages[:, 0], batch.new_pages[:, 1]] = batch.new_pages[:, 2]
        decodes = batch.num_decodes
        slots, computed = batch.slots.astype(np.int64), batch.num_computed.astype(np.int64)
        sums = np.empty(len(slots), np.int64)
        if decodes:
            sums[:decodes] = self._advance(slots[:decodes], computed[:decodes], self._last[slots[:decodes]])
        start = 0
        for row in range(decodes, len(slots)):
            length = int(batch.num_scheduled[row])
            ids = batch.token_ids[start : start + length].astype(np.int64)
            start += length
            sums[row] = self._extend(slots[row], int(computed[row]), ids)
        sampled = sums[batch.samples] % self.vocab_size
        self._last[slots[batch.samples]] = sampled
        return FakeStep(StepResult(step=batch.step, token_ids=sampled.astype(np.int32)))

    def close(self) -> None:
        return

    def _places(self, slots: Any, positions: np.ndarray) -> np.ndarray:
        return self._table[slots, positions // self._page_size].astype(np.int64) * self._page_size + positions % self._page_size

    def _advance(self, slots: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
        sums = self._cache[self._places(slots, positions - 1)] + _checksum(ids, positions)
        self._cache[self._places(slots, positions)] = sums
        return sums

    def _extend(self, slot: int, start: int, ids: np.ndarray) -> int:
        positions = np.arange(start, start + len(ids))
        before = int(self._cache[self._places(slot, np.array([start - 1]))][0]) if start else 0
        sums = before + np.cumsum(_checksum(ids, positions))
        self._cache[self._places(slot, positions)] = sums
        return int(sums[-1])
