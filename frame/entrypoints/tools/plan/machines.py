"""Machines by name (`8xh200`): devices, memory and peak rates, and the ceilings of work on them.

Rates are those of the data sheets for dense products; those of H200 are measured (`tools.bench`).
Used by `frame plan`. Must not know a model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.requirements import Requirement

from frame.config.hardware import Accelerator, Hardware
from frame.core.errors import ConfigError, did_you_mean
from frame.entrypoints.tools.bench.floors import H200, Ceilings

GIB = 1024**3
REQUIRED_BY_TORCH = ("triton>=3.4",)  # on a CUDA device
HOST_CORES, HOST_MEMORY = 12, 128 * GIB  # beside each device


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of device. `memory`: bytes that a process sees. `links`: bytes/s that it sends to
    the others of its host."""

    name: str
    compute_capability: tuple[int, int]
    memory: int
    ceilings: Ceilings
    links: float

    @property
    def has_fp8(self) -> bool:
        """Whether products of float8 values run at twice the rate."""
        return self.compute_capability >= (8, 9)


_PCIE = 64e9  # bytes/s; faster links are NVLink

CARDS: dict[str, Card] = {
    "a100-40": Card("NVIDIA A100-SXM4-40GB", (8, 0), 40 * GIB, Ceilings(1.55e12, 312e12), 300e9),
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 80 * GIB, Ceilings(2.04e12, 312e12), 300e9),
    "l4": Card("NVIDIA L4", (8, 9), 23034 * 1024**2, Ceilings(0.3e12, 121e12), 32e9),
    "l40s": Card("NVIDIA L40S", (8, 9), 46068 * 1024**2, Ceilings(0.86e12, 362e12), 32e9),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", (8, 9), 24564 * 1024**2, Ceilings(1.01e12, 165e12), 32e9),
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 81008 * 1024**2, Ceilings(3.35e12, 989e12), 450e9),
    "h200": Card("NVIDIA H200", (9, 0), 143156 * 1024**2, H200, 450e9),
    "b200": Card("NVIDIA B200", (10, 0), 183359 * 1024**2, Ceilings(8e12, 2250e12), 900e9),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A host with `count` devices of one kind."""

    count: int
    card: Card

    @property
    def distributions(self) -> frozenset[str]:
        """Distributions that are on the machine: those that PyTorch for its devices requires."""
        return frozenset(Requirement(text).name for text in REQUIRED_BY_TORCH)

    @property
    def hardware(self) -> Hardware:
        """The machine as `resolve` reads it."""
        card = self.card
        devices = (Accelerator("cuda", card.name, card.compute_capability, card.memory, card.links > _PCIE),) * self.count
        return Hardware(HOST_CORES * self.count, HOST_MEMORY * self.count, frozenset({"avx2", "avx512f"}), devices)


def parse_machine(text: str) -> Machine:
    """The machine that `text` names, such as `8xh200` or `h100`. Raises ConfigError."""
    match = re.fullmatch(r"(?:(\d{1,4})x)?(.+)", text.strip().lower())
    name = match[2] if match else text
    if match is None or name not in CARDS or match[1] == "0":
        hint = did_you_mean(name, CARDS) if name not in CARDS else ""
        raise ConfigError(f"--machine is {text!r}; write COUNTxCARD, such as 8xh200, with a card of {', '.join(CARDS)}{hint}")
    return Machine(int(match[1] or 1), CARDS[name])


def recognise(hardware: Hardware) -> Machine | None:
    """This machine, if its devices are of one kind in the table."""
    names = {device.name for device in hardware.accelerators}
    card = next((card for card in CARDS.values() if names == {card.name}), None)
    return Machine(len(hardware.accelerators), card) if card is not None else None
