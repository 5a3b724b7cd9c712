"""`Hardware`: what the machine offers, as plain data for `frame.core.config.resolve`. An entrypoint finds it out."""

from __future__ import annotations

from dataclasses import dataclass

BF16_FEATURES = ("amx_bf16", "avx512_bf16", "sve_bf16")  # a CPU with one of them multiplies bfloat16 without a detour


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One visible GPU. Memory in bytes."""

    kind: str  # "cuda"
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine. `cpu_cores` are the physical cores that this process may use, `memory_bytes` the memory that it may,
    `cpu_features` flags as Linux spells them; `note` says why a GPU that is there is not listed. `busy_cores` of the cores are
    kept by the server's other processes."""

    cpu_cores: int
    memory_bytes: int
    cpu_features: frozenset[str] = frozenset()
    accelerators: tuple[Accelerator, ...] = ()
    note: str = ""
    busy_cores: int = 0

    @property
    def bf16_feature(self) -> str | None:
        """The feature by which this CPU multiplies bfloat16, or None."""
        return next((feature for feature in BF16_FEATURES if feature in self.cpu_features), None)

    def of(self, device: str) -> tuple[Accelerator, ...]:
        """The accelerators of a device kind."""
        return tuple(accelerator for accelerator in self.accelerators if accelerator.kind == device)
