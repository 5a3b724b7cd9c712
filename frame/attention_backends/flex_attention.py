"""The `flex_attention` backend: PyTorch's flex_attention (arXiv 2412.05496) over the groups of rows that `torch_native` gathers.

Masks, windows, soft caps and sinks are a function of scores, which torch.compile makes part of one Triton kernel on a GPU; on a CPU
the function runs as it is. Knows no request and no page arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from frame.attention_backends import FLEX_ATTENTION
from frame.attention_backends.shared import allow_sync
from frame.attention_backends.torch_native.backend import TorchNativeBackend
from frame.attention_backends.torch_native.plan import Group
from frame.core.interfaces.attention import AttentionCapabilities, AttentionSpec
from frame.core.interfaces.build import BuildContext

ScoreMod = Callable[..., torch.Tensor]

MIN_WIDTH = 16  # of heads, for the compiled kernel
MIN_BLOCKED_QUERIES = 1024  # queries of a group from which on blocks that nobody sees are worth skipping
MAX_SHAPES = 64  # of groups that are compiled for; PyTorch leaves a function as it is that asks for more, and its own limit is 8
# tiles of queries and keys, and loads under way, by the bytes of a row up to which they fit; PyTorch's own do up to 256
TILES = {512: {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 2}, 1024: {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1}}
SMALLEST_TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "num_stages": 1}


class FlexAttentionBackend(TorchNativeBackend):
    """Groups of rows as batches of flex_attention: no row is in one matrix with another's keys. `plan` is `torch_native`'s."""

    capabilities: ClassVar[AttentionCapabilities] = FLEX_ATTENTION

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        plain: Any = flex_attention
        self._flex = plain
        if context.device.type != "cpu":
            torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, MAX_SHAPES)
            self._flex = torch.compile(plain, dynamic=True)
        self._masks: dict[tuple[int, int, int, int | None], BlockMask] = {}

    def attend(self, spec: AttentionSpec, group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = _by_head(q, group.rows, group.query_len)
        k, v = (_by_head(part, group.rows, group.key_len) for part in (k, v))
        width = v.shape[-1]
        if q.shape[-1] < MIN_WIDTH or width < MIN_WIDTH:
            q, k, v = (torch.nn.functional.pad(part, (0, max(0, MIN_WIDTH - part.shape[-1]))) for part in (q, k, v))
        offset = torch.full((), group.offset, dtype=torch.int32, device=q.device)  # a tensor: a number would be compiled in
        with allow_sync(q.device):  # a shape that is new is compiled
            out = self._flex(
                q,
                k,
                v,
                score_mod=_score_mod(spec, group.mask, offset),
                block_mask=self._block_mask(spec, group, q),
                scale=spec.scale,
                enable_gqa=q.shape[1] != k.shape[1],
                return_aux=None if spec.sinks is None else AuxRequest(lse=True),
                kernel_options=None if q.device.type == "cpu" else _kernel_options(q, k, v),
            )
        if spec.sinks is not None:  # a sink takes its share of the weights, and has no value
            out, aux = out
            out = out * torch.sigmoid(aux.lse - spec.sinks.float()[:, None])[..., None].to(out.dtype)
        result: torch.Tensor = out[..., :width].transpose(1, 2)
        return result

    def _block_mask(self, spec: AttentionSpec, group: Group, q: torch.Tensor) -> BlockMask | None:
        """Which blocks of a long causal group hold anything that is seen. None: all are computed."""
        if q.device.type == "cpu" or group.mask is not None or not spec.causal or group.query_len < MIN_BLOCKED_QUERIES:
            return None
        key = (group.query_len, group.key_len, group.offset, spec.sliding_window)
        if key not in self._masks:
            offset, window = group.offset, spec.sliding_window

            def visible(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
                seen = at <= query + offset
                return seen if window is None else seen & (at > query + offset - window)

            self._masks = {key: create_block_mask(visible, None, None, group.query_len, group.key_len, device=q.device)}
        return self._masks[key]


def _by_head(part: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """[rows * length, heads, width] -> [rows, heads, length, width]."""
    return part.reshape(rows, length, *part.shape[1:]).transpose(1, 2)


def _kernel_options(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """Which kernel, and tiles that fit, where PyTorch's choice does not: it takes the one for decodes up to 127 queries, which holds all
    queries of all heads that share keys at once, and tiles that are made for widths of up to 128."""
    row = (1 << (max(k.shape[-1], v.shape[-1]) - 1).bit_length()) * k.element_size()
    options: dict[str, Any] = {}
    if row > 256:
        options = {"FORCE_USE_FLEX_ATTENTION": True, **next((tiles for most, tiles in TILES.items() if row <= most), SMALLEST_TILES)}
    elif q.shape[2] > 1:
        options = {"FORCE_USE_FLEX_ATTENTION": True}
    if q.dtype == torch.float32:  # three products on the tensor cores; exact ones compile for minutes
        options["FLOAT32_PRECISION"] = "'tf32x3'"
    return options


def _score_mod(spec: AttentionSpec, mask: torch.Tensor | None, offset: torch.Tensor) -> ScoreMod:
    """What becomes of a scaled score: soft cap, then the group's additive mask, or the causal one."""
    window = spec.sliding_window
    # a tensor: a fraction is no constant to the compiler either, and as a number it fails
    cap = None if spec.soft_cap is None else torch.full((), spec.soft_cap, device=offset.device)
    has_queries = mask is not None and mask.shape[2] > 1

    def modify_score(score: torch.Tensor, row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if mask is not None:
            return score + (mask[row, 0, query, key] if has_queries else mask[row, 0, 0, key])
        if not spec.causal:
            return score
        seen = key <= query + offset
        if window is not None:
            seen = seen & (key > query + offset - window)
        return torch.where(seen, score, -float("inf"))

    return modify_score
