"""The hardware probe agrees with torch about the GPUs."""

from __future__ import annotations

import pytest
import torch

from frame.entrypoints.configuration.hardware_probe import probe
from frame.plugins.loader import load_registry

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_probe_sees_what_torch_sees() -> None:
    found = probe(load_registry().records("platform"))
    assert len(found.accelerators) == torch.cuda.device_count(), found.note
    for index, accelerator in enumerate(found.accelerators):
        properties = torch.cuda.get_device_properties(index)
        assert accelerator.name == properties.name
        assert accelerator.compute_capability == (properties.major, properties.minor)
        assert abs(accelerator.memory_bytes - properties.total_memory) < 2**31
