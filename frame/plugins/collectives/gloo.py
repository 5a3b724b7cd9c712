"""The collective `gloo`: tensors in the hosts' memory, over TCP."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from frame.plugins.collectives.torch_group import TorchGroup


class Gloo(TorchGroup):
    """Listens on the interface of `context.host` only, by default the loopback device."""

    def make_group(self, store: Any, limit: timedelta) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        # torch takes a group's timeout and address only from underscored attributes of its options
        options = gloo._Options()  # noqa: SLF001
        options._devices = [gloo.create_device(hostname=self.context.host)]  # noqa: SLF001
        options._timeout = limit  # noqa: SLF001
        return gloo(store, self.rank, self.size, options)
