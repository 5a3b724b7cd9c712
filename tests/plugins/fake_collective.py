"""A collective that exchanges bytes through PyTorch's key-value store, as a package would bring it:
slow, and without any other library.

The mutants of the suite derive from it, and tests serve with it.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from frame import hookimpl
from frame.core.interfaces.collective import Collective, CollectiveCapabilities, CollectiveContext

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.registration import KindRegistry

CAPABILITIES = CollectiveCapabilities(devices=("cpu",))


class StoreCollective(Collective):
    """Every rank writes its tensor under a key and reads those of the others."""

    def __init__(self, context: CollectiveContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        limit, address = timedelta(seconds=context.timeout), urlsplit(context.address)
        if address.scheme == "file":
            self._store: Any = dist.FileStore(address.path, -1)
        else:
            listens = context.rank == 0 if context.listens is None else context.listens
            host, port = address.hostname or "", address.port or 0
            self._store = dist.TCPStore(host, port, None, listens, limit, wait_for_workers=False, multi_tenant=True)
        self._store = dist.PrefixStore(context.name, self._store)
        self._store.set_timeout(limit)
        self._steps = 0
        self._sent: Counter[str] = Counter()
        self.collect(torch.zeros(1))  # every rank has come

    def collect(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which may differ in shape only where this rank reads none."""
        self._steps += 1
        self._write(f"{self._steps}/{self.rank}", tensor)
        tensors = [tensor if rank == self.rank else self._read(f"{self._steps}/{rank}", tensor, rank) for rank in range(self.size)]
        self._forget(self._steps - 1)
        return tensors

    def _forget(self, step: int) -> None:
        """All ranks have read what this one wrote in a step, since they are at the next one."""
        if self.size > 1:
            self._store.delete_key(f"{step}/{self.rank}")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.collect(tensor)).sum(0, dtype=tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self.collect(tensor), dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self.collect(tensor)[source]

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self._write(self._next(self.rank, target), tensor)

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.copy_(self._read(self._next(source, self.rank), tensor, source))

    def _next(self, source: int, target: int) -> str:
        pair = f"{source}>{target}"
        self._sent[pair] += 1
        return f"{pair}/{self._sent[pair]}"

    def _write(self, key: str, tensor: torch.Tensor) -> None:
        self._store.set(key, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex())

    def _read(self, key: str, like: torch.Tensor, source: int) -> torch.Tensor:
        deadline = time.monotonic() + self.context.timeout
        while not self._store.check([key]):
            if self._store.check([f"left/{source}"]) and not self._store.check([key]):
                raise RuntimeError(f"rank {source} has left")
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {source} does not answer")
            time.sleep(1e-4)
        data = bytearray.fromhex(self._store.get(key).decode())
        return torch.frombuffer(data, dtype=like.dtype).view(like.shape) if data else torch.empty_like(like)

    def close(self) -> None:
        self._store.set(f"left/{self.rank}", "1")


@hookimpl
def register_collectives(registry: KindRegistry) -> None:
    """Add the collective."""
    registry.add("store", StoreCollective, capabilities=CAPABILITIES, summary="PyTorch's key-value store, for tests.")
