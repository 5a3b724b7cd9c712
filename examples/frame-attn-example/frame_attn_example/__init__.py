"""The plugin's manifest: its record, capabilities and options.

frame imports this module to list plugins, so it must not import torch. The backend is imported
when it is selected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from frame import hookimpl
from frame.core.interfaces.attention import AttentionCapabilities

if TYPE_CHECKING:
    from frame.registration import KindRegistry


class BlockwiseOptions(BaseModel):
    """The options `attention_backend/blockwise` under `plugins.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_tokens: int = Field(256, ge=1, description="Cached tokens per block; more are faster and need more memory.")


CAPABILITIES = AttentionCapabilities(devices=("cpu", "cuda"), kinds=("mha", "mla"), sliding_window=True)


@hookimpl
def register_attention_backends(registry: KindRegistry) -> None:
    registry.add(
        "blockwise",
        "frame_attn_example.backend:BlockwiseBackend",
        capabilities=CAPABILITIES,
        options=BlockwiseOptions,
        api="attention_backend/4",  # the interface version that this package was written for
        rank=-10,  # `auto` prefers every other backend that fits
        summary="Blockwise attention with a running softmax, in plain PyTorch.",
    )
