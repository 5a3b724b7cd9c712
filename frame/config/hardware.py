"""`Hardware`: the machine's cores, memory and GPUs as plain data, the input of
`frame.config.resolve`.

`frame.entrypoints.configuration.hardware_probe` measures it; this module must not look at the
machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from frame.core.interfaces.platform import Accelerator

__all__ = ["BF16_FEATURES", "Accelerator", "Hardware"]

BF16_FEATURES = ("amx_bf16", "avx512_bf16", "sve_bf16")  # a CPU with one of these multiplies bfloat16 natively


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine, as this process may use it."""

    cpu_cores: int  # physical cores
    memory_bytes: int
    cpu_features: frozenset[str] = frozenset()  # flags as Linux spells them
    accelerators: tuple[Accelerator, ...] = ()
    note: str = ""  # why an existing GPU is not listed
    busy_cores: int = 0  # cores that the server's other processes use

    @property
    def bf16_feature(self) -> str | None:
        """The feature by which this CPU multiplies bfloat16, or None."""
        return next((feature for feature in BF16_FEATURES if feature in self.cpu_features), None)

    def of(self, platform: str) -> tuple[Accelerator, ...]:
        """The accelerators of a platform."""
        return tuple(accelerator for accelerator in self.accelerators if accelerator.kind == platform)
