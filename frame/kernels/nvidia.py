"""What kernels for NVIDIA GPUs ask PyTorch about a device: compute capability, multiprocessors,
capture, events.

Kernels use it, and the attention backends, MoE runners and quantization methods that launch
them; these get tensors or a device instead of a platform. Other code uses
`frame.core.interfaces.platform`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def count_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def count_memory(device: torch.device) -> int:
    """Bytes of a CUDA device's memory."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def get_index(device: torch.device) -> int:
    """The index of a CUDA device; without one, that of the current device."""
    return torch.cuda.current_device() if device.index is None else device.index


def get_stream(index: int) -> int:
    """The handle of the current stream of a CUDA device."""
    return int(torch._C._cuda_getCurrentRawStream(index))  # noqa: SLF001 - the object of the public function takes microseconds to make


def is_capturing() -> bool:
    """Whether the current stream of this thread is being captured."""
    return torch.cuda.is_current_stream_capturing()


def create_event() -> torch.cuda.Event:
    """A new event without timing."""
    return torch.cuda.Event()


@contextmanager
def allow_sync(device: torch.device) -> Iterator[None]:
    """Turn off PyTorch's sync debug mode inside the block, for one-time work such as
    compilation."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
