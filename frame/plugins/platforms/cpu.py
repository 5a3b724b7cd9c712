"""The host's cores as a platform: synchronous, with glibc and the number of threads set for
inference."""

from __future__ import annotations

import torch

from frame.core.interfaces.platform import DeviceMemory, HostPlatform
from frame.host.host_memory import keep_freed_memory, measure_host_memory


class CpuPlatform(HostPlatform):
    """The host. `activate` sets the allocator and the threads of the whole process."""

    def activate(self) -> None:
        keep_freed_memory()
        if self.context.threads is not None:
            torch.set_num_threads(self.context.threads)

    def measure_memory(self) -> DeviceMemory:
        """The machine's memory, or less where a control group limits this process."""
        total, available = measure_host_memory()
        return DeviceMemory(total, available, is_shared=True)
