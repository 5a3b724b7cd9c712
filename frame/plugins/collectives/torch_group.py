"""`TorchGroup`: the operations of a collective by one process group of PyTorch.

Tensors only: nothing is pickled. Groups are values; PyTorch's default group is not used, so that
two engines can run in one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from pydantic import BaseModel

from frame.core.errors import ConfigurationError
from frame.core.interfaces.collective import Collective, CollectiveContext, SupportsStartSend, Transfer


class TorchGroup(Collective, SupportsStartSend):
    """A base class: `make_group` creates the process group."""

    def __init__(self, context: CollectiveContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        group = self.make_group(open_store(context), timedelta(seconds=context.timeout))
        self._groups = [group]  # cleared by `close` or at interpreter exit: a group that is destroyed later aborts the process
        self._finalizer = weakref.finalize(self, self._groups.clear)

    def make_group(self, store: Any, limit: timedelta) -> Any:
        """The process group. `limit`: of joining and of each operation."""
        raise NotImplementedError

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.context.deterministic and tensor.is_floating_point():
            return self._add_in_order(tensor)
        tensor = tensor.contiguous()
        self._groups[0].allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._groups[0].allgather([gathered], [tensor]).wait()
        return torch.cat(gathered, dim)

    def _add_in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum in float32, in the order of the ranks; rings and trees take another order for
        each part of a tensor."""
        first, *others = self.all_gather(tensor.unsqueeze(0), 0).unbind()
        total = first.float()
        for other in others:
            total = total + other
        return total.to(tensor.dtype)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        tensor = tensor.contiguous()
        self._groups[0].broadcast(tensor, source).wait()
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if self.context.deterministic and tensor.is_floating_point():
            return super().reduce_scatter(tensor, dim)  # by `all_reduce`
        shards = [shard.contiguous() for shard in tensor.chunk(self.size, dim)]
        out = torch.empty_like(shards[self.rank])
        self._groups[0].reduce_scatter([out], [shards]).wait()
        return out

    def all_to_all(self, tensor: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> torch.Tensor:
        out = tensor.new_empty(sum(recv_rows), *tensor.shape[1:])
        self._groups[0].alltoall_base(out, tensor.contiguous(), list(recv_rows), list(send_rows)).wait()
        return out

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self._groups[0].send([tensor.contiguous()], target, 0).wait()

    def start_send(self, tensor: torch.Tensor, target: int) -> Transfer:
        tensor = tensor.contiguous()
        return Sending(tensor, self._groups[0].send([tensor], target, 0))

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        self._groups[0].recv([tensor], source, 0).wait()
        return tensor

    def close(self) -> None:
        self._finalizer()


@dataclass(frozen=True, slots=True)
class Sending:
    """A send in progress, and its tensor."""

    tensor: torch.Tensor
    work: Any

    def wait(self) -> None:
        self.work.wait()


def open_store(context: CollectiveContext) -> Any:
    """The store in which the ranks exchange their addresses. Raises ConfigurationError for an
    address of another form."""
    limit = timedelta(seconds=context.timeout)
    address, path = urlsplit(context.address), context.address.removeprefix("file://")
    if address.scheme == "file" and path.startswith("/"):  # taken as it is: folders may hold # and ?
        store: Any = dist.FileStore(f"{path}.{context.name}" if context.name else path, context.size)
    elif address.scheme == "tcp" and address.hostname and address.port:
        listens = context.rank == 0 if context.listens is None else context.listens
        size = None if context.name else context.size
        store = dist.TCPStore(address.hostname, address.port, size, listens, limit, wait_for_workers=not context.name, multi_tenant=True)
        store = dist.PrefixStore(context.name, store) if context.name else store
    else:
        raise ConfigurationError(f"the rendezvous address {context.address!r} is neither file:///PATH nor tcp://HOST:PORT")
    store.set_timeout(limit)
    return store
