"""frame-tiny as it is trained: the DeepSeek-V3 architecture in plain PyTorch.

Multi-head latent attention, one dense layer, then mixture-of-experts layers with grouped sigmoid
routing and a shared expert, and one multi-token-prediction layer. All experts are computed for
every token and weighted by the routing, which is cheaper than dispatch for eight experts of width
160. It has no KV cache; `frame/models` serves the same weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model; the defaults are frame-tiny."""

    vocabulary: int = 2048
    hidden: int = 256
    layers: int = 4
    dense_layers: int = 1
    dense_width: int = 704
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 128
    nope: int = 32
    rope: int = 32
    value: int = 32
    experts: int = 8
    experts_per_token: int = 2
    groups: int = 4
    groups_per_token: int = 2
    expert_width: int = 160
    routed_scale: float = 2.5
    rope_theta: float = 10000.0
    positions: int = 8192
    epsilon: float = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        full = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + self.epsilon)
        return (full * self.weight.float()).to(x.dtype)


def rope_tables(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position and frequency, `[length, rope / 2]`, in float32."""
    powers = torch.arange(0, shape.rope, 2, device=device, dtype=torch.float32) / shape.rope
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * shape.rope_theta**-powers
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the interleaved pairs (x0, x1), (x2, x3), … of the last dimension; x is `[batch,
    heads, length, rope]`."""
    cosine, sine = tables
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat((even * cosine - odd * sine, odd * cosine + even * sine), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention, expanded to full heads (the training form)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        head = shape.nope + shape.rope
        self.q_a_proj = nn.Linear(shape.hidden, shape.q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(shape.q_rank, 1e-6)
        self.q_b_proj = nn.Linear(shape.q_rank, shape.heads * head, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(shape.hidden, shape.kv_rank + shape.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, 1e-6)
        self.kv_b_proj = nn.Linear(shape.kv_rank, shape.heads * (shape.nope + shape.value), bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.value, shape.hidden, bias=False)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        shape, (batch, length, _) = self.shape, x.shape
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, shape.heads, -1).transpose(1, 2)
        q_nope, q_rope = queries.split([shape.nope, shape.rope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([shape.kv_rank, shape.rope], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, shape.heads, -1).transpose(1, 2)
        k_nope, values = expanded.split([shape.nope, shape.value], dim=-1)
        k_rope = rotate(k_rope[:, None], tables).expand(-1, shape.heads, -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, tables)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        padding = q.shape[-1] - shape.value  # equal head sizes let the flash kernels run
        scale = q.shape[-1] ** -0.5
        out = F.scaled_dot_product_attention(q, k, F.pad(values, (0, padding)), is_causal=True, scale=scale)[..., : shape.value]
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Grouped sigmoid routing without auxiliary loss: a bias steers the choice, the plain scores
    weigh the result."""

    e_score_correction_bias: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Per-token weights of all experts (zero where not chosen), and how many tokens chose
        each."""
        shape = self.shape
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        by_group = choice.unflatten(-1, (shape.groups, -1))
        best_groups = by_group.topk(2, dim=-1).values.sum(-1).topk(shape.groups_per_token, dim=-1).indices
        open_groups = torch.zeros_like(by_group[..., 0]).scatter(-1, best_groups, 1.0)
        choice = by_group.masked_fill(open_groups[..., None] == 0, float("-inf")).flatten(-2)
        chosen = torch.zeros_like(scores).scatter(-1, choice.topk(shape.experts_per_token, dim=-1).indices, 1.0)
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * shape.routed_scale
        return weights, chosen.flatten(0, -2).sum(0)


class MoE(nn.Module):
    """Routed experts beside one shared expert. `load` receives the tokens per expert of the last
    forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Router(shape)
        self.gate_proj = nn.Parameter(torch.empty(shape.experts, shape.expert_width, shape.hidden))
        self.up_proj = nn.Parameter(torch.empty(shape.experts, shape.expert_width, shape.hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.expert_width))
        self.shared_experts = MLP(shape.hidden, shape.expert_width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, load = self.gate(x)
        inner = F.silu(F.linear(x, self.gate_proj.flatten(0, 1))) * F.linear(x, self.up_proj.flatten(0, 1))
        inner = (inner.unflatten(-1, (*weights.shape[-1:], -1)) * weights[..., None].to(inner.dtype)).flatten(-2)
        down = self.down_proj.permute(1, 0, 2).flatten(1)
        return F.linear(inner, down) + self.shared_experts(x), load


class Layer(nn.Module):
    """Attention and feed-forward with their norms; returns the expert load too (empty for a dense
    layer)."""

    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.mlp: MLP | MoE = MLP(shape.hidden, shape.dense_width) if dense else MoE(shape)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(self.input_layernorm(x), tables)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoE):
            out, load = self.mlp(normed)
            return x + out, load
        return x + self.mlp(normed), None


class Prediction(nn.Module):
    """The multi-token-prediction layer: from a hidden state and the next token's embedding to the
    token after that."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.enorm = RMSNorm(shape.hidden, shape.epsilon)
        self.hnorm = RMSNorm(shape.hidden, shape.epsilon)
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layer = Layer(shape, dense=False)
        self.norm = RMSNorm(shape.hidden, shape.epsilon)

    def forward(self, hidden: Tensor, embedded: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        x, load = self.layer(x, tables)
        return self.norm(x), load


class FrameTiny(nn.Module):
    """The whole model with its prediction layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, index < shape.dense_layers) for index in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.epsilon)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.prediction = Prediction(shape)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of 1/√inputs; the projections into the residual stream start at zero."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                continue
            deviation = 0.1 if name.startswith("embed") else 0.02 if "lm_head" in name else parameter.shape[-1] ** -0.5
            nn.init.normal_(parameter, std=0.0 if "o_proj" in name or "down_proj" in name else deviation)

    def hidden(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Hidden states after the final norm, and the expert load of each MoE layer."""
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        tables = rope_tables(self.shape, tokens.shape[1], tokens.device)
        loads: list[Tensor] = []
        for layer in self.layers:
            x, load = layer(x, tables)
            loads += [] if load is None else [load]
        return self.norm(x), loads

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits of every position."""
        return self.lm_head(self.hidden(tokens)[0])

    def losses(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weighted mean losses (next token, token after next), unweighted per-token loss, and loads
        `[MoE layers, experts]`.

        `tokens` is `[batch, length + 2]`; `weights`, of the same shape, weighs each token as a
        target.
        """
        first, second, third = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
        hidden, loads = self.hidden(first)
        embedded = self.embed_tokens(second).to(hidden.dtype)
        tables = rope_tables(self.shape, first.shape[1], tokens.device)
        ahead, load = self.prediction(hidden, embedded, tables)
        each = F.cross_entropy(self.lm_head(hidden).float().flatten(0, 1), second.flatten(), reduction="none").view(second.shape)
        later = F.cross_entropy(self.lm_head(ahead).float().flatten(0, 1), third.flatten(), reduction="none").view(third.shape)
        main = (each * weights[:, 1:-1]).sum() / weights[:, 1:-1].sum()
        mtp = (later * weights[:, 2:]).sum() / weights[:, 2:].sum()
        return main, mtp, each.detach(), torch.stack([*loads, *([] if load is None else [load])])
