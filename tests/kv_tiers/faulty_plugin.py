"""A plugin file with the records of tiers that fail; servers of the fault runs read it with
--plugin."""

from __future__ import annotations

from frame.core.interfaces.kv_tier import KVTierCapabilities
from frame.plugins.kv_tiers import DiskTierOptions, HostTierOptions, NixlTierOptions
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_kv_tiers(registry: KindRegistry) -> None:
    memory = KVTierCapabilities(in_memory=True, size="size_gib", ratio="ratio", memory=("size_gib",), keeps=True)
    registry.add(
        "faulty_host", "tests.kv_tiers.faulty_tiers:FaultyHost", capabilities=memory, options=HostTierOptions, rank=-1, summary="Fails."
    )
    files = KVTierCapabilities(persistent=True, shared=True, size="size_gib", memory=("buffer_gib",), folder="folder")
    registry.add(
        "faulty_disk", "tests.kv_tiers.faulty_tiers:FaultyDisk", capabilities=files, options=DiskTierOptions, rank=-1, summary="Fails."
    )
    peer = KVTierCapabilities(size="size_gib", memory=("size_gib",), transfers=True)
    registry.add(
        "faulty_nixl", "tests.kv_tiers.faulty_tiers:FaultyNixl", capabilities=peer, options=NixlTierOptions, rank=-1, summary="Fails."
    )
