"""`triton`: kernels that draw the tokens of all rows, with and without filters."""

from __future__ import annotations

from frame.core.interfaces.device_operations import DeviceOperations
from frame.interfaces.sampler import TokenSampler
from frame.kernels.sampling.operations import TRITON


class TritonSampler(TokenSampler):
    """Draws with the Triton kernels."""

    def make_operations(self) -> DeviceOperations:
        return TRITON
