"""Random inputs of a recurrence over ragged rows, and its results token by token in float64.

Used by tests of the PyTorch form and of the kernel.
"""

from __future__ import annotations

import torch

from frame.models.layers.linear_attention.recurrence import Recurrence

CASES = {  # key heads, heads, key size, value size, decay of each key entry, delta rule
    "gated delta": (2, 4, 16, 24, False, True),
    "kimi delta": (3, 3, 16, 16, True, True),
    "mamba2": (1, 4, 24, 8, False, False),
}
LENS = [1, 1, 70, 3, 33]  # two decodes, then extends
DECODES = 2


def draw(case: str, seed: int = 0, lens: list[int] | None = None) -> tuple[Recurrence, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(inputs, states of more pages than rows, pages, query_starts)."""
    key_heads, heads, keys, values, by_key, delta = CASES[case]
    lens = LENS if lens is None else lens
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = sum(lens)
    q, k = (normal(tokens, key_heads, keys) / keys**0.5 for _ in range(2))
    decay = -torch.rand(tokens, heads, *([keys] if by_key else []), generator=generator)
    inputs = Recurrence(q, k, normal(tokens, heads, values), decay, torch.rand(tokens, heads, generator=generator), delta)
    pages = torch.randperm(len(lens) + 2, generator=generator)[: len(lens)]
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return inputs, normal(len(lens) + 2, heads, keys, values), pages, starts


def compute_by_definition(
    inputs: Recurrence, states: torch.Tensor, pages: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(results, states after the step), float64."""
    states, outs = states.double(), []
    times = inputs.v.shape[1] // inputs.k.shape[1]
    for row, page in enumerate(pages.tolist()):
        state = states[page]
        for token in range(int(starts[row]), int(starts[row + 1])):
            q, k = (part[token].double().repeat_interleave(times, 0) for part in (inputs.q, inputs.k))
            decay = inputs.decay[token].double().exp()
            state = state * decay.reshape(len(decay), -1, 1)
            new = inputs.v[token].double()
            if inputs.delta:
                new = new - torch.einsum("hkv,hk->hv", state, k)
            state = state + torch.einsum("hk,hv->hkv", k, new * inputs.beta[token].double()[:, None])
            outs.append(torch.einsum("hkv,hk->hv", state, q))
        states[page] = state
    return torch.stack(outs), states
