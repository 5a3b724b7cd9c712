# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Places of experts that have replicas, and counts of each expert's tokens, in one launch.

Reference: the operations of PyTorch in `frame.models.layers.moe.ExpertRoutes`, which uses it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame.kernels.launch import PreparedLaunch, ceil_div, launch_dependents, next_power_of_2, wait_for_previous

_PAIRS = 512  # of tokens and experts, in a program


def route_replicas(ids: torch.Tensor, places: torch.Tensor, replicas: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """ids int64 [tokens, k] of experts -> their physical experts: `places` int64 [experts, most
    replicas], of which a row of the step takes one by its number. replicas: int64 [experts].
    `counts` int64 [experts] get each expert's pairs added."""
    ids = ids.contiguous()
    out = torch.empty_like(ids)
    launch = _prepared(*places.shape, ids.shape[1], counts is not None, ids.device)
    launch((ceil_div(ids.numel(), _PAIRS), 1, 1), (ids, places, replicas, replicas if counts is None else counts, out), (ids.numel(),))
    return out


@lru_cache(maxsize=64)
def _prepared(experts: int, width: int, top: int, counts: bool, device: torch.device) -> PreparedLaunch:
    constants = {"EXPERTS": experts, "BINS": next_power_of_2(experts), "WIDTH": width, "TOP": top, "PAIRS": _PAIRS, "COUNTS": counts}
    return PreparedLaunch(_route, (*[torch.int64] * 5, 0), constants, device, 4)


@triton.jit(do_not_specialize=["pairs"])
def _route(
    ids, places, replicas, counts, out, pairs,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, PAIRS: tl.constexpr,
    COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of PAIRS pairs."""
    launch_dependents(PDL)
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    wait_for_previous(PDL)
    expert = tl.load(ids + pair, mask=inside, other=0)
    place = places + expert * WIDTH
    if WIDTH > 1:
        place += (pair // TOP) % tl.load(replicas + expert, mask=inside, other=1)
    tl.store(out + pair, tl.load(place, mask=inside, other=0), mask=inside)
    if COUNTS:
        tokens = tl.histogram(expert.to(tl.int32), BINS, mask=inside)
        bins = tl.arange(0, BINS)
        tl.atomic_add(counts + bins, tokens.to(tl.int64), mask=(bins < EXPERTS) & (tokens > 0), sem="relaxed")
