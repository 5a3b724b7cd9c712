"""Selects each token's experts and their weights: softmax or sigmoid scores, expert groups,
correction bias.

The router's weight is replicated, so all ranks select the same experts. Depends on no expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels
from frame.kernels.linear.invariant import InvariantMatmul, map_elements
from frame.models.layers.norm import RMSNorm
from frame.models.layers.parameter import Range, ShardedParameter

if TYPE_CHECKING:
    from frame.core.interfaces.adapter_layers import LayerDelta
    from frame.core.interfaces.build import BuildContext


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How scores become a selection.

    `top_k`: experts per token. `renormalize`: the selected weights sum to 1 before `scale`.
    `groups` > 1: experts are divided into groups, of which `top_groups` are open to a token; a
    group's score is its best expert ("max") or the sum of its two best ("top2"). `correction`: a
    stored bias that affects the selection but not the weights. `bias`: a stored bias of the logits.
    `scales_input`: the weight multiplies the token before its expert, not the result; only for one
    expert per token. `expert_scale`: a stored factor of each expert's weights. `precise`: scores
    are computed in float32 from the input on.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    correction: bool = False
    precise: bool = False
    bias: bool = False
    scales_input: bool = False
    expert_scale: bool = False


def read_sigmoid_rule(config: Mapping[str, Any]) -> RoutingRule:
    """The routing of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), under the names of its
    config.json: sigmoid scores, a correction bias, and group scores that are the sum of the two
    best experts."""
    return RoutingRule(
        top_k=config["num_experts_per_tok"],
        scoring="sigmoid",
        renormalize=bool(config.get("norm_topk_prob", True)),
        scale=config.get("routed_scaling_factor", 1.0),
        groups=config.get("n_group") or 1,
        top_groups=config.get("topk_group") or 1,
        group_score="top2",
        correction=True,
        precise=True,
    )


class Router(nn.Module):
    """x [tokens, hidden] -> (ids int64 [tokens, k], weights float32 [tokens, k])."""

    def __init__(self, context: BuildContext, name: str, num_experts: int, hidden_size: int, rule: RoutingRule) -> None:
        super().__init__()
        self.rule = rule
        self._has_kernels = kernels.can_use_triton(context.device)
        self._logit_dtype = torch.float32 if rule.precise else context.dtype
        self.weight = ShardedParameter(torch.empty(num_experts, hidden_size, dtype=self._logit_dtype))
        self.weight.bind(f"{name}.weight")
        self.delta: LayerDelta | None = None
        # what `AdapterReader` refuses by name
        self.unadapted_router = "" if context.adapters is None or context.adapters.adapts_routers else name
        if context.adapters is not None and context.adapters.adapts_routers:
            self.delta = context.adapters.add_layer((name,), Range.whole(hidden_size), (Range.whole(num_experts),))
        self._narrow: torch.Tensor | None = None
        self._is_deterministic = context.deterministic
        self._invariant: InvariantMatmul | None = None
        self._dtype = context.dtype
        if rule.correction:
            self.correction = ShardedParameter(torch.empty(num_experts, dtype=torch.float32))
            self.correction.bind(f"{name}.e_score_correction_bias")

        if rule.expert_scale:
            self.expert_scale = ShardedParameter(torch.empty(num_experts, dtype=torch.float32))
            self.expert_scale.bind(f"{name}.per_expert_scale")
        self.bias: ShardedParameter | None = None
        if rule.bias:
            self.bias = ShardedParameter(torch.empty(num_experts, dtype=self._logit_dtype))
            self.bias.bind(f"{name}.bias")

    def process_weights_after_loading(self) -> None:
        """Keep a float32 weight in the model's dtype if that loses nothing, as in published
        checkpoints: tensor cores then multiply exactly, and sum in float32. Weights that are loaded
        again are rounded, and replace the values of this form, which captured graphs read."""
        narrow = self.weight.data.to(self._dtype)
        if self._narrow is not None:
            self._narrow.copy_(narrow)
        elif self.weight.is_cuda and self.bias is None and narrow.dtype is not self.weight.dtype:
            self._narrow = narrow if torch.equal(narrow.float(), self.weight.data) else None
        if self._narrow is not None:
            self.weight.data = self._narrow
        if self._is_deterministic:
            weight = self.weight.data.to(self._logit_dtype)
            if self._invariant is None:
                self._invariant = InvariantMatmul(weight)
            self._invariant.weight.copy_(weight)

    def forward(self, x: torch.Tensor, logits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`logits`: those of `x`, if they are already computed."""
        if self.delta is not None and self.delta.is_active:
            logits = self.delta.expand(self.multiply(x), self.delta.shrink(x), self.bias)
        if not self._has_kernels:
            router_logits = self.multiply(x) if logits is None else logits
            ids, weights = self.choose_experts(router_logits.float())
        else:
            ids, weights = self._use_triton(self._logits(x) if logits is None else logits)
        return ids, weights * self.expert_scale[ids] if self.rule.expert_scale else weights

    def compute_normed_logits(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """(logits of norm(x + residual), norm(x + residual), x + residual) by one kernel; None
        where that is not faster."""
        if self._is_deterministic or (self.delta is not None and self.delta.is_active):
            return None
        if not self._has_kernels or norm.scale is None or torch.compiler.is_compiling():
            return None
        from frame.kernels.moe.router import NORMED_TOKENS, compute_normed_logits

        if not 0 < len(x) <= NORMED_TOKENS:
            return None
        return compute_normed_logits(x, residual, norm.scale, norm.eps, self.weight, self._logit_dtype, self.bias)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_deterministic:
            return self.multiply(x)
        from frame.kernels.moe.router import FEW_TOKENS, compute_few_logits

        if len(x) > FEW_TOKENS:
            if self._narrow is not None and x.dtype is self._narrow.dtype:
                return torch.mm(x, self._narrow.t(), out_dtype=torch.float32)
            return self.multiply(x)
        return compute_few_logits(x, self.weight, self._logit_dtype, self.bias)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> logits [tokens, experts]."""
        if self._invariant is not None:
            return self._invariant(x.to(self._logit_dtype), self.bias)
        return F.linear(x.to(self._logit_dtype), self.weight.to(self._logit_dtype), self.bias)

    def _use_triton(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from frame.kernels.moe.router import select_experts

        rule = self.rule
        return select_experts(
            logits,
            self.correction if rule.correction else None,
            rule.top_k,
            sigmoid=rule.scoring == "sigmoid",
            renormalize=rule.renormalize,
            scale=rule.scale,
            groups=rule.groups,
            top_groups=rule.top_groups,
            top2=rule.group_score == "top2",
        )

    def choose_experts(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Select experts from float32 logits [tokens, experts], in PyTorch operations: the
        reference of the kernel."""
        rule = self.rule
        if rule.scoring == "softmax" and rule.renormalize and rule.groups == 1:
            # a softmax over the selected logits equals the renormalised softmax over all
            top, ids = logits.topk(rule.top_k, -1)
            weights = top.softmax(-1)
            return ids, weights * rule.scale if rule.scale != 1.0 else weights
        scores = logits.softmax(-1) if rule.scoring == "softmax" else self._sigmoid(logits)
        choice = scores + self.correction if rule.correction else scores
        if rule.groups > 1:
            choice = self._open_groups(choice)
        ids = choice.topk(rule.top_k, -1).indices
        weights = scores.gather(1, ids)
        if rule.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * rule.scale if rule.scale != 1.0 else weights

    def _sigmoid(self, logits: torch.Tensor) -> torch.Tensor:
        return map_elements(torch.sigmoid, logits) if self._is_deterministic else logits.sigmoid()

    def _open_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Mask the experts outside a token's best groups; groups with equal scores at the edge all
        stay open."""
        grouped = choice.unflatten(-1, (self.rule.groups, -1))  # [tokens, groups, experts of a group]
        best = grouped.amax(-1) if self.rule.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
        edge = best.topk(self.rule.top_groups, -1).values[:, -1:]
        return grouped.masked_fill((best < edge).unsqueeze(-1), -torch.inf).flatten(1)
