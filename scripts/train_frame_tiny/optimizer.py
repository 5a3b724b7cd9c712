"""The optimizer: Muon for the matrices inside the layers, AdamW for embeddings, head, router and
norms.

Muon replaces a matrix's momentum by its nearest orthogonal matrix (five Newton–Schulz steps).
Matrices of one shape are stacked and orthogonalised together. It depends on parameter shapes only.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

# Coefficients of the five steps, tuned by the public Muon experiments so that all singular values
# end near 1.
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalise(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrix of each of `[count, rows, columns]`, by a quintic
    Newton–Schulz iteration."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon:
    """Momentum with orthogonalised updates over groups of equally shaped matrices (a 3-D parameter
    is a stack of them)."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float, weight_decay: float) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self.groups[tuple(parameter.shape[-2:])].append(parameter)
        self.buffers = {id(p): torch.zeros_like(p) for p in parameters}
        on_gpu = bool(parameters) and parameters[0].is_cuda
        self.orthogonalise = torch.compile(orthogonalise) if on_gpu else orthogonalise

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at learning rate `rate`; parameters without a gradient stay."""
        for (rows, columns), group in self.groups.items():
            used = [p for p in group if p.grad is not None]
            if not used:
                continue
            grads = [p.grad for p in used if p.grad is not None]
            buffers = [self.buffers[id(p)] for p in used]
            torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
            nesterov = [grad.lerp(buffer, self.momentum) for grad, buffer in zip(grads, buffers, strict=True)]
            update = self.orthogonalise(torch.cat([matrix.reshape(-1, rows, columns) for matrix in nesterov]))
            update = update.float() * max(1.0, rows / columns) ** 0.5
            parts = update.split([p.numel() // (rows * columns) for p in used])
            values: list[Tensor] = list(used)
            torch._foreach_mul_(values, 1 - rate * self.weight_decay)
            torch._foreach_add_(values, [part.reshape(p.shape) for part, p in zip(parts, used, strict=True)], alpha=-rate)


class Optimizer:
    """Both optimizers behind one `step(scale)`, where `scale` in 0..1 follows the schedule."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float, weight_decay: float) -> None:
        matrices: list[nn.Parameter] = []
        tables: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "mlp.gate.weight" in name:
                vectors.append(parameter)
            elif "embed_tokens" in name or "lm_head" in name:
                tables.append(parameter)
            else:
                matrices.append(parameter)
        self.muon_rate = muon_rate
        self.rates = [adam_rate, adam_rate / 3]
        self.muon = Muon(matrices, momentum=0.95, weight_decay=weight_decay)
        self.adam = torch.optim.AdamW(
            [{"params": tables, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
            lr=adam_rate,
            betas=(0.9, 0.95),
            fused=tables[0].is_cuda,
        )

    def step(self, scale: float) -> None:
        """Update every parameter and clear the gradients."""
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * scale
        self.muon.step(self.muon_rate * scale)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for matrices in self.muon.groups.values():
            for parameter in matrices:
                parameter.grad = None
