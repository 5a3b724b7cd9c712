"""Triton kernels for layers, quantization methods, MoE runners and the sampler.

One file per purpose; each public function takes and returns tensors. The caller of a kernel has a
PyTorch version of the same computation, which is the reference and the fallback. The kernels depend
on no model, plugin or request. Importing this package does not import Triton.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from frame.kernels.nvidia import count_multiprocessors, get_compute_capability, get_index

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NO_PDL = "FRAME_NO_PDL"  # set to 1, it turns programmatic dependent launch off

_MIN_PROCESSORS = 128
_GLUON = "3.6."  # the tested Triton release: the names of Gluon change between releases


def can_use_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on this device: a GPU of compute capability 8.0 or later with
    Triton installed, or a CPU under TRITON_INTERPRET=1."""
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None and get_compute_capability(device) >= (8, 0)
    return INTERPRETED


def supports_fp8(device: torch.device) -> bool:
    """Whether kernels on this device convert to and from float8_e4m3 (compute capability 8.9 or
    later)."""
    return device.type != "cuda" or get_compute_capability(device) >= (8, 9)


def supports_pdl(device: torch.device) -> bool:
    """Whether this device supports programmatic dependent launch (compute capability 9.0 or later):
    a kernel starts before the previous one ends, and waits (`gdc_wait`) before it reads that
    kernel's output."""
    return device.type == "cuda" and os.environ.get(NO_PDL) != "1" and get_compute_capability(device) >= (9, 0)


def supports_tma_streaming(device: torch.device) -> bool:
    """Whether the Gluon kernels run on this device (`frame.kernels.linear.linear_stream` and
    others).

    They need compute capability 9.0 (TMA and warp-group MMA), at least 128 multiprocessors (one for
    each slice of outputs) and Triton 3.6.
    """
    if device.type != "cuda" or get_compute_capability(device)[0] != 9 or INTERPRETED:
        return False
    if count_multiprocessors(device) < _MIN_PROCESSORS:
        return False
    import triton

    return bool(triton.__version__.startswith(_GLUON))


def get_shared_memory(device: torch.device) -> int:
    """Shared memory that one program may use, in bytes; practically unlimited under the
    interpreter."""
    if device.type != "cuda":
        return 1 << 40
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(get_index(device))["max_shared_mem"])
