"""`TRITON`: the device operations as Triton kernels. Used by `processes.components` where Triton
kernels run on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from frame.core.interfaces.device_operations import DeviceOperations
from frame.kernels.row_moves import move_rows
from frame.kernels.sampling.filtering import Filters, sample_filtered
from frame.kernels.sampling.logit_changes import apply_token_mask
from frame.kernels.sampling.logprobs import compute_logprobs
from frame.kernels.sampling.sampling import sample_unfiltered


def draw_filtered(
    logits: torch.Tensor,
    params: Mapping[str, torch.Tensor],
    plain: tuple[torch.Tensor, torch.Tensor] | None = None,
    last_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `DeviceOperations.draw_filtered`."""
    return sample_filtered(logits, Filters(**params), plain, last_tokens)


TRITON = DeviceOperations(
    draw_plain=sample_unfiltered,
    mask_logits=apply_token_mask,
    compute_logprobs=compute_logprobs,
    draw_filtered=draw_filtered,
    move_rows=move_rows,
)
