"""A platform as a package would bring it: a synchronous device with memory of its own."""

from __future__ import annotations

from frame import hookimpl
from frame.core.interfaces.platform import Accelerator, DeviceMemory, HostPlatform, PlatformCapabilities, UsableDevices

MEMORY = 3 << 30


class AbacusPlatform(HostPlatform):
    """Computes on the host, and reports the memory of an abacus."""

    @property
    def device_name(self) -> str:
        return "Abacus"

    def measure_memory(self) -> DeviceMemory:
        return DeviceMemory(total=MEMORY, free=MEMORY - (1 << 20))


def find_devices() -> UsableDevices:
    return UsableDevices((Accelerator("abacus", "Abacus", None, MEMORY),))


@hookimpl
def register_platforms(registry):
    can = PlatformCapabilities(find_devices=f"{__name__}:find_devices", compatible=("cpu",))
    registry.add("abacus", AbacusPlatform, capabilities=can, rank=20)
