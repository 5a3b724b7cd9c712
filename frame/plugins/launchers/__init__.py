"""Manifest of the in-tree launchers: records only. Must not import the plugins."""

from __future__ import annotations

from frame.interfaces.launcher import LauncherCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_launchers(registry: KindRegistry) -> None:
    """Add the in-tree launchers."""
    registry.add(
        "local",
        "frame.plugins.launchers.local:LocalLauncher",
        capabilities=LauncherCapabilities(),
        rank=10,
        summary="Processes of this host, each with the device of its rank's number.",
    )
    registry.add(
        "rendezvous",
        "frame.plugins.launchers.rendezvous:RendezvousLauncher",
        capabilities=LauncherCapabilities(several_hosts=True),
        summary="Processes of several hosts, one `frame serve` on each, over authenticated TCP.",
    )
    registry.suggest_distribution("ray", "frame-ray")
