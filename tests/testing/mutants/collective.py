"""Mutants of `collective/2`. The reference exchanges bytes through a key-value store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from frame.core.interfaces.collective import CollectiveCapabilities, CollectiveContext
from frame.plugins.collectives.gloo import Gloo
from tests.plugins.fake_collective import CAPABILITIES, StoreCollective
from tests.testing.mutants import MutantList

mutant = MUTANTS = MutantList("collective", reference=StoreCollective, capabilities=CAPABILITIES)


@mutant
class CountsItselfTwice(StoreCollective):
    """all_reduce adds this rank's tensor twice."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(tensor) + tensor


@mutant
class Averages(StoreCollective):
    """all_reduce returns the mean instead of the sum."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return (super().all_reduce(tensor) / self.size).to(tensor.dtype)


@mutant
class SumsInHalfPrecision(StoreCollective):
    """all_reduce adds in bfloat16, whatever the tensors' dtype."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(tensor.bfloat16()).to(tensor.dtype)


@mutant
class SumsOwnFirst(StoreCollective):
    """all_reduce adds in another order on each rank, so that the last bits differ."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self.collect(tensor)
        total = found[self.rank].clone()
        for rank in range(1, self.size):
            total += found[(self.rank + rank) % self.size]
        return total


@mutant
class GathersOwnFirst(StoreCollective):
    """all_gather puts this rank's tensor first."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        found = self.collect(tensor)
        return torch.cat(found[self.rank :] + found[: self.rank], dim)


@mutant
class GathersAlongTheLast(StoreCollective):
    """all_gather ignores `dim`."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return super().all_gather(tensor)


@mutant
class GathersInPlace(StoreCollective):
    """all_gather clears its argument."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        found = super().all_gather(tensor, dim)
        tensor.zero_()
        return found


@mutant
class BroadcastsFromTheFirst(StoreCollective):
    """broadcast ignores `source`."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return super().broadcast(tensor, 0)


@mutant
class ScattersTheFirstPart(StoreCollective):
    """reduce_scatter gives every rank the first part."""

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self.all_reduce(tensor).chunk(self.size, dim)[0].contiguous()


@mutant
class ScattersRows(StoreCollective):
    """reduce_scatter ignores `dim`."""

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return super().reduce_scatter(tensor)


@mutant
class ExchangesWithoutItself(StoreCollective):
    """all_to_all leaves out the rows that a rank sends to itself."""

    def all_to_all(self, tensor: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> torch.Tensor:
        found = super().all_to_all(tensor, send_rows, recv_rows)
        found.split(list(recv_rows))[self.rank].zero_()
        return found


@mutant
class ExchangesInReverse(StoreCollective):
    """all_to_all returns the received rows in the reverse order of the ranks."""

    def all_to_all(self, tensor: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> torch.Tensor:
        return torch.cat(super().all_to_all(tensor, send_rows, recv_rows).split(list(recv_rows))[::-1])


@mutant
class RepeatsMessages(StoreCollective):
    """recv returns the first message of a pair again and again."""

    def _next(self, source: int, target: int) -> str:
        key = super()._next(source, target)
        return key if source == self.rank else f"{source}>{target}/1"


@mutant
class IgnoresStrides(StoreCollective):
    """Sends the memory of a tensor as it lies, so that a transposed one arrives wrong."""

    def collect(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
        return [each.view(tensor.shape) for each in super().collect(flat)]


@mutant
class ReusesKeys(StoreCollective):
    """Every operation has the same key, so that a rank may read the tensor of an earlier one."""

    def collect(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._steps = min(self._steps, 1)
        return super().collect(tensor)


@mutant
class GoesOnAlone(StoreCollective):
    """Takes its own tensor for that of a rank that does not answer."""

    def _read(self, key: str, like: torch.Tensor, source: int) -> torch.Tensor:
        try:
            return super()._read(key, like, source)
        except RuntimeError:
            return like.clone()


@mutant
class SwapsRanks(StoreCollective):
    """Says that its rank is another one."""

    def __init__(self, context: Any, options: Any = None) -> None:
        super().__init__(context, options)
        self.rank = self.size - 1 - self.rank


@mutant.using(capabilities=replace(CAPABILITIES, max_size=None, several_hosts=True))
class MeetsInFilesOnly(StoreCollective):
    """The record says that ranks may run on several hosts, but a tcp address is refused."""

    def __init__(self, context: Any, options: Any = None) -> None:
        if not context.address.startswith("file:"):
            raise ValueError("only file: addresses")
        super().__init__(context, options)


@mutant.using(capabilities=replace(CAPABILITIES, batch_invariant=True))
class SumsLargeTensorsBackwards(StoreCollective):
    """States that it is batch-invariant, and adds large tensors in the reverse order of the
    ranks."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() < 10_000 or not tensor.is_floating_point():
            return super().all_reduce(tensor)
        *others, total = self.all_gather(tensor.unsqueeze(0), 0).unbind()
        for other in reversed(others):
            total = total + other
        return total


