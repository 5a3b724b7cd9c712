"""Process groups of gloo on a known address: without one, torch looks the host's own name up, which
takes minutes where no name server answers. Used by the collective `gloo` and by transfers of
weights. Must not know what is sent."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any


def make_gloo_group(store: Any, rank: int, size: int, limit: timedelta, host: str) -> Any:
    """A `ProcessGroupGloo` on the interface of `host` only. limit: of each operation."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    # torch takes a group's timeout and address only from underscored attributes of its options
    options = gloo._Options()  # noqa: SLF001
    options._devices = [gloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = limit  # noqa: SLF001
    return gloo(store, rank, size, options)


def find_own_address(peer: str, port: int) -> str:
    """The address of this host from which `peer` is reached; nothing is sent. Raises OSError."""
    family, kind, number, _, address = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, number) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own
