"""`torch`: the reference, which runs on every device."""

from __future__ import annotations

from frame.core.interfaces.device_operations import DeviceOperations
from frame.interfaces.sampler import TokenSampler


class TorchSampler(TokenSampler):
    """Draws with the core's own functions, which filter the rows with filters alone."""

    def make_operations(self) -> DeviceOperations:
        return self.context.reference
