"""The collective `nccl`: tensors of NVIDIA GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from frame.plugins.collectives.torch_group import TorchGroup


class Nccl(TorchGroup):
    """Uses the device of the context's platform."""

    def make_group(self, store: Any, limit: timedelta) -> Any:
        self.context.platform.activate()
        options: Any = dist.ProcessGroupNCCL.Options()
        # torch takes a group's timeout only from an underscored attribute of its options
        options._timeout = limit  # noqa: SLF001
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)
