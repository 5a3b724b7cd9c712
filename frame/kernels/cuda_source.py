"""CUDA C++ kernels: compiled by NVRTC, which comes with PyTorch, and launched by the CUDA driver
with programmatic dependent launch (PDL).

For kernels that need what Triton does not express. They have no headers: what they need of CUDA is
built in or written in PTX. Kernel modules use it; it must not know a kernel. The contract of PDL is
that of `frame.kernels.launch`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache, lru_cache
from typing import Any

import torch

from frame.kernels import nvidia

_MAX_THREADS = 8  # that compile
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_STATIC_SHARED_BYTES = 32 << 10  # more than this is to be asked for: 48 KB, of which a kernel may have some by itself
_MANY_BLOCKS = 1024
_BFLOAT16, _FLOAT16 = 9, 6  # CUtensorMapDataType
_SWIZZLE_128_BYTES, _PROMOTE_256_BYTES = 3, 3

TensorMap = c_uint * 32  # CUtensorMap


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int * 3), ("rest", ctypes.c_char * 52)]


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared_bytes", c_uint), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", c_uint),
    ]  # fmt: skip


@cache
def find_obstacle() -> str | None:
    """Why kernels cannot be compiled; None: they can."""
    try:
        _load_compiler()
    except OSError:
        return "NVRTC, the compiler of CUDA kernels that PyTorch brings, is not installed"
    return None


def find_hopper_obstacle(device: torch.device) -> str | None:
    """Why kernels for compute capability 9.0 do not run on this device; None: they do, or it is the
    meta device."""
    if device.type == "meta":
        return None
    if device.type != "cuda" or nvidia.get_compute_capability(device)[0] != 9:
        return "the device does not have compute capability 9.0"
    return find_obstacle()


def start_compilation(source: str, constants: Sequence[tuple[str, int]], architecture: str) -> Future[bytes]:
    """Compile a source with these macros, in another thread, once in a process. -> a cubin.

    `architecture`: a compute capability as NVRTC names it, such as "90a". Raises (the future):
    RuntimeError with the compiler's messages.
    """
    return _start_compilation(source, tuple(constants), architecture)


@lru_cache(maxsize=512)
def _start_compilation(source: str, constants: tuple[tuple[str, int], ...], architecture: str) -> Future[bytes]:
    return _open_pool().submit(_compile, source, constants, architecture)


@cache
def _open_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "nvrtc")


@cache
def _load_compiler() -> ctypes.CDLL:
    version = torch.version.cuda
    if version is None:
        raise OSError("PyTorch was built without CUDA")
    return ctypes.CDLL(f"libnvrtc.so.{version.partition('.')[0]}")


@cache
def _load_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _compile(source: str, constants: tuple[tuple[str, int], ...], architecture: str) -> bytes:
    library, program, size = _load_compiler(), c_void_p(), c_size_t()
    options = [f"--gpu-architecture=sm_{architecture}", *(f"-D{name}={value}" for name, value in constants)]
    _check_compiler(library.nvrtcCreateProgram(byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        texts = (c_char_p * len(options))(*(each.encode() for each in options))
        if library.nvrtcCompileProgram(program, len(options), texts):
            _check_compiler(library.nvrtcGetProgramLogSize(program, byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _check_compiler(library.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"a CUDA kernel does not compile: {log.value.decode()}")
        _check_compiler(library.nvrtcGetCUBINSize(program, byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check_compiler(library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _check_compiler(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC reports error {status}")


def _check_driver(status: int, what: str) -> None:
    if status:
        text = c_char_p()
        _load_driver().cuGetErrorString(status, byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} (CUDA error {status})")


@lru_cache(maxsize=512)
def load_function(cubin: Future[bytes], name: str, shared_bytes: int, device: int) -> c_void_p:
    """The kernel `name` of a compiled source on the current device, with so much shared memory."""
    driver, module, function = _load_driver(), c_void_p(), c_void_p()
    _check_driver(driver.cuModuleLoadData(byref(module), cubin.result()), f"kernel {name} is not loaded")
    _check_driver(driver.cuModuleGetFunction(byref(function), module, name.encode()), f"kernel {name} is not found")
    if shared_bytes > _STATIC_SHARED_BYTES:
        status = driver.cuFuncSetAttribute(function, _SHARED_BYTES, shared_bytes)
        _check_driver(status, f"kernel {name} does not get {shared_bytes} bytes of shared memory")
    return function


class CudaLaunch:
    """Launches of one kernel with the same kinds of arguments: pointers, ints or tensor maps. One
    thread at a time may call it. `cluster`: blocks of a thread block cluster."""

    def __init__(
        self, function: c_void_p, kinds: Sequence[Any], threads: int, shared_bytes: int, device: torch.device, cluster: int = 1
    ) -> None:
        self._function, self._device = function, nvidia.get_index(device)
        self._values = [kind() for kind in kinds]
        self._arguments = (c_void_p * len(kinds))(*(ctypes.addressof(value) for value in self._values))
        early = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1, 0, 0))
        self._attributes = (_Attribute * 2)(early, _Attribute(_CLUSTER_DIMENSION, 0, (cluster, 1, 1)))
        count = 1 if cluster == 1 else 2
        self._configuration = _Configuration((cluster, 1, 1), (threads, 1, 1), shared_bytes, None, self._attributes, count)
        self._launch = _load_driver().cuLaunchKernelEx

    def count_clusters(self) -> int:
        """The clusters of this kernel that the device runs at a time; 0: it runs none of this size.
        For launches with clusters of two blocks and more."""
        count, size = c_int(), self._attributes[1].value[0]
        self._configuration.grid[0] = _MANY_BLOCKS // size * size  # more than a device has room for
        status = _load_driver().cuOccupancyMaxActiveClusters(byref(count), self._function, byref(self._configuration))
        return 0 if status else count.value  # an invalid size is reported as an error

    def __call__(self, grid: tuple[int, int], *arguments: Any) -> None:
        for value, argument in zip(self._values, arguments, strict=True):
            if isinstance(argument, TensorMap):
                ctypes.memmove(value, argument, ctypes.sizeof(TensorMap))
            else:
                value.value = argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
        configuration = self._configuration
        configuration.grid[0], configuration.grid[1] = grid
        configuration.stream = nvidia.get_stream(self._device)
        _check_driver(self._launch(byref(configuration), self._function, self._arguments, None), "a kernel is not launched")


def make_tensor_map(x: torch.Tensor, rows: int, columns: int) -> Any:
    """A TMA descriptor of x [any, width], 16 bits an element, for boxes of `rows` x `columns` in
    rows of 128 bytes, swizzled. Elements outside of x are zeros."""
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 63)
    place = ctypes.addressof(room) + 63 & ~63  # the driver wants 64-byte alignment
    kind = _BFLOAT16 if x.dtype == torch.bfloat16 else _FLOAT16
    sizes, steps = (ctypes.c_uint64 * 2)(x.shape[1], x.shape[0]), (ctypes.c_uint64 * 1)(x.stride(0) * 2)
    status = _load_driver().cuTensorMapEncodeTiled(
        c_void_p(place), kind, 2, c_void_p(x.data_ptr()), sizes, steps, (c_uint * 2)(columns, rows), (c_uint * 2)(1, 1),
        0, _SWIZZLE_128_BYTES, _PROMOTE_256_BYTES, 0,
    )  # fmt: skip
    _check_driver(status, "a tensor map is not made")
    return TensorMap.from_buffer_copy(ctypes.string_at(place, ctypes.sizeof(TensorMap)))
