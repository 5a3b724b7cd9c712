"""The `flex_attention` backend: PyTorch's flex_attention (arXiv 2412.05496) over the row groups of
`torch_native`.

Masks, windows, soft caps and sinks form a score function, which torch.compile fuses into one Triton
kernel on a GPU; on a CPU it runs eagerly. Depends on no request and no page arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from frame.attention_backends import FLEX_ATTENTION
from frame.attention_backends.torch_native.backend import TorchNativeBackend
from frame.attention_backends.torch_native.plan import Group
from frame.core.interfaces.attention import AttentionCapabilities, AttentionSpec
from frame.core.interfaces.build import BuildContext
from frame.kernels import nvidia

ScoreMod = Callable[..., torch.Tensor]

MIN_WIDTH = 16  # smallest head dimension of the compiled kernel
MIN_BLOCKED_QUERIES = 1024  # queries per group from which skipping masked blocks pays
# compiled group shapes at most; PyTorch's own limit is 8, beyond which a function is no longer
# compiled
MAX_SHAPES = 64
# (BLOCK_M, BLOCK_N, stages) by the largest row size in bytes for which they fit; up to 256 bytes
# PyTorch's own tiles fit
TILES = {512: {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 2}, 1024: {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 1}}
SMALLEST_TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "num_stages": 1}


class FlexAttentionBackend(TorchNativeBackend):
    """Each group of rows is one batch of flex_attention. `plan` is that of `torch_native`."""

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
        k, v = (_by_head(tensor, group.rows, group.key_len) for tensor in (k, v))
        width = v.shape[-1]
        if q.shape[-1] < MIN_WIDTH or width < MIN_WIDTH:
            q, k, v = (torch.nn.functional.pad(tensor, (0, max(0, MIN_WIDTH - tensor.shape[-1]))) for tensor in (q, k, v))
        # a tensor: a Python number would become a constant of the compiled code
        offset = torch.full((), group.offset, dtype=torch.int32, device=q.device)
        with nvidia.allow_sync(q.device):  # compiles for a new shape
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
        if spec.sinks is not None:  # a sink adds weight but no value
            out, aux = out
            out = out * torch.sigmoid(aux.lse - spec.sinks.float()[:, None])[..., None].to(out.dtype)
        result: torch.Tensor = out[..., :width].transpose(1, 2)
        return result

    def _block_mask(self, spec: AttentionSpec, group: Group, q: torch.Tensor) -> BlockMask | None:
        """The block mask of a long causal group; None: all blocks are computed."""
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


def _by_head(tensor: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """[rows * length, heads, width] -> [rows, heads, length, width]."""
    return tensor.reshape(rows, length, *tensor.shape[1:]).transpose(1, 2)


def _kernel_options(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """Kernel options where PyTorch's defaults fail: it selects the decode kernel for up to 127
    queries, which holds all queries of all heads of a group at once, and tiles made for widths up
    to 128."""
    row = (1 << (max(k.shape[-1], v.shape[-1]) - 1).bit_length()) * k.element_size()
    options: dict[str, Any] = {}
    if row > 256:
        options = {"FORCE_USE_FLEX_ATTENTION": True, **next((tiles for maximum, tiles in TILES.items() if row <= maximum), SMALLEST_TILES)}
    elif q.shape[2] > 1:
        options = {"FORCE_USE_FLEX_ATTENTION": True}
    if q.dtype == torch.float32:  # three TF32 products on the tensor cores; exact float32 compiles for minutes
        options["FLOAT32_PRECISION"] = "'tf32x3'"
    return options


def _score_mod(spec: AttentionSpec, mask: torch.Tensor | None, offset: torch.Tensor) -> ScoreMod:
    """The score function: soft cap, then the group's additive mask or the causal mask."""
    window = spec.sliding_window
    # a tensor: the compiler fails on a Python float here
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
