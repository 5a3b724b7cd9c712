"""Collectives: bytes over gloo, sums in the order of the ranks; and collectives with a bug each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from pydantic import BaseModel

from frame.core.interfaces.collective import Collective, CollectiveCapabilities, CollectiveContext
from tests.testing.held_out import Wrong


class GlooBytes(Collective):
    """Gloo moves bytes alone, so that every dtype is taken."""

    capabilities: ClassVar[CollectiveCapabilities] = CollectiveCapabilities(devices=("cpu",), batch_invariant=True)

    def __init__(self, context: CollectiveContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.group: Any = None
        if self.size == 1:
            return
        limit = timedelta(seconds=context.timeout)
        store = dist.PrefixStore(self.name_group(), self.open_store(limit))
        store.set_timeout(limit)
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = limit
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=context.host)]
        self.group = dist.ProcessGroupGloo(store, self.rank, self.size, gloo)

    def name_group(self) -> str:
        return f"gloo-bytes-{self.context.name}"

    def open_store(self, limit: timedelta) -> Any:
        address = urlsplit(self.context.address)
        if address.scheme == "file":
            return dist.FileStore(address.path, -1)
        listens = self.rank == 0 if self.context.listens is None else self.context.listens
        return dist.TCPStore(
            address.hostname or "", address.port or 0, is_master=listens, timeout=limit, wait_for_workers=False, multi_tenant=True
        )

    def to_bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    def collect(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in memory of their own."""
        if self.group is None or not tensor.numel():
            return [tensor.clone() for _ in range(self.size)]
        sent = self.to_bytes(tensor)
        found = [torch.empty_like(sent) for _ in range(self.size)]
        self.group.allgather([found], [sent]).wait()
        return [each.view(tensor.dtype).view(tensor.shape) for each in found]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.add(self.collect(tensor)).to(tensor.dtype)

    def add(self, parts: list[torch.Tensor]) -> torch.Tensor:
        is_small = parts[0].is_floating_point() and parts[0].dtype.itemsize < 4
        total = parts[0].float() if is_small else parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self.collect(tensor), dim)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if self.group is None or not tensor.numel():
            return tensor
        data = self.to_bytes(tensor).clone()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self.group.broadcast([data], options).wait()
        return data.view(tensor.dtype).view(tensor.shape)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        if tensor.numel():
            self.group.send([self.to_bytes(tensor)], target, 0).wait()

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        if tensor.numel():
            data = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
            self.receive(data, source)
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
        return tensor

    def receive(self, data: torch.Tensor, source: int) -> None:
        self.group.recv([data], source, 0).wait()

    def close(self) -> None:
        self.group = None


TWIN = GlooBytes
WRONG = Wrong()


@WRONG.add("Ranks drift apart and answer noise or hang: each adds its own part first, so that the last bits differ.")
class OwnPartFirst(GlooBytes):
    def add(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return super().add([parts[self.rank], *parts[: self.rank], *parts[self.rank + 1 :]])


@WRONG.add("A layer's sum is overwritten by the next one of its size: sums are in one buffer for each shape.")
class OneBuffer(GlooBytes):
    def __init__(self, context: CollectiveContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.buffers: dict[Any, torch.Tensor] = {}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total = super().all_reduce(tensor)
        return self.buffers.setdefault((total.shape, total.dtype), torch.empty_like(total)).copy_(total)


@WRONG.add("Slices and transposed tensors are sent as what lies beside them: rows are taken for contiguous.")
class AssumesContiguous(GlooBytes):
    def to_bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        return super().to_bytes(flat.clone())


@WRONG.add("Experts and adapters that come from another rank than the first are those of the first: the source is ignored.")
class AlwaysFirst(GlooBytes):
    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return super().broadcast(tensor, 0)


@WRONG.add("A dead rank is noticed after half an hour: the timeout is not passed on.")
class IgnoresTimeout(GlooBytes):
    def __init__(self, context: CollectiveContext, options: BaseModel | None = None) -> None:
        super().__init__(replace(context, timeout=max(context.timeout, 1800.0)))


@WRONG.add("With three ranks and more, tensors of two senders are exchanged: whatever comes first is received.")
class ReceivesAny(GlooBytes):
    def receive(self, data: torch.Tensor, source: int) -> None:
        self.group.recv_anysource([data], 0).wait()


@WRONG.add("Prompts lose quality on several ranks, decodes do not: tensors above 64 KiB are sent in bfloat16.")
class SendsLargeHalf(GlooBytes):
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float32 and tensor.nbytes > 65_536:
            return super().all_reduce(tensor.bfloat16()).float()
        return super().all_reduce(tensor)


@WRONG.add("Counts above 16 million are wrong on several ranks: integers are added in float32.")
class AddsAsFloats(GlooBytes):
    def add(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return super().add([part.float() for part in parts])


@WRONG.add("Engines with pipeline and tensor groups hang or mix their data: groups that meet at one address have one name.")
class IgnoresName(GlooBytes):
    def name_group(self) -> str:
        return "gloo-bytes"


@WRONG.add("A tensor that is written after `send` arrives with the new values: the call does not wait for the transfer.")
class SendsLater(GlooBytes):
    def send(self, tensor: torch.Tensor, target: int) -> None:
        if tensor.numel():
            self.waiting = tensor, self.group.send([tensor.reshape(-1).view(torch.uint8)], target, 0)


@WRONG.add("Each tensor that was ever sent stays in memory: handles are kept for the end.")
class KeepsSent(GlooBytes):
    def __init__(self, context: CollectiveContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.sent: list[torch.Tensor] = []

    def to_bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        data = super().to_bytes(tensor).clone()
        self.sent.append(data)
        return data


@WRONG.add("Ranks wait until their timeout for one that has left in order: `close` leaves its connections open.")
class StaysConnected(GlooBytes):
    kept: ClassVar[list[Any]] = []

    def close(self) -> None:
        self.kept.append(self.group)


@WRONG.add("Tokens of experts go to wrong ranks where their numbers differ: rows are exchanged in equal parts and cut.")
class EqualParts(GlooBytes):
    def all_to_all(self, tensor: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> torch.Tensor:
        if len({*send_rows, *recv_rows}) == 1:
            return super().all_to_all(tensor, send_rows, recv_rows)
        longest = int(self.all_reduce(torch.tensor(float(len(tensor)))).item())
        padded = torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])
        everything = self.collect(padded)
        first = sum(send_rows[: self.rank])
        return torch.cat([rows[first : first + count] for rows, count in zip(everything, recv_rows, strict=True)])


@WRONG.add("Gathered columns are interleaved with rows where another dimension than the last is asked for by a negative number.")
class CountsDimensions(GlooBytes):
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return super().all_gather(tensor, -1 if dim < 0 else dim)
