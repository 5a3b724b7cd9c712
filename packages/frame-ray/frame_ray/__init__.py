"""The records of frame-ray. Must not import ray or the plugins."""

from __future__ import annotations

from frame.interfaces.launcher import LauncherCapabilities
from frame.registration import KindRegistry, hookimpl
from frame_ray.options import RayOptions


@hookimpl
def register_launchers(registry: KindRegistry) -> None:
    """Add the launcher. `auto` chooses `rendezvous` before it."""
    registry.add(
        "ray",
        "frame_ray.launcher:RayLauncher",
        capabilities=LauncherCapabilities(several_hosts=True, finds_hosts=True),
        options=RayOptions,
        requires=("ray>=2.50",),
        rank=-1,
        summary="Processes of the hosts of a Ray cluster, which one `frame serve` starts.",
    )
