"""Manifest of the in-tree weight transfers: records only. Must not import the plugins."""

from __future__ import annotations

from frame.interfaces.weight_transfer import WeightTransferCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_weight_transfers(registry: KindRegistry) -> None:
    """Add the in-tree weight transfers."""
    registry.add(
        "group",
        "frame.plugins.weight_transfers.group:GroupTransfer",
        capabilities=WeightTransferCapabilities(joins=True),
        summary="Receives broadcasts in a torch process group with the trainer: NCCL or gloo, SGLang's rendezvous.",
    )
    registry.add(
        "ipc",
        "frame.plugins.weight_transfers.ipc:IpcTransfer",
        capabilities=WeightTransferCapabilities(shares=True),
        summary="Reads the trainer's memory on the same host: files in /dev/shm, or CUDA IPC of the same GPU.",
    )