@mutant.using(capabilities=replace(CAPABILITIES, batch_invariant=True))
class LosesTheSignOfZeros(StoreCollective):
    """States that it is batch-invariant, and only sums of large tensors have negative zeros."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() < 10_000 or not tensor.is_floating_point():
            return super().all_reduce(tensor)
        total, *others = (each.float() for each in self.collect(tensor))
        for other in others:
            total = total + other
        return total.to(tensor.dtype)


@mutant.using(capabilities=replace(CAPABILITIES, batch_invariant=True))
class AddsIntegersAsFloats(StoreCollective):
    """Adds in float64 where sums are deterministic, integers too."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self.collect(tensor)
        if not self.context.deterministic:
            return torch.stack(found).sum(0, dtype=tensor.dtype)
        kind = tensor.dtype if tensor.is_floating_point() else torch.float64
        total, *others = (each.to(kind) for each in found)
        for other in others:
            total = total + other
        return total.to(tensor.dtype)


@mutant
class LosesTheShapeOfNoRows(StoreCollective):
    """Returns one dimension where no row is received."""

    def all_to_all(self, tensor: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> torch.Tensor:
        result = super().all_to_all(tensor, send_rows, recv_rows)
        return result if len(result) else tensor.new_empty(0)


@mutant
class CountsDimensionsFromTwo(StoreCollective):
    """Takes a dimension that is counted from the end for one of two."""

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return super().reduce_scatter(tensor, dim if dim >= 0 else max(0, dim + 2))


@mutant.using(capabilities=CollectiveCapabilities(devices=("cpu",)))
class SaysThatSendsHaveEnded(Gloo):
    """Says that the tensor of a started send may be written while it is being sent."""

    sends: list[Any]

    def start_send(self, tensor: torch.Tensor, target: int) -> None:  # type: ignore[override]
        self.__dict__.setdefault("sends", []).append(super().start_send(tensor, target))


@mutant.using(capabilities=CollectiveCapabilities(devices=("cpu",)))
class HasATimeoutOfItsOwn(Gloo):
    """Waits a minute in each operation, whatever the timeout of the group."""

    def make_group(self, store: Any, limit: timedelta) -> Any:
        return super().make_group(store, timedelta(seconds=60))


@mutant
class WaitsLongerInOperations(StoreCollective):
    """Ends the joining after the timeout, and an operation after a minute."""

    def __init__(self, context: CollectiveContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.context = replace(context, timeout=60.0)


@mutant
class ExchangesShortFloats(StoreCollective):
    """all_to_all sends float16 as bfloat16."""

    def all_to_all(self, tensor: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int]) -> torch.Tensor:
        sent = tensor.bfloat16() if tensor.dtype == torch.float16 else tensor
        return super().all_to_all(sent, send_rows, recv_rows).to(tensor.dtype)


@mutant
class LeavesKeys(StoreCollective):
    """Deletes no key of the store that the ranks exchange tensors through."""

    def _forget(self, step: int) -> None:
        return


@mutant
class IgnoresTheNameOfItsGroup(StoreCollective):
    """Groups of any name share their keys."""

    def __init__(self, context: CollectiveContext, options: Any = None) -> None:
        super().__init__(replace(context, name=""), options)
