"""Triton kernels that layers, quantization methods, MoE runners and the sampler share: one file a purpose, plain functions of tensors.

Each has a form in PyTorch where it is called, which is its reference and runs where kernels do not. Knows no model, no plugin and
no request. Importing this module loads no Triton.
"""

from __future__ import annotations

import importlib.util
import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NO_PDL = "FRAME_NO_PDL"  # set to 1, it keeps kernels from being launched before the one ahead of them has ended

_LEAST_PROCESSORS = 128
_GLUON = "3.6."  # the Triton whose Gluon is known to do: its names change from one release to the next


def can_use_triton(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device: a GPU (compute capability 8.0 on) with Triton, or a CPU under its interpreter."""
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    return INTERPRETED


def supports_fp8(device: torch.device) -> bool:
    """Whether kernels on this device convert to and from float8_e4m3 (compute capability 8.9)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def supports_pdl(device: torch.device) -> bool:
    """Whether launches on this device may be programmatic dependent launches (compute capability 9.0): a kernel begins while the one
    ahead of it ends, and waits (`gdc_wait`) before it reads what that one wrote."""
    return device.type == "cuda" and os.environ.get(NO_PDL) != "1" and torch.cuda.get_device_capability(device) >= (9, 0)


def supports_tma_streaming(device: torch.device) -> bool:
    """Whether kernels on this device copy boxes of weights while the one ahead still runs, as `frame.kernels.linear.linear_stream`
    does: a GPU of compute capability 9.0 with as many multiprocessors as outputs are cut into slices, and Triton 3.6 for its Gluon."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9 or INTERPRETED:
        return False
    if torch.cuda.get_device_properties(device).multi_processor_count < _LEAST_PROCESSORS:
        return False
    import triton

    return bool(triton.__version__.startswith(_GLUON))


def get_shared_memory(device: torch.device) -> int:
    """Bytes that one program may have on chip; under the interpreter, as much as it likes."""
    if device.type != "cuda":
        return 1 << 40
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
