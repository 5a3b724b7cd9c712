"""Manifest of the attention backends that come with the package: names and what each can do.

Imports no torch and no kernel; a backend's module is imported when it is selected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.attention import API, AttentionCapabilities
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry

TORCH_NATIVE = AttentionCapabilities(
    devices=("cpu", "cuda"),
    kinds=("mha", "mla"),
    sliding_window=True,
    soft_cap=True,
    sinks=True,
)


@hookimpl
def register_attention_backends(registry: KindRegistry) -> None:
    registry.add(
        "torch_native",
        "frame.attention_backends.torch_native.backend:TorchNativeBackend",
        capabilities=TORCH_NATIVE,
        api=API,
        rank=10,
        summary="PyTorch operations only: the reference everywhere and the fast path of a CPU.",
    )
