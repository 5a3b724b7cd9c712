"""The hardware probe: this machine, and GPUs as a driver would list them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from frame.entrypoints.configuration.hardware_probe import probe
from frame.plugins.loader import load_registry
from frame.plugins.platforms.nvml import find_devices, nvml_devices

CARDS = (("H200", (9, 0), 140, "GPU-aaa1"), ("H200", (9, 0), 140, "GPU-aab2"), ("T4", (7, 5), 16, "GPU-ccc3"))


class FakeNvml:
    """NVML's C functions over CARDS; a handle is the index + 1."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == self.fails:
                return 999
            return self.reply(name, *arguments)

        return call

    def reply(self, name: str, *arguments: Any) -> int:
        if name in {"nvmlInit_v2", "nvmlShutdown"}:
            self.is_open = name == "nvmlInit_v2"
        elif name == "nvmlDeviceGetCount_v2":
            arguments[0]._obj.value = len(CARDS)
        elif name == "nvmlDeviceGetHandleByIndex_v2":
            arguments[1]._obj.value = arguments[0].value + 1
        else:
            self.describe(name, CARDS[arguments[0].value - 1], arguments[1:])
        return 0

    def describe(self, name: str, card: tuple[str, tuple[int, int], int, str], out: tuple[Any, ...]) -> None:
        if name == "nvmlDeviceGetName":
            out[0].value = card[0].encode()
        elif name == "nvmlDeviceGetUUID":
            out[0].value = card[3].encode()
        elif name == "nvmlDeviceGetCudaComputeCapability":
            out[0]._obj.value, out[1]._obj.value = card[1]
        elif name == "nvmlDeviceGetMemoryInfo":
            out[0]._obj.total = card[2] * 2**30
        elif name == "nvmlDeviceGetP2PStatus":
            out[2]._obj.value = 5 if "T4" in (card[0], CARDS[out[0].value - 1][0]) else 0


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1", [1]),
        ("0,7,1", [0]),
        ("GPU-ccc", [2]),
        ("GPU-aa", []),
        ("0,", [0]),
    ],
)
def test_visible_devices_are_those_that_cuda_would_show(visible: str | None, expected: list[int]) -> None:
    nvml = FakeNvml()
    found = [(a.name, a.compute_capability, a.memory_bytes // 2**30) for a in nvml_devices(nvml, visible)]
    assert found == [CARDS[index][:3] for index in expected]
    assert not nvml.is_open


@pytest.mark.parametrize(("visible", "linked"), [("0,1", [True, True]), (None, [False] * 3), ("0", [False])])
def test_devices_are_linked_if_all_visible_ones_are(visible: str | None, linked: list[bool]) -> None:
    assert [found.is_linked for found in nvml_devices(FakeNvml(), visible)] == linked
    assert not any(found.is_linked for found in nvml_devices(FakeNvml("nvmlDeviceGetP2PStatus"), visible))


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetName"])
def test_a_driver_that_fails_raises_and_is_closed(function: str) -> None:
    nvml = FakeNvml(fails=function)
    with pytest.raises(OSError, match="NVML error 999"):
        nvml_devices(nvml, None)
    assert not nvml.is_open


def test_this_machine() -> None:
    found = probe(load_registry(installed=False).records("platform"))
    assert 1 <= found.cpu_cores <= (os.cpu_count() or 1)
    assert 2**28 < found.memory_bytes < 2**50
    assert find_devices({"CUDA_VISIBLE_DEVICES": ""}).accelerators == ()


def test_probing_imports_no_torch() -> None:
    code = (
        "import sys; from frame.entrypoints.configuration.hardware_probe import probe; from frame.plugins.loader import load_registry;"
        "probe(load_registry().records('platform')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=500).returncode == 0


def test_omp_num_threads_is_a_limit_on_cores() -> None:
    assert probe(environ={"OMP_NUM_THREADS": "1"}).cpu_cores == 1
    everything = probe(environ={}).cpu_cores
    assert [probe(environ={"OMP_NUM_THREADS": value}).cpu_cores for value in ("100000", "0", "two", "")] == [everything] * 4
