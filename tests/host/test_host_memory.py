"""Freed memory is kept for the next step."""

from __future__ import annotations

import platform
import resource

import numpy as np
import pytest

from frame.host.host_memory import keep_freed_memory

_BYTES = 8 << 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what other C libraries do is theirs")
def test_memory_is_not_mapped_anew_each_time() -> None:
    keep_freed_memory()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.empty(_BYTES, np.uint8).fill(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min(faults() for _ in range(5)) < _BYTES // 4096 // 4
