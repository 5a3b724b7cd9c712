"""Manifest of the in-tree collectives: records only. Must not import the plugins."""

from __future__ import annotations

from pydantic import Field

from frame.core.interfaces.collective import CollectiveCapabilities
from frame.registration import KindRegistry, PluginOptions, hookimpl


class P2pOptions(PluginOptions):
    """Options of `p2p`. Messages are tensors, in bytes; copies or NCCL sum the larger ones."""

    one_shot_bytes: int = Field(16 << 20, ge=0, description="Largest message of the one-shot kernel; less for more than two ranks.")
    two_shot_bytes: int = Field(8 << 20, ge=16, description="Largest message of the two-shot kernel, which serves more than two ranks.")
    copies: bool = Field(True, description="Sum the larger messages of two ranks by copies over the link, outside of graphs.")


@hookimpl
def register_collectives(registry: KindRegistry) -> None:
    """Add the in-tree collectives."""
    registry.add(
        "single",
        "frame.plugins.collectives.single:Single",
        capabilities=CollectiveCapabilities(devices=("cpu", "cuda"), capturable=True, max_size=1, batch_invariant=True),
        rank=20,
        summary="A group of one rank: no operation does anything.",
    )
    registry.add(
        "gloo",
        "frame.plugins.collectives.gloo:Gloo",
        capabilities=CollectiveCapabilities(devices=("cpu",), batch_invariant=True),
        summary="Gloo, over TCP between the hosts' processes.",
    )
    registry.add(
        "nccl",
        "frame.plugins.collectives.nccl:Nccl",
        capabilities=CollectiveCapabilities(devices=("cuda",), capturable=True, batch_invariant=True),
        rank=10,
        summary="NCCL, over NVLink, PCIe and the network between GPUs.",
    )
    registry.add(
        "p2p",
        "frame.plugins.collectives.p2p:P2p",
        capabilities=CollectiveCapabilities(
            devices=("cuda",), capturable=True, max_size=8, several_hosts=False, linked_ranks=2, batch_invariant=True
        ),
        options=P2pOptions,
        summary="Sums of small tensors over peer memory, all else by NCCL. GPUs of one host with NVLink.",
    )
