"""The collective `gloo`: tensors in the hosts' memory, over TCP."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from frame.host.gloo_group import make_gloo_group
from frame.plugins.collectives.torch_group import TorchGroup


class Gloo(TorchGroup):
    """Listens on the interface of `context.host` only, by default the loopback device."""

    def make_group(self, store: Any, limit: timedelta) -> Any:
        return make_gloo_group(store, self.rank, self.size, limit, self.context.host)
