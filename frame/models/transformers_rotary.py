"""Rotary tables of the fallback, for rope types whose frequencies transformers chooses by the
highest position of a step: `longrope` and `dynamic`.

A step holds tokens of several requests, and cached keys stay. So the frequencies follow the context
limit, or a token's own position, as in the native models. Must not know an architecture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from frame.core.errors import ConfigurationError


def fix_rotations(model: nn.Module, max_context: int, dtype: torch.dtype) -> None:
    """Replace the rotary modules that depend on the other tokens of a step by tables of their
    rows."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if any(_depends_on_step(kind) for kind in _list_kinds(module).values()):
                setattr(parent, name, RotaryTables(module, max_context, dtype))


class RotaryTables(nn.Module):
    """What a rotary module of transformers gives for each position, for each kind of layer that it
    distinguishes (None: it does not)."""

    def __init__(self, module: nn.Module, max_context: int, dtype: torch.dtype) -> None:
        super().__init__()
        device = next(module.buffers()).device
        self.tables: dict[str | None, list[torch.Tensor]] = {}  # each [1, positions, values]
        self.is_single = False
        for kind, rope_type in _list_kinds(module).items():
            positions = torch.arange(max_context, device=device)
            # `dynamic`: a position beyond the trained length as in a sequence that ends there
            trained = getattr(module, "original_max_seq_len", max_context) if "dynamic" in rope_type else max_context
            parts = [positions[:trained], *positions[trained:, None]]
            options = {} if kind is None else {"layer_type": kind}
            outputs = [module(torch.empty(1, 1, 1, dtype=dtype, device=device), part[None], **options) for part in parts]
            self.is_single = isinstance(outputs[0], torch.Tensor)
            rows = [(output,) if self.is_single else output for output in outputs]
            self.tables[kind] = [torch.cat(part, -2) for part in zip(*rows, strict=True)]

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        if position_ids.dim() != 2:
            raise ConfigurationError(
                "the fallback computes rope_parameters of type longrope or dynamic for positions of one component only: "
                "choose another rope_type in config.json."
            )
        tables = self.tables[layer_type]
        # a request that has just ended may run one more step, past the limit
        places = position_ids.reshape(-1).clamp(max=tables[0].shape[-2] - 1)
        rows = tuple(table.index_select(-2, places) for table in tables)
        return rows[0] if self.is_single else rows


def _list_kinds(module: nn.Module) -> dict[str | None, str]:
    """The rope type of each kind of layer; {} for a module that is none of transformers' rotary
    modules."""
    stored = getattr(module, "rope_type", None)
    if isinstance(stored, str):
        return {None: stored}
    return dict(stored) if isinstance(stored, dict) else {}


def _depends_on_step(rope_type: str) -> bool:
    return rope_type == "longrope" or "dynamic" in rope_type
