"""`Bench` makes samplers and runs them as a model runner does: within the core's sampler, with the
parameters of their slots. Used by the conformance suite of samplers. Must not know a sampler by
name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.device_operations import DeviceOperations
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampled, Sampler
from frame.core.sampling.sampling_metadata import SamplingTable
from frame.interfaces.sampler import RowSampler, SamplerCapabilities, SamplerContext, SupportsSlots, TokenSampler
from frame.testing.conformance import Subject

VOCAB = 97
SLOTS = 16
PROMPT = 5


@dataclass(frozen=True)
class Bench:
    """Makes samplers of one class on a device. `examples`: parameter sets of requests."""

    subject: Subject
    examples: tuple[SamplingParams, ...]

    @property
    def can(self) -> SamplerCapabilities:
        can = self.subject.record.capabilities
        return can if isinstance(can, SamplerCapabilities) else SamplerCapabilities(params=())

    @property
    def device(self) -> str:
        return self.subject.setting.device

    def make(self, vocab: int = VOCAB, num_slots: int = SLOTS, operations: DeviceOperations | None = None) -> Bed:
        context = SamplerContext(vocab, num_slots + 1, torch.device(self.device), operations or self._find_operations(), TORCH)
        plugin: TokenSampler = self.subject.target(context, self.subject.options)
        return Bed(self, plugin, num_slots)

    def _find_operations(self) -> DeviceOperations:
        if self.device == "cpu":
            return TORCH
        from frame.entrypoints.processes.components import choose_operations

        context: Any = type("Rank", (), {"device": torch.device(self.device), "deterministic": False})
        return choose_operations(context)

    def setup(self, slot: int, example: int = 0, seed: int | None = None, **changes: Any) -> SlotSetup:
        """A request with one of the examples."""
        params = self.examples[example % len(self.examples)]
        values = {name: getattr(params, name) for name in params.__struct_fields__} | changes
        return SlotSetup(slot, SamplingParams(**values), slot if seed is None else seed, PROMPT, np.arange(PROMPT, dtype=np.int32))


class Bed:
    """One sampler within the core's, and the parameters of its slots."""

    def __init__(self, bench: Bench, plugin: TokenSampler, num_slots: int) -> None:
        self.device = bench.device
        self.plugin = plugin
        self.processors = Processors((), num_slots, plugin if isinstance(plugin, SupportsSlots) else None)
        self.rows = plugin if isinstance(plugin, RowSampler) else None
        self.operations = plugin.make_operations()
        self.sampler = Sampler(self.processors, self.operations, self.rows)
        self.table = SamplingTable(num_slots, by_row=self.sampler.by_row)

    def enter(self, *setups: SlotSetup, released: Sequence[int] = ()) -> Bed:
        self.table.update(setups, released)
        self.processors.update(setups, released)
        faults = self.processors.find_faults(np.array([setup.slot for setup in setups]))
        assert not faults, f"add_slot or remove_slot failed: {next(iter((faults or {}).values()))}"
        return self

    def sample(self, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int], mask: np.ndarray | None = None) -> Sampled:
        """A draw of rows with these logits, [rows, vocab], that no step may see again."""
        plan = self.table.plan_samples(np.array(slots), np.array(positions), mask)
        tensors = _to_device(plan.arrays, self.device)
        tensors.slots = torch.tensor(slots, device=self.device)
        sampled = self.sampler.sample(logits.to(self.device).clone(), plan, None, tensors)
        require_tokens(sampled.token_ids, len(slots), logits.shape[1])
        return sampled

    def draw(self, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int], mask: np.ndarray | None = None) -> torch.Tensor:
        """The drawn tokens, on the host."""
        return self.sample(logits, slots, positions, mask).token_ids.cpu()

    def step(self, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """A draw that counts."""
        token_ids = self.draw(logits, slots, positions)
        self.observe(slots, token_ids)
        return token_ids

    def observe(self, slots: Sequence[int], token_ids: torch.Tensor) -> None:
        if self.processors.sampler is not None:
            rows = torch.tensor(slots, dtype=torch.int64, device=self.device)
            self.processors.sampler.observe_tokens(rows, token_ids.to(self.device))


def make_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """float32 [rows, vocab]; the values of a row differ in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * spread).half().float()


def require_tokens(token_ids: torch.Tensor, rows: int, vocab: int) -> None:
    assert isinstance(token_ids, torch.Tensor) and token_ids.dtype == torch.int64, f"the tokens must be int64, not {token_ids!r:.40}"
    assert token_ids.shape == (rows,), f"{rows} rows have tokens of the shape {tuple(token_ids.shape)}"
    assert bool(((token_ids >= 0) & (token_ids < vocab)).all()), f"a token is none of the vocabulary: {token_ids.tolist()}"


def _to_device(arrays: Any, device: str) -> Any:
    """The same with tensors in place of arrays."""
    if isinstance(arrays, np.ndarray):
        return torch.from_numpy(arrays).to(device)
    if not is_dataclass(arrays) or isinstance(arrays, type):
        return arrays
    return type(arrays)(**{each.name: _to_device(getattr(arrays, each.name), device) for each in fields(arrays)})
