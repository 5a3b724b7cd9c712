"""The host's cores as a platform: synchronous, with glibc and the number of threads set for
inference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from frame.core.interfaces.platform import DeviceMemory, HostPlatform, SupportsSleep
from frame.host.host_memory import drop_pages, keep_freed_memory, measure_host_memory


class CpuPlatform(HostPlatform, SupportsSleep):
    """The host. `activate` sets the allocator and the threads of the whole process. Values that a
    sleep keeps stay where they are."""

    def activate(self) -> None:
        keep_freed_memory()
        if self.context.threads is not None:
            torch.set_num_threads(self.context.threads)

    def release_tag(self, tag: str, tensors: Sequence[torch.Tensor], *, keeps_values: bool) -> int:
        return 0 if keeps_values else sum(drop_pages(tensor.data_ptr(), tensor.nbytes) for tensor in tensors)

    def map_tag(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing to do: a page is mapped when it is touched."""

    def measure_memory(self) -> DeviceMemory:
        """The machine's memory, or less where a control group limits this process."""
        total, available = measure_host_memory()
        return DeviceMemory(total, available, is_shared=True)
