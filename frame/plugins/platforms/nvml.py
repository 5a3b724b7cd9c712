"""Finds NVIDIA GPUs by NVML, the driver's own library, without importing torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from frame.core.interfaces.platform import Accelerator, UsableDevices

_NVML = "libnvidia-ml.so.1"
_NAME_BYTES = 96
_P2P_WRITE, _P2P_NVLINK = 1, 2  # nvmlGpuP2PCapsIndex_t


_Device = tuple[Accelerator, str, ctypes.c_void_p]


class NvmlMemory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def find_devices(environ: Mapping[str, str] | None = None) -> UsableDevices:
    """The GPUs that the driver lists, CUDA_VISIBLE_DEVICES does not hide and torch can use; or
    none, and why existing ones cannot be used."""
    environ = os.environ if environ is None else environ
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return UsableDevices()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in {"", "-1"}:
        return UsableDevices(note="CUDA_VISIBLE_DEVICES hides all GPUs")
    if _torch_is_cpu_only():
        return UsableDevices(note="the installed torch is a CPU build; install the CUDA build to use the GPU")
    try:
        return UsableDevices(nvml_devices(ctypes.CDLL(_NVML), visible))
    except OSError as error:
        return UsableDevices(note=f"the NVIDIA driver does not respond: {error}")


def _torch_is_cpu_only() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def nvml_devices(nvml: Any, visible: str | None) -> tuple[Accelerator, ...]:
    """The GPUs that NVML lists, filtered by CUDA_VISIBLE_DEVICES. Raises OSError if the driver does
    not respond.

    nvml: the loaded library. visible: the value of the variable; None: not set.
    """
    _call(nvml.nvmlInit_v2)
    try:
        count = ctypes.c_uint()
        _call(nvml.nvmlDeviceGetCount_v2, ctypes.byref(count))
        devices = _visible([_nvml_device(nvml, index) for index in range(count.value)], visible)
        handles = [device[2] for device in devices]
        return tuple(replace(device[0], is_linked=_is_linked(nvml, device[2], handles)) for device in devices)
    finally:
        nvml.nvmlShutdown()


def _is_linked(nvml: Any, handle: ctypes.c_void_p, handles: list[ctypes.c_void_p]) -> bool:
    """Whether a device writes to the memory of all others over NVLink; also False where the driver
    does not say."""
    others = [other for other in handles if other.value != handle.value]
    status, find = ctypes.c_int(), getattr(nvml, "nvmlDeviceGetP2PStatus", None)

    def has(other: ctypes.c_void_p, capability: int) -> bool:
        return not find(handle, other, ctypes.c_int(capability), ctypes.byref(status)) and not status.value  # type: ignore[misc]

    return bool(others) and find is not None and all(has(other, each) for other in others for each in (_P2P_WRITE, _P2P_NVLINK))


def _nvml_device(nvml: Any, index: int) -> _Device:
    """A device, its UUID and its handle."""
    handle, name, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(_NAME_BYTES)
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), NvmlMemory()
    _call(nvml.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), ctypes.byref(handle))
    _call(nvml.nvmlDeviceGetName, handle, name, ctypes.c_uint(_NAME_BYTES))
    _call(nvml.nvmlDeviceGetUUID, handle, uuid, ctypes.c_uint(_NAME_BYTES))
    _call(nvml.nvmlDeviceGetCudaComputeCapability, handle, ctypes.byref(major), ctypes.byref(minor))
    _call(nvml.nvmlDeviceGetMemoryInfo, handle, ctypes.byref(memory))
    return Accelerator("cuda", name.value.decode(), (major.value, minor.value), int(memory.total)), uuid.value.decode(), handle


def _visible(devices: list[_Device], visible: str | None) -> list[_Device]:
    """The devices that the indices or UUID prefixes in `visible` select. Like CUDA, drops
    everything after an invalid entry."""
    if visible is None:
        return devices
    kept: list[_Device] = []
    for entry in (item.strip() for item in visible.split(",")):
        is_index = entry.isdigit() and int(entry) < len(devices)
        match = [devices[int(entry)]] if is_index else [device for device in devices if entry and device[1].startswith(entry)]
        if len(match) != 1:
            break
        kept += match
    return kept


def _call(function: Callable[..., int], *arguments: object) -> None:
    code = function(*arguments)
    if code:
        raise OSError(f"NVML error {code}")
