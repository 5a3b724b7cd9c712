"""The devices of the platform `fake`. Imports no torch, as functions that find devices must not."""

from __future__ import annotations

from frame.core.interfaces.platform import Accelerator, UsableDevices

DEVICES = 2
MEMORY = 4 << 30  # bytes of a device


def find_devices() -> UsableDevices:
    """Two devices."""
    return UsableDevices((Accelerator("fake", "Fake 1", None, MEMORY),) * DEVICES)
