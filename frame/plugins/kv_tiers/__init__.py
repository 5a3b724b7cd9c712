"""Manifest of the in-tree KV cache tiers: records only. Must not import the plugins."""

from __future__ import annotations

from pydantic import Field

from frame.core.interfaces.kv_tier import KVTierCapabilities
from frame.registration import KindRegistry, PluginOptions, hookimpl


class HostTierOptions(PluginOptions):
    """Settings of the tier `host`."""

    size_gib: float = Field(
        8.0, gt=0, le=1 << 20, allow_inf_nan=False, description="GiB of host memory for blocks, for each replica, divided among its ranks."
    )
    ratio: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Size as a multiple of the device's KV cache, in place of size_gib."
    )


class DiskTierOptions(PluginOptions):
    """Settings of the tier `disk`."""

    folder: str = Field(
        "~/.cache/frame/kv_blocks",
        min_length=1,
        description="Folder of the blocks, which no other user may write. Servers may use one at the same time.",
    )
    size_gib: float = Field(
        64.0,
        gt=0,
        le=1 << 30,
        allow_inf_nan=False,
        description="GiB of files of one model, divided among the ranks; the oldest are deleted.",
    )
    buffer_gib: float = Field(
        1.0, gt=0, le=1 << 20, allow_inf_nan=False, description="GiB of host memory for blocks that are read or written; bounds one load."
    )


class NixlTierOptions(PluginOptions):
    """Settings of the tier `nixl`."""

    size_gib: float = Field(
        8.0,
        gt=0,
        le=1 << 20,
        allow_inf_nan=False,
        description="GiB of host memory: of a prefill server for the blocks of prompts, of a decode server for those that it reads.",
    )
    device_size_gib: float | None = Field(
        None,
        ge=0,
        le=1 << 20,
        allow_inf_nan=False,
        description="On a GPU: GiB of its memory in place of size_gib, so that blocks go from GPU to GPU. null: a 20th of it; 0: none.",
    )
    lease_seconds: float = Field(
        30.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds for which a prefill server keeps the blocks of a prompt that no decode server reads.",
    )
    max_leases: int = Field(
        1024, ge=1, le=1 << 16, description="Maximum number of prompts whose blocks a prefill server keeps at the same time."
    )


@hookimpl
def register_kv_tiers(registry: KindRegistry) -> None:
    """Add the in-tree KV cache tiers."""
    registry.add(
        "host",
        "frame.plugins.kv_tiers.host:HostTier",
        capabilities=KVTierCapabilities(in_memory=True, size="size_gib", ratio="ratio", memory=("size_gib",), keeps=True),
        options=HostTierOptions,
        rank=-1,  # `builtin` in a list does not mean it
        summary="Keeps blocks of the KV cache in host memory.",
    )
    registry.add(
        "disk",
        "frame.plugins.kv_tiers.disk:DiskTier",
        capabilities=KVTierCapabilities(persistent=True, shared=True, size="size_gib", memory=("buffer_gib",), folder="folder"),
        options=DiskTierOptions,
        rank=-1,
        summary="Keeps blocks of the KV cache in files, also over restarts.",
    )
    registry.add(
        "nixl",
        "frame.plugins.kv_tiers.nixl:NixlTier",
        capabilities=KVTierCapabilities(size="size_gib", memory=("size_gib",), transfers=True),
        options=NixlTierOptions,
        requires=("nixl-cu13>=1.5,<2",),
        rank=-1,
        summary="Hands blocks of prompts from prefill servers to decode servers.",
    )
