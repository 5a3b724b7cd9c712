"""The recurrence that gated delta networks, Mamba-2 and Kimi Delta Attention share, in PyTorch.

For each head, with a state S [key, value]: S = decay * S; v = beta * (v - S^T k), or without the
delta rule beta * v; S = S + k v^T; the result is S^T q. Used by the mixer of this folder; the
reference of `frame.kernels.linear_attention`. Must not know a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from frame.kernels.linear.invariant import add_halves, map_elements

if TYPE_CHECKING:
    from frame.kernels.linear_attention import StatePages

CHUNK = 32  # tokens that one triangular system solves together


class Recurrence(NamedTuple):
    """The inputs of one layer's recurrence for some tokens. All but `beta` and `decay` may be of 16
    bits.

    q and k [tokens, key heads, key size]; v [tokens, heads, value size], whose heads share key
    heads in order; log decay float32 [tokens, heads] or, for a decay of each key entry, [tokens,
    heads, key size]; beta float32 [tokens, heads]. `delta`: by the delta rule.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    delta: bool = True

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Recurrence:
        """The inputs with each tensor changed."""
        return Recurrence(change(self.q), change(self.k), change(self.v), change(self.decay), change(self.beta), self.delta)


def run_rows(inputs: Recurrence, states: torch.Tensor, pages: StatePages, lens: list[int], num_decodes: int) -> torch.Tensor:
    """Run every row from its state, and store the new states. -> [tokens, heads, value size].

    `states` float32 [pages, heads, key size, value size], written in place; `lens`: the rows'
    tokens, on the host. The first `num_decodes` rows have one token each.
    """
    outs = []
    if num_decodes:
        first = slice(num_decodes)
        out, new = step(inputs.map(lambda field: field[first]), states.index_select(0, pages.sources[first]))
        states.index_copy_(0, pages.targets[first], new)
        outs.append(out)
    if num_decodes < len(lens):
        outs.append(_extend(inputs, states, pages, lens, num_decodes))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def run_tokens(inputs: Recurrence, states: torch.Tensor, pages: StatePages, lens: list[int]) -> torch.Tensor:
    """As `run_rows`, one token of each row after another, so that no bit depends on the rows and
    on where a step ends."""
    state = states.index_select(0, pages.sources)
    starts = torch.tensor([0, *lens]).cumsum(0)[:-1]
    sizes = torch.tensor(lens)
    out = inputs.v.new_empty(inputs.v.shape)
    for index in range(max(lens)):
        rows = (sizes > index).nonzero().flatten()
        places = (starts[rows] + index).to(state.device)
        rows = rows.to(state.device)
        tokens = inputs.map(partial(torch.index_select, dim=0, index=places))
        out[places], state[rows] = _step_invariant(tokens, state[rows])
    states.index_copy_(0, pages.targets, state)
    return out


def _step_invariant(inputs: Recurrence, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `step`, by operations that round each number alone."""
    q, k = _expand_heads(inputs)
    decay = map_elements(torch.exp, inputs.decay)
    state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
    v = inputs.v.float()
    if inputs.delta:
        v = v - add_halves(state * k[..., None], -2)
    state = state + k[..., None] * (v * inputs.beta[..., None])[..., None, :]
    return add_halves(state * q[..., None], -2).to(inputs.v.dtype), state


def step(inputs: Recurrence, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row: state [rows, heads, key size, value size] -> (results [rows, heads,
    value size] in the dtype of v, new state)."""
    q, k = _expand_heads(inputs)
    decay = inputs.decay.exp()
    state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
    v = inputs.v.float()
    if inputs.delta:
        v = v - torch.einsum("rhkv,rhk->rhv", state, k)
    state = state + torch.einsum("rhk,rhv->rhkv", k, v * inputs.beta[..., None])
    return torch.einsum("rhkv,rhk->rhv", state, q).to(inputs.v.dtype), state


def scan(inputs: Recurrence, state: torch.Tensor, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """`inputs` of [rows, tokens, ...] by chunks, like the chunked form of DeltaNet (arXiv
    2406.06484 §3): -> (results [rows, tokens, heads, value size] float32, new state). A token whose
    k, decay and beta are 0 changes nothing."""
    q, k = _expand_heads(inputs)
    tokens = q.shape[1]
    chunk = min(chunk, tokens)
    chunks = (_chunked(field, chunk) for field in (q, k, inputs.v.float(), inputs.decay, inputs.beta))
    q, k, v, decay, beta = chunks  # [rows, heads, chunks, chunk, ...]
    total = decay.cumsum(3)
    total = total[..., None] if decay.dim() == 4 else total  # [..., chunk, 1 or key size]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later[..., None], -torch.inf).exp()
    if between.shape[-1] == 1:
        qk, kk = ((field @ k.transpose(-1, -2)) * between[..., 0] for field in (q, k))
    else:
        qk, kk = (torch.einsum("...id,...ijd,...jd->...ij", field, between, k) for field in (q, k))
    v = v * beta[..., None]
    read = k * total.exp() * beta[..., None]  # what the delta rule reads of the state before the chunk
    if inputs.delta:
        system = kk * beta[..., None]
        solved = torch.linalg.solve_triangular(system, torch.cat((v, read), -1), upper=False, unitriangular=True)
        v, read = solved.split((v.shape[-1], read.shape[-1]), -1)
    last = total[..., -1:, :]
    written, decayed, queries = k * (last - total).exp(), last[..., 0, :].exp(), q * total.exp()
    outs = []
    for index in range(q.shape[2]):
        new = v[:, :, index]
        if inputs.delta:
            new = new - read[:, :, index] @ state
        outs.append(queries[:, :, index] @ state + qk[:, :, index] @ new)
        state = state * decayed[:, :, index, :, None] + written[:, :, index].transpose(-1, -2) @ new
    return torch.cat(outs, 2)[:, :, :tokens].transpose(1, 2), state


def _extend(inputs: Recurrence, states: torch.Tensor, pages: StatePages, lens: list[int], first: int) -> torch.Tensor:
    """The rows after the first ones, which have one token each, padded to the longest."""
    lens = lens[first:]
    max_length, device = max(lens), states.device
    sizes = torch.tensor(lens, device=device)
    valid = torch.arange(max_length, device=device) < sizes[:, None]
    starts = first + sizes.cumsum(0) - sizes
    places = (starts[:, None] + torch.arange(max_length, device=device)).masked_fill(~valid, first).flatten()

    def padded(field: torch.Tensor) -> torch.Tensor:
        rows = field.index_select(0, places).unflatten(0, (len(lens), max_length))
        return rows.masked_fill(~valid.view(*valid.shape, *[1] * (rows.dim() - 2)), 0)

    out, new = scan(inputs.map(padded), states.index_select(0, pages.sources[first:]))
    states.index_copy_(0, pages.targets[first:], new)
    return out[valid].to(inputs.v.dtype)


def _expand_heads(inputs: Recurrence) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k in float32, one for each head of v."""
    times = inputs.v.shape[-2] // inputs.k.shape[-2]
    q, k = inputs.q.float(), inputs.k.float()
    return (q, k) if times == 1 else (q.repeat_interleave(times, -2), k.repeat_interleave(times, -2))


def _chunked(field: torch.Tensor, chunk: int) -> torch.Tensor:
    """[rows, tokens, heads, ...] -> [rows, heads, chunks, chunk, ...], padded with zeros."""
    missing = -field.shape[1] % chunk
    if missing:
        field = torch.cat((field, field.new_zeros(field.shape[0], missing, *field.shape[2:])), 1)
    return field.transpose(1, 2).unflatten(2, (-1, chunk))
