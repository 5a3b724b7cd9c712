"""CUDA kernels without a compiler and without a GPU: errors, and the arguments that the driver
gets. `tests/gpu/test_cuda_int4.py` compiles and launches."""

from __future__ import annotations

import ctypes
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frame.kernels import cuda_source, nvidia

LOG = b'kernel.cu(3): error: identifier "wrapped" is undefined'


def make_compiler(status: int) -> Any:
    """A library with the functions of NVRTC that are called."""

    def get_size(_program: Any, size: Any) -> int:
        size._obj.value = len(LOG) + 1
        return 0

    def get_text(_program: Any, buffer: Any) -> int:
        buffer.value = LOG
        return 0

    return SimpleNamespace(
        nvrtcCreateProgram=lambda *_: 0,
        nvrtcCompileProgram=lambda *_: status,
        nvrtcGetProgramLogSize=get_size,
        nvrtcGetProgramLog=get_text,
        nvrtcGetCUBINSize=get_size,
        nvrtcGetCUBIN=get_text,
        nvrtcDestroyProgram=lambda *_: 0,
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch brings NVRTC")
def test_a_pytorch_without_cuda_has_no_compiler() -> None:
    assert "NVRTC" in str(cuda_source.find_obstacle())


def test_a_source_is_compiled_once_and_its_errors_are_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_source, "_load_compiler", lambda: make_compiler(0))
    compiled = [cuda_source.start_compilation("a", [("N", number)], "90a") for number in (1, 1, 2)]
    assert compiled[0] is compiled[1]
    assert compiled[0] is not compiled[2]
    assert compiled[2].result().startswith(LOG)
    monkeypatch.setattr(cuda_source, "_load_compiler", lambda: make_compiler(6))
    with pytest.raises(RuntimeError, match=r"does not compile: kernel\.cu\(3\)"):
        cuda_source.start_compilation("b", [], "90a").result()


class Driver:
    """The driver's functions that are called; keeps what a launch gets."""

    def __init__(self) -> None:
        self.status, self.launches = 0, list[tuple[tuple[int, ...], tuple[int, ...], int, list[int]]]()
        self.clusters: list[tuple[int, tuple[int, ...]]] = []
        self.counted: list[tuple[int, ...]] = []

    def cuModuleLoadData(self, *_: Any) -> int:
        return self.status

    def cuModuleGetFunction(self, *_: Any) -> int:
        return 0

    def cuFuncSetAttribute(self, *_: Any) -> int:
        return 0

    def cuGetErrorString(self, _status: int, text: Any) -> int:
        text._obj.value = b"no kernel image"
        return 0

    def cuOccupancyMaxActiveClusters(self, count: Any, _function: Any, configuration: Any) -> int:
        given = configuration._obj
        size = given.attributes[1].value[0]
        self.counted.append((given.count, given.attributes[1].id, size, given.grid[0], given.block[0], given.shared_bytes))
        count._obj.value = 132 // size
        return self.status

    def cuLaunchKernelEx(self, configuration: Any, _function: Any, arguments: Any, _extra: Any) -> int:
        given = configuration._obj
        pointer, number, box = arguments  # addresses; of the tensor map the first word is kept
        found = [int.from_bytes(ctypes.string_at(place, size), "little") for place, size in ((pointer, 8), (number, 4), (box, 4))]
        assert given.attributes[0].id == 6
        if given.count == 2:
            self.clusters.append((given.attributes[1].id, tuple(given.attributes[1].value)))
        self.launches.append((tuple(given.grid), tuple(given.block), given.stream, found))
        return self.status


def test_a_launch_passes_pointers_numbers_and_tensor_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(cuda_source, "_load_driver", lambda: driver)
    monkeypatch.setattr(nvidia, "get_index", lambda _: 0)
    monkeypatch.setattr(nvidia, "get_stream", lambda _: 77)
    cubin: Future[bytes] = Future()
    cubin.set_result(b"cubin")
    function = cuda_source.load_function(cubin, "kernel", 100 << 10, 0)
    kinds = [ctypes.c_void_p, ctypes.c_int, cuda_source.TensorMap]
    launch = cuda_source.CudaLaunch(function, kinds, 96, 100 << 10, torch.device("cpu"))
    x = torch.zeros(3)
    launch((4, 2), x, 9, cuda_source.TensorMap(5, 6))
    launch((1, 1), x[1:], -1, cuda_source.TensorMap(8))
    assert driver.launches == [
        ((4, 2, 1), (96, 1, 1), 77, [x.data_ptr(), 9, 5]),
        ((1, 1, 1), (96, 1, 1), 77, [x.data_ptr() + 4, 2**32 - 1, 8]),
    ]
    assert not driver.clusters
    cuda_source.CudaLaunch(function, kinds, 96, 100 << 10, torch.device("cpu"), 4)((8, 1), x, 9, cuda_source.TensorMap(5))
    assert driver.clusters == [(4, (4, 1, 1))]
    wide = cuda_source.CudaLaunch(function, kinds, 96, 100 << 10, torch.device("cpu"), 3)
    assert wide.count_clusters() == 44
    assert driver.counted == [(2, 4, 3, 1023, 96, 100 << 10)], "the grid is to have more whole clusters than a device runs"
    driver.status = 912
    assert wide.count_clusters() == 0, "an invalid size is none that the device runs"
    driver.status = 209
    with pytest.raises(RuntimeError, match=r"no kernel image \(CUDA error 209\)"):
        launch((1, 1), x, 1, cuda_source.TensorMap(1))
