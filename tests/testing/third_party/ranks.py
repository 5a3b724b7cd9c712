"""Third-party collectives, launchers and platforms."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from frame.interfaces.launcher import Placement, RankPlace, RankProcess
from tests.plugins.fake_collective import StoreCollective
from tests.plugins.fake_launcher import ReversedLauncher
from tests.plugins.fake_platform import FakePlatform
from tests.testing.third_party import reuses_result, sleeps, third_party

# ---- collectives ---------------------------------------------------------------------------------

mutant = third_party("collective")


@mutant
class SumsFourMillion(StoreCollective):
    """Sums the first 2**22 elements of a tensor."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() <= 1 << 22:
            return super().all_reduce(tensor)
        flat = tensor.reshape(-1).clone()
        flat[: 1 << 22] = super().all_reduce(flat[: 1 << 22])
        return flat.view_as(tensor)


@mutant
class BroadcastsBySum(StoreCollective):
    """Broadcasts by a sum to which other ranks add zeros, but booleans as they are."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        if tensor.dtype != torch.bool:
            return super().broadcast(tensor, source)
        return torch.stack(self.collect(tensor)).any(0)


@mutant
class SumsBooleans(StoreCollective):
    """Gathers booleans as their sum over the ranks."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if tensor.dtype != torch.bool:
            return super().all_gather(tensor, dim)
        return torch.cat([torch.stack(self.collect(tensor)).any(0)] * self.size, dim)


@mutant
class NeedsElements(StoreCollective):
    """Refuses tensors without elements."""

    def collect(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if not tensor.numel():
            raise ValueError("nothing to send")
        return super().collect(tensor)


@mutant
class SendsFloats(StoreCollective):
    """Gathers integers as float32, which loses the last digits of large ones."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return super().all_gather(tensor.float(), dim).to(tensor.dtype)


@mutant
class SumsIntegersInFloats(StoreCollective):
    """Sums integers in float64, which loses the last digits of those above 2**53."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(tensor if tensor.is_floating_point() else tensor.double()).to(tensor.dtype)


@mutant
class GathersMiddleDimensions(StoreCollective):
    """Gathers along the last dimension for each dimension but the first."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return super().all_gather(tensor, 0 if dim in (0, -tensor.dim()) else -1)


reuses_result(mutant, "all_reduce")


@mutant
class KeepsWhatItSent(StoreCollective):
    """Keeps a copy of each tensor that it has sent."""

    def _write(self, key: str, tensor: torch.Tensor) -> None:
        self.__dict__.setdefault("written", {})[key] = tensor.clone()
        super()._write(key, tensor)


@mutant
class SleepsInSums(StoreCollective):
    """Sleeps for 20 ms in each sum."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().all_reduce(tensor)


# ---- launchers -----------------------------------------------------------------------------------

mutant = third_party("launcher")


@mutant
class AddsUpEnvironments(ReversedLauncher):
    """Gives a rank the variables of the ranks before it too."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        shared = self.__dict__.setdefault("shared", {})
        shared.update(environment)
        return super().start(place, command, shared, pipes_errors=pipes_errors)


@mutant
class SetsItsOwnEnvironment(ReversedLauncher):
    """Sets the variables of a rank in its own process too."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        os.environ.update(environment)
        return super().start(place, command, environment, pipes_errors=pipes_errors)


@mutant
class DropsEmptyVariables(ReversedLauncher):
    """Drops variables that are empty."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        return super().start(place, command, {name: value for name, value in environment.items() if value}, pipes_errors=pipes_errors)


@mutant
class SplitsArguments(ReversedLauncher):
    """Joins the arguments of the command by spaces, and splits them again."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        code = command.index("-c") + 2 if "-c" in command else 1
        return super().start(place, [*command[:code], *" ".join(command[code:]).split()], environment, pipes_errors=pipes_errors)


@mutant
class AlwaysPipesErrors(ReversedLauncher):
    """Pipes errors that no one reads, so that a rank stops after 64 KiB of them."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        process = super().start(place, command, environment, pipes_errors=True)
        if not pipes_errors:
            self.__dict__.setdefault("pipes", []).append(process.stderr)
            process.stderr = None
        return process


@mutant
class EmptiesTheFolder(ReversedLauncher):
    """Empties the engine's folder before each start."""

    def place(self) -> Placement:
        for path in Path(self.context.folder).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return super().place()


@mutant
class RunsInItsFolder(ReversedLauncher):
    """Starts a rank in the engine's folder."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        before = Path.cwd()
        os.chdir(self.context.folder)
        try:
            return super().start(place, command, environment, pipes_errors=pipes_errors)
        finally:
            os.chdir(before)


@mutant
class RepeatsPlaces(ReversedLauncher):
    """Has four rendezvous, which it uses in turn."""

    used: ClassVar[list[Placement]] = []

    def place(self) -> Placement:
        if len(self.used) < 4:
            self.used.append(super().place())
        else:
            self.used.append(self.used.pop(0))
        return replace(super().place(), rendezvous=self.used[-1].rendezvous)


@mutant
class SleepsAtTheStart(ReversedLauncher):
    """Waits for a second before each start."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        time.sleep(1)
        return super().start(place, command, environment, pipes_errors=pipes_errors)


# ---- platforms -----------------------------------------------------------------------------------

mutant = third_party("platform")
_pinned: dict[Any, Any] = {}


@mutant
class PinsUpTo16MB(FakePlatform):
    """Has pinned memory of 16 MiB, of which larger arrays are cut."""

    def allocate_pinned(self, shape: Any, dtype: Any) -> Any:
        found = super().allocate_pinned(shape, dtype)
        return found[: max(1, (1 << 24) // max(found.element_size(), 1))] if found.dim() == 1 else found


@mutant
class KeepsPinned(FakePlatform):
    """Keeps each pinned array that it has made."""

    kept: ClassVar[list[Any]] = []

    def allocate_pinned(self, shape: Any, dtype: Any) -> Any:
        found = super().allocate_pinned(shape, dtype)
        self.kept.append(found)
        return found


sleeps(mutant, "create_stream", 0.05)
