"""NVIDIA GPUs as a platform. Every use of `torch.cuda` outside of kernels is here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from pydantic import BaseModel

from frame.core.errors import ConfigurationError
from frame.core.interfaces.platform import (
    DeviceMemory,
    Platform,
    PlatformContext,
    SupportsGraphs,
    SupportsPinning,
    SupportsSleep,
    SupportsStreams,
    SupportsSynchronisationChecks,
)
from frame.host.installation import install_command
from frame.plugins.platforms.host_copy import HostCopy


class CudaPlatform(Platform, SupportsStreams, SupportsPinning, SupportsGraphs, SupportsSleep, SupportsSynchronisationChecks):
    """One GPU. Streams, events and graphs are PyTorch's own objects. Memory is released by
    torch-memory-saver, from a pool of PyTorch's allocator for each tag."""

    def __init__(self, context: PlatformContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._device = torch.device("cuda", context.local_index)
        self._marks: dict[str, torch.Tensor] = {}  # by tag: what lies in the pool of its allocations
        self._copy = HostCopy(self._lock_pages)  # of memory with the tag "weights", while it is released

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    @property
    def compute_capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self._device)

    def activate(self) -> None:
        torch.cuda.set_device(self._device)

    @property
    def profiler_activities(self) -> Sequence[Any]:
        return [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

    def measure_memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total, free, self.count_reserved(), torch.cuda.max_memory_allocated(self._device))

    def count_reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    @contextmanager
    def tag_allocations(self, tag: str) -> Iterator[None]:
        with _find_saver().region(tag=tag):
            self._marks.setdefault(tag, torch.empty(1, dtype=torch.uint8, device=self._device))
            yield

    def prepare_release(self, num_bytes: int) -> None:
        self._copy.prepare(num_bytes)

    def release_tag(self, tag: str, tensors: Sequence[torch.Tensor], *, keeps_values: bool) -> int:
        if keeps_values and tag != "weights":
            raise ValueError(f"values with the tag {tag!r} are not kept")
        self.synchronize()
        torch.cuda.empty_cache()
        if tag == "weights":  # what lies beside the tensors, as tables of positions, is kept always
            self._copy.save(self._list_blocks(tag, without=() if keeps_values else tensors))
            self.synchronize()
        _find_saver().pause(tag)
        return sum(tensor.nbytes for tensor in tensors)

    def map_tag(self, tag: str, tensors: Sequence[torch.Tensor]) -> None:
        _find_saver().resume(tag)
        for tensor in tensors:
            tensor.zero_()
        if tag == "weights":
            self._copy.restore()
        self.synchronize()

    def _lock_pages(self, memory: torch.Tensor) -> None:
        self.activate()  # in a thread, whose device is the first one
        self.pin_memory(memory)

    def _list_blocks(self, tag: str, without: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The allocations of a tag as uint8, except those that one of these tensors fills."""
        mark, filled = self._marks[tag].data_ptr(), {tensor.data_ptr(): tensor.nbytes for tensor in without}
        segments = torch.cuda.memory_snapshot()
        pool = next(each["segment_pool_id"] for each in segments if 0 <= mark - each["address"] < each["total_size"])
        blocks = (block for each in segments if each["segment_pool_id"] == pool for block in each["blocks"])
        return [
            torch.as_tensor(_Bytes(block["address"], block["requested_size"]), device=self._device)
            for block in blocks
            if block["state"].startswith("active") and filled.get(block["address"], 0) < block["requested_size"]
        ]

    def allocate_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin_memory(self, memory: torch.Tensor) -> None:
        if code := int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 1)):
            raise RuntimeError(f"memory cannot be page-locked (CUDA error {code})")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def create_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def create_event(self, *, is_timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=is_timed)

    def get_current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def set_stream(self, stream: Any) -> None:
        torch.cuda.set_stream(stream)

    def use_stream(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    @contextmanager
    def check_synchronisation(self, *, is_allowed: bool) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default" if is_allowed else "error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def create_graph_pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def begin_capture(self, pool: Any) -> torch.cuda.CUDAGraph:
        self.get_current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device during the capture
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph

    def end_capture(self, graph: Any) -> None:
        graph.capture_end()

    @property
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


@cache
def _find_saver() -> Any:
    """The memory saver of this process. Raises ConfigurationError."""
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError:
        command = install_command("frame-serve[sleep]")
        raise ConfigurationError(f"execution.sleep needs torch-memory-saver; run {command}, or turn it off") from None
    torch_memory_saver.hook_mode = "torch"  # needs no library that is loaded before the process starts; graphs stay
    return torch_memory_saver


class _Bytes:
    """Memory of the device in CUDA's array interface, which does not own it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class _Memory:
    """A tensor's memory in CUDA's array interface, which does not own it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"<i{size}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
