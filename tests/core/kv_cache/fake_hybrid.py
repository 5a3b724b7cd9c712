"""A model with layers of three cache groups, whose next token is a checksum of what each group
holds: all tokens, a window, and a recurrent state.

A page that was freed too early, a stale state or a wrong page table changes the tokens:
`continue_hybrid` says what they must be. Must not know the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from frame.core.interfaces.batch import ForwardBatch, SequenceStates
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.interfaces.model import CausalLM, LazyTensor

_PRIME = 10007
TOKENS, WINDOW, STATE = 0, 1, 2  # layers


class _Layer(nn.Module):
    """A layer that declares a cache."""

    def __init__(self, cache: LayerCache) -> None:
        super().__init__()
        self.cache = cache


class FakeHybrid(nn.Module, CausalLM):
    """Stores token ids. The state is a polynomial hash of the sequence, one number."""

    def __init__(self, vocab_size: int, window: int) -> None:
        super().__init__()
        ids = (CacheTensor((1,), torch.int64),)
        self.vocab_size = vocab_size
        self.window = window
        self.layers = nn.ModuleList(
            [
                _Layer(LayerCache(TOKENS, "tokens", ids)),
                _Layer(LayerCache(WINDOW, "window", ids, window)),
                _Layer(LayerCache(STATE, "snapshot", ids)),
            ]
        )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        total = self._checksum(batch, TOKENS, 1 << 30) + self._checksum(batch.view(WINDOW), WINDOW, self.window)
        return ((total + self._recur(batch)) % self.vocab_size).float().unsqueeze(-1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return -((torch.arange(self.vocab_size, device=hidden.device) - hidden) % self.vocab_size)

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return set()

    def _checksum(self, batch: ForwardBatch, layer: int, window: int) -> torch.Tensor:
        """Of each token: the sum over the cached tokens that it sees."""
        (cached,) = batch.kv.layer(layer)
        cached.view(-1).index_copy_(0, batch.kv_slots, batch.token_ids)
        rows = cached[batch.page_table[batch.request_slots].long()].flatten(1)
        rows = torch.repeat_interleave(rows, batch.query_lens.long(), dim=0, output_size=batch.num_tokens)
        at, own = torch.arange(rows.shape[1]), batch.positions.unsqueeze(1)
        return torch.where((at <= own) & (at > own - window), (rows + 1) * (at % 13 + 1), 0).sum(-1)

    def _recur(self, batch: ForwardBatch) -> torch.Tensor:
        states = batch.get(SequenceStates)
        assert states is not None
        (cached,) = batch.kv.layer(STATE)
        hashes = []
        for row, ids in enumerate(batch.token_ids.split(batch.query_lens.tolist())):
            state = cached[states.pages[row], 0].clone()
            for token in ids:
                state = (state * 31 + token + 1) % _PRIME
                hashes.append(state)
            cached[states.pages[row], 0] = state
        return torch.stack(hashes)


def continue_hybrid(tokens: Sequence[int], count: int, vocab_size: int, window: int) -> list[int]:
    """The `count` tokens that greedy decoding of a `FakeHybrid` puts after `tokens`."""
    row = list(tokens)
    for _ in range(count):
        weighted = [(token + 1) * (at % 13 + 1) for at, token in enumerate(row)]
        state = 0
        for token in row:
            state = (state * 31 + token + 1) % _PRIME
        row.append((sum(weighted) + sum(weighted[-window:]) + state) % vocab_size)
    return row[len(tokens) :]
