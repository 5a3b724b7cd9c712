"""The adapters that the suite of adapter formats generates, and PEFT's way to store them. Must not
know a plugin by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from frame.interfaces.adapter import AdapterCapabilities, AdapterConfig, AdapterContext, AdapterFormat, LowRankDelta
from frame.testing.conformance import SkipCheck, Subject

ATTENTION = {"q_proj": (24, 24), "k_proj": (24, 24), "v_proj": (24, 8), "o_proj": (24, 24)}  # (inputs, outputs)
MLP = {"gate_proj": (24, 40), "up_proj": (24, 40), "down_proj": (40, 24)}
LAYERS = {f"model.layers.{layer}.self_attn.{name}": sizes for layer in (0, 1, 10) for name, sizes in ATTENTION.items()} | {
    f"model.layers.{layer}.mlp.{name}": sizes for layer in (0, 1, 10) for name, sizes in MLP.items()
}

# `write_conformance_adapter` of a format: the adapter's configuration and its deltas by name ->
# what the two files hold. Raises NotImplementedError for what the format cannot store.
WriteAdapter = Callable[[AdapterConfig, Mapping[str, LowRankDelta]], tuple[dict[str, Any], dict[str, torch.Tensor]]]


class StoredTensor:
    """A `LazyTensor` of a value."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value
        self.shape = tuple(value.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._value[index]


@dataclass(frozen=True)
class Written:
    """An adapter: its canonical content and what the two files hold."""

    config: AdapterConfig
    deltas: Mapping[str, LowRankDelta]
    stored: dict[str, Any]
    tensors: dict[str, torch.Tensor]


class Maker:
    """Writes adapters in the format under test and reads them with it."""

    def __init__(self, subject: Subject) -> None:
        can = subject.record.capabilities
        self.target: type[AdapterFormat] = subject.target
        self.options = subject.options
        self.selects = dict(can.selects) if isinstance(can, AdapterCapabilities) else {}
        self.is_peft = not hasattr(self.target, "write_conformance_adapter")
        self._write: WriteAdapter = getattr(self.target, "write_conformance_adapter", self._write_for_peft)
        self.row_factors = tuple(self._find_rows())  # fields of the rows that a delta of this format may have; "": none
        if not self.row_factors:
            raise AssertionError("write_conformance_adapter stores no adapter of one layer")

    def create(self, dtype: torch.dtype = torch.float32) -> AdapterFormat:
        return self.target(AdapterContext(dtype), self.options)

    def make(
        self,
        layers: Mapping[str, tuple[int, int]] = LAYERS,
        ranks: Sequence[int] = (4,),
        scales: Sequence[float] = (0.75,),
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        experts: int = 0,
        rows: str | None = None,
        rows_dtype: torch.dtype | None = None,
        size: float = 1.0,
        **fields: Any,
    ) -> Written:
        """An adapter with random factors; its layers have the ranks and scales in turn. `rows`: the
        field of factors of the rows, None: as the format has it; `rows_dtype`: theirs; `size`: of
        values. Raises SkipCheck for one that the format cannot store."""
        generator, field = torch.Generator().manual_seed(seed), self.row_factors[0] if rows is None else rows

        def draw(*shape: int) -> torch.Tensor:
            return (size * torch.randn((experts, *shape) if experts else shape, generator=generator)).to(dtype)

        deltas = {}
        for place, (name, (inputs, outputs)) in enumerate(layers.items()):
            rank = ranks[place % len(ranks)]
            factors = {field: (torch.rand(outputs, generator=generator) + 0.5).to(rows_dtype or dtype)} if field else {}
            deltas[name] = LowRankDelta(draw(rank, inputs), draw(outputs, rank), scales[place % len(scales)], **factors)
        config = AdapterConfig(rank=max(delta.a.shape[-2] for delta in deltas.values()), **{"base_model": "org/base", **fields})
        try:
            stored, tensors = self._write(config, deltas)
        except NotImplementedError as reason:
            raise SkipCheck(str(reason) or "the format stores no such adapter") from reason
        copies = {name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
        return Written(config, deltas, deepcopy(stored), copies)

    def read(
        self, stored: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], target: AdapterFormat | None = None
    ) -> Mapping[str, Any]:
        """The deltas by name, all of them read before the first is looked at."""
        pairs = list((target or self.create()).read_deltas(stored, {name: StoredTensor(value) for name, value in tensors.items()}))
        names = [name for name, _ in pairs]
        assert len(set(names)) == len(names), f"a name is yielded twice: {min(name for name in names if names.count(name) > 1)}"
        return dict(pairs)

    def _find_rows(self) -> Iterator[str]:
        for rows in ("", "output_norm", "output_scale"):
            try:
                self.make({"model.layers.0.self_attn.q_proj": (24, 24)}, rows=rows)
            except SkipCheck:
                continue
            yield rows

    def _write_for_peft(self, config: AdapterConfig, deltas: Mapping[str, LowRankDelta]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return write_peft(config, deltas, self.selects)


def write_peft(
    config: AdapterConfig, deltas: Mapping[str, LowRankDelta], selects: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As PEFT stores LoRA, and DoRA where `selects` has `use_dora`. Used for formats that have no
    `write_conformance_adapter`."""
    tensors: dict[str, torch.Tensor] = {}
    stacked, order = [], list(deltas)
    for place, (name, delta) in enumerate(deltas.items()):
        if bool(selects.get("use_dora")) != (delta.output_norm is not None) or delta.output_scale is not None:
            raise NotImplementedError("the format stores other factors of the rows")
        a, b, path = delta.a, delta.b, f"base_model.model.{name}"
        if a.dim() == 3:
            if delta.output_norm is not None:
                raise NotImplementedError("DoRA has no stacked experts")
            stacked.append(name)
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
            module = name.rpartition(".")[0]
            path = path.rpartition(".")[0] + ".base_layer" * sum(other.rpartition(".")[0] == module for other in order[place + 1 :])
        if name.endswith("embed_tokens"):
            if delta.output_norm is not None:
                raise NotImplementedError("DoRA has no embeddings")
            copies = {f"{path}.base_layer.weight": torch.ones(len(b), a.shape[1])}  # as PEFT does
            tensors |= {f"{path}.lora_embedding_A": b.t(), f"{path}.lora_embedding_B": a.t(), **copies}
            continue
        tensors |= {f"{path}.lora_A.weight": a.contiguous(), f"{path}.lora_B.weight": b.contiguous()}
        if delta.output_norm is not None:
            tensors[f"{path}.lora_magnitude_vector"] = delta.output_norm
    ranks, uses_root = {f"^{name}": delta.a.shape[-2] for name, delta in deltas.items()}, config.rank % 2 == 1
    alphas = {f"^{name}": delta.scale * delta.a.shape[-2] ** (0.5 if uses_root else 1) for name, delta in deltas.items()}
    minimum, ends = min(ranks.values()), {name.rpartition(".")[2] for name in deltas}
    ranks |= dict.fromkeys(ends, minimum)  # the first pattern that matches a layer counts, so that these do not
    alphas |= dict.fromkeys(ends, 123.0)
    if config.invocation and selects.get("use_dora"):
        raise NotImplementedError("DoRA has no invocation")
    return {
        "peft_type": "LORA", "base_model_name_or_path": config.base_model, "r": minimum, "lora_alpha": 1, "bias": "none",
        "lora_dropout": 0.1, "use_rslora": uses_root, "use_dora": False, "rank_pattern": ranks, "fan_in_fan_out": False,
        "alpha_pattern": alphas, "target_parameters": stacked or None,
        "alora_invocation_tokens": list(config.invocation) or None, "modules_to_save": None,
        **selects,
    }, tensors  # fmt: skip
