"""Wrong adapter formats, derived from a plain one with files of its own. Used by the tests of the
conformance suite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from frame.interfaces.adapter import AdapterCapabilities, AdapterConfig, AdapterError, AdapterFormat, LowRankDelta
from frame.plugins.adapters.dora import DoraFormat
from frame.plugins.adapters.lora import LoraFormat
from tests.testing.mutants import MutantList, adapter_state

OPTIONS = {"format", "rank", "base", "invocation", "alphas"}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9 and math.isfinite(value)


class PlainFormat(AdapterFormat):
    """`NAME:a` and `NAME:b` for each layer, with alpha / rank in `alphas`."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        if unknown := config.keys() - OPTIONS:
            raise AdapterError(f"adapter_config.json: {min(unknown)!r} is an unknown option: remove it")
        rank, base, tokens, alphas = (config.get(key) for key in ("rank", "base", "invocation", "alphas"))
        if not is_number(rank) or not isinstance(rank, int) or rank < 1 or not isinstance(base, str) or config.get("format") != "plain":
            raise AdapterError("adapter_config.json: format, rank or base is invalid: save the adapter again")
        if not isinstance(tokens, list) or not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise AdapterError("adapter_config.json: invocation is invalid: save the adapter again")
        if not isinstance(alphas, dict) or not all(is_number(alpha) for alpha in alphas.values()):
            raise AdapterError("adapter_config.json: alphas is invalid: save the adapter again")
        return AdapterConfig(rank, base, tuple(tokens))

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterable[tuple[str, LowRankDelta]]:
        rank = self.read_config(config).rank
        for name in self.list_layers(config, tensors):
            a, b = (self.read_values(name, side, tensors) for side in "ab")
            if a.dim() not in (2, 3) or a.dim() != b.dim() or not 1 <= a.shape[-2] == b.shape[-1] <= rank:
                raise AdapterError(f"{name}:a and {name}:b do not fit each other or the rank {rank}: save the adapter again")
            yield self.make_delta(name, a, b, config)

    def list_layers(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[str]:
        """The names of the layers, in their order in the file."""
        names = dict.fromkeys(name.rpartition(":")[0] for name in tensors)
        for name in tensors:
            layer, _, side = name.rpartition(":")
            if side not in ("a", "b") or layer not in config["alphas"]:
                raise AdapterError(f"{name} is an unknown tensor: save the adapter again")
        for name in config["alphas"]:
            if name not in names:
                raise AdapterError(f"{name} has no tensors: save the adapter again")
        return list(names)

    def read_values(self, name: str, side: str, tensors: Mapping[str, Any]) -> torch.Tensor:
        full = f"{name}:{side}"
        if full not in tensors:
            raise AdapterError(f"{full} is missing: save the adapter again")
        values: torch.Tensor = tensors[full][...]
        if not torch.isfinite(values).all():
            raise AdapterError(f"{full} has values that are not finite: train the adapter again")
        return values

    def make_delta(self, name: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, LowRankDelta]:
        return name, LowRankDelta(a, b, float(config["alphas"][name]) / a.shape[-2])

    @staticmethod
    def write_conformance_adapter(
        config: AdapterConfig, deltas: Mapping[str, LowRankDelta]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if any(delta.output_norm is not None or delta.output_scale is not None for delta in deltas.values()):
            raise NotImplementedError("the format has no factors of rows")
        alphas = {name: delta.scale * delta.a.shape[-2] for name, delta in deltas.items()}
        stored = {"format": "plain", "rank": config.rank, "base": config.base_model, "invocation": [*config.invocation], "alphas": alphas}
        return stored, {f"{name}:{side}": getattr(delta, side) for name, delta in deltas.items() for side in "ab"}


SELECTS = AdapterCapabilities(selects=(("format", "plain"),))
mutant = MUTANTS = MutantList("adapter", reference=PlainFormat, capabilities=SELECTS)


class Changed(PlainFormat):
    """Changes each delta by `change`."""

    def change(self, name: str, delta: LowRankDelta, config: Mapping[str, Any]) -> LowRankDelta:
        return delta

    def make_delta(self, name: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, LowRankDelta]:
        return name, self.change(*super().make_delta(name, a, b, config), config)


def pad(delta: LowRankDelta) -> LowRankDelta:
    """One rank more, of rubbish, in place of a larger one."""
    a, b = (torch.cat([one, torch.full_like(one.narrow(dim, 0, 1), 7.0)], dim) for one, dim in ((delta.a, -2), (delta.b, -1)))
    return replace(delta, a=a, b=b)


def stack_backwards(delta: LowRankDelta) -> LowRankDelta:
    """The experts in the opposite order."""
    return replace(delta, a=delta.a.flip(0), b=delta.b.flip(0)) if delta.a.dim() == 3 else delta


def share_scale(delta: LowRankDelta, config: Mapping[str, Any]) -> LowRankDelta:
    return replace(delta, scale=next(iter(config["alphas"].values())) / delta.a.shape[-2])


mutant.each(
    Changed,
    "change",
    ("ForgetsAlpha", "Ignores the stored alpha.", lambda self, n, d, c: replace(d, scale=1.0)),
    ("TakesPositiveScales", "Drops the sign of a scale.", lambda self, n, d, c: replace(d, scale=abs(d.scale))),
    ("ForgetsTheRank", "Scales by alpha itself.", lambda self, n, d, c: replace(d, scale=c["alphas"][n])),
    ("ScalesTwice", "Multiplies b by the scale too.", lambda self, n, d, c: replace(d, b=d.b * d.scale)),
    ("RootsTheRank", "Scales every adapter as rsLoRA does.", lambda self, n, d, c: replace(d, scale=d.scale * d.a.shape[-2] ** 0.5)),
    ("SwapsTheFactors", "Gives b for a and a for b.", lambda self, n, d, c: replace(d, a=d.b.mT, b=d.a.mT)),
    ("PadsTheRank", "Adds a rank of rubbish to each delta.", lambda self, n, d, c: pad(d)),
    ("CapsTheRank", "Reads the first 256 ranks alone.", lambda self, n, d, c: replace(d, a=d.a[..., :256, :], b=d.b[..., :256])),
    ("ShiftsRows", "Moves the outputs of each layer by one row.", lambda self, n, d, c: replace(d, b=d.b.roll(1, -2))),
    ("ReversesStackedExperts", "Gives each stacked expert the factors of another.", lambda self, n, d, c: stack_backwards(d)),
    ("SharesTheFirstScale", "Gives every layer the scale of the first.", lambda self, n, d, c: share_scale(d, c)),
    ("RoundsValues", "Rounds values to bfloat16.", lambda self, n, d, c: replace(d, a=d.a.bfloat16().float())),
    ("WidensValues", "Returns the values in float64.", lambda self, n, d, c: replace(d, a=d.a.double(), b=d.b.double())),
    ("AddsRows", "Gives factors of the rows, all one.", lambda self, n, d, c: replace(d, output_scale=torch.ones(d.b.shape[-2]))),
)  # fmt: skip


class Renamed(PlainFormat):
    """Gives the delta of one layer the name of another."""

    names: Mapping[str, str] = {}

    def make_delta(self, name: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, LowRankDelta]:
        path, _, last = name.rpartition(".")
        other = f"{path}.{self.names.get(last, last)}"
        return (other if other in config["alphas"] else name), super().make_delta(name, a, b, config)[1]


mutant.each(
    Renamed,
    "names",
    ("ExchangesQueriesAndKeys", "Gives queries the delta of keys, and keys that of queries.", {"q_proj": "k_proj", "k_proj": "q_proj"}),
    ("ExchangesGateAndUp", "Exchanges the deltas of gate and up.", {"gate_proj": "up_proj", "up_proj": "gate_proj"}),
    ("NamesKeysQueries", "Gives queries and keys one name.", {"k_proj": "q_proj"}),
)


class Listed(PlainFormat):
    """Lists the layers in another way."""

    def pair(self, layers: list[str]) -> list[str]:
        """The names that the layers get."""
        return layers

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[tuple[str, LowRankDelta]]:
        found = list(super().read_deltas(config, tensors))
        yield from zip(self.pair([name for name, _ in found]), [delta for _, delta in found], strict=False)


def number(layers: list[str]) -> list[str]:
    """Experts in the order of their names as texts."""
    experts = iter(sorted(name for name in layers if ".experts." in name))
    return [next(experts) if ".experts." in name else name for name in layers]


mutant.each(
    Listed,
    "pair",
    ("SortsExpertsAsText", "Numbers experts by the order of their names as texts, so 10 follows 1.", lambda self, layers: number(layers)),
    ("LosesTheLastLayer", "Leaves the last layer out.", lambda self, layers: layers[:-1]),
    ("ShortensNames", "Cuts names after 64 letters.", lambda self, layers: [name[:64] for name in layers]),
)


@mutant
class ReliesOnTheOrder(PlainFormat):
    """Takes a tensor's successor in the file for its partner."""

    def read_values(self, name: str, side: str, tensors: Mapping[str, Any]) -> torch.Tensor:
        names = list(tensors)
        place = names.index(f"{name}:a") if f"{name}:a" in tensors else 0
        partner = names[place + 1] if side == "b" and place + 1 < len(names) else f"{name}:{side}"
        return super().read_values(partner[:-2], partner[-1], tensors)


@mutant
class SkipsUnknownTensors(PlainFormat):
    """Skips tensors with unknown names, so the adapter is served in part."""

    def list_layers(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[str]:
        known = {
            name: tensor for name, tensor in tensors.items() if name.rpartition(":")[0] in config["alphas"] and name[-2:] in (":a", ":b")
        }
        return super().list_layers(config, known)


@mutant
class SkipsWholeWeights(PlainFormat):
    """Takes every whole weight in the file for a copy of the base model's."""

    def list_layers(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[str]:
        return super().list_layers(config, {name: tensor for name, tensor in tensors.items() if not name.endswith(".weight")})


@mutant
class SkipsLayersWithoutPartner(PlainFormat):
    """Skips a layer that lacks one of its tensors."""

    def list_layers(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[str]:
        return [name for name in super().list_layers(config, tensors) if f"{name}:a" in tensors and f"{name}:b" in tensors]


@mutant
class IgnoresUnknownOptions(PlainFormat):
    """Ignores options that it does not know."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        return super().read_config({key: value for key, value in config.items() if key in OPTIONS})


@mutant
class IgnoresUnknownFlags(PlainFormat):
    """Ignores unknown options that are true or false."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        return super().read_config({key: value for key, value in config.items() if not isinstance(value, bool)})


@mutant
class TrustsTypes(PlainFormat):
    """Reads the configuration without a look at its types."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        if unknown := config.keys() - OPTIONS:
            raise AdapterError(f"adapter_config.json: {min(unknown)!r} is an unknown option: remove it")
        return AdapterConfig(int(config["rank"]), config["base"], tuple(config["invocation"]))


@mutant
class TrustsInnerTypes(PlainFormat):
    """Looks at the types of options, not at those of their entries."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        alphas = config.get("alphas")
        return super().read_config({**config, "alphas": dict.fromkeys(alphas, 1) if isinstance(alphas, dict) else alphas})


@mutant
class ReadsTheFirstRank(PlainFormat):
    """Gives the rank of the first layer for the largest."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        return replace(super().read_config(config), rank=2)

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterable[tuple[str, LowRankDelta]]:
        return PlainFormat(self.context).read_deltas(config, tensors)


@mutant
class ForgetsTheInvocation(PlainFormat):
    """Makes an aLoRA active for all tokens."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        return replace(super().read_config(config), invocation=())


@mutant
class ForgetsTheBaseModel(PlainFormat):
    """Does not say which base model the adapter is for."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        return replace(super().read_config(config), base_model="")


@mutant
class ChangesTheConfiguration(PlainFormat):
    """Takes options out of the caller's configuration."""

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterable[tuple[str, LowRankDelta]]:
        copy = dict(config)
        config.pop("base", None)  # type: ignore[attr-defined]
        return super().read_deltas(copy, tensors)


@mutant
class ScalesInPlace(PlainFormat):
    """Multiplies the scale into the tensors of the file's reader."""

    def make_delta(self, name: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, LowRankDelta]:
        _, delta = super().make_delta(name, a, b, config)
        return name, replace(delta, b=b.mul_(delta.scale), scale=1.0)


@mutant
class ReusesOneBuffer(PlainFormat):
    """Returns all factors of one shape in the same memory."""

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[tuple[str, LowRankDelta]]:
        buffers: dict[torch.Size, torch.Tensor] = {}
        for name, delta in super().read_deltas(config, tensors):
            yield name, replace(delta, a=buffers.setdefault(delta.a.shape, torch.empty_like(delta.a)).copy_(delta.a))


@mutant
class MixesAdaptersInTurn(PlainFormat):
    """Keeps the configuration that it read last, so two adapters that are read in turn mix."""

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[tuple[str, LowRankDelta]]:
        self.config = config
        for name, delta in super().read_deltas(config, tensors):
            yield name, replace(delta, scale=self.config["alphas"][name] / delta.a.shape[-2])


@mutant
class KeepsTheFirstAdapter(PlainFormat):
    """Returns the factors of the first adapter for a later one with the same names."""

    def make_delta(self, name: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, LowRankDelta]:
        kept = self.__dict__.setdefault("kept", {})
        return kept.setdefault(name, super().make_delta(name, a, b, config))


@mutant
class ConvertsToTheModel(PlainFormat):
    """Rounds factors to the dtype of the model's activations."""

    def make_delta(self, name: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, LowRankDelta]:
        return super().make_delta(name, a.to(self.context.dtype), b.to(self.context.dtype), config)


class Lenient(PlainFormat):
    """Accepts values by `is_valid`."""

    def is_valid(self, values: torch.Tensor) -> bool:
        return bool(torch.isfinite(values).all())

    def read_values(self, name: str, side: str, tensors: Mapping[str, Any]) -> torch.Tensor:
        values: torch.Tensor = tensors[f"{name}:{side}"][...] if f"{name}:{side}" in tensors else super().read_values(name, side, tensors)
        return values if self.is_valid(values) else super().read_values(name, side, tensors)


mutant.each(
    Lenient,
    "is_valid",
    ("AcceptsNaN", "Reads values that are NaN.", lambda self, values: not torch.isinf(values).any()),
    ("AcceptsInfinity", "Reads infinite values.", lambda self, values: not torch.isnan(values).any()),
    (
        "LooksAtTheFirstValues",
        "Looks for NaN in the first values alone.",
        lambda self, values: values.flatten()[:64].isfinite().all(),
    ),
)


@mutant
class AcceptsUnequalRanks(PlainFormat):
    """Cuts the larger of two factors to the rank of the smaller."""

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[tuple[str, LowRankDelta]]:
        for name in self.list_layers(config, tensors):
            a, b = (self.read_values(name, side, tensors) for side in "ab")
            if a.dim() not in (2, 3) or a.dim() != b.dim():
                raise AdapterError(f"{name}:a and {name}:b do not fit each other: save the adapter again")
            rank = min(a.shape[-2], b.shape[-1])
            yield self.make_delta(name, a[..., :rank, :], b[..., :rank], config)


@mutant
class IgnoresTheRank(PlainFormat):
    """Reads factors of a higher rank than the configuration says."""

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterable[tuple[str, LowRankDelta]]:
        self.read_config(config)
        return super().read_deltas({**config, "rank": 10_000}, tensors)


@mutant
class RaisesKeyErrors(PlainFormat):
    """Raises KeyError for a layer that lacks a tensor."""

    def read_values(self, name: str, side: str, tensors: Mapping[str, Any]) -> torch.Tensor:
        tensors[f"{name}:{side}"]
        return super().read_values(name, side, tensors)


@mutant
class NamesNoTensor(PlainFormat):
    """Raises an error that does not say which tensor is broken."""

    def read_values(self, name: str, side: str, tensors: Mapping[str, Any]) -> torch.Tensor:
        try:
            return super().read_values(name, side, tensors)
        except AdapterError:
            raise AdapterError("the adapter is broken: save it again") from None


@mutant.using(capabilities=AdapterCapabilities(selects=(("lora_type", None),)))
class SelectsEverything(PlainFormat):
    """Its capabilities select the adapters of every other format."""


@mutant
class KeepsByAddress(PlainFormat):
    """Keeps the first configuration that it saw at an address."""

    def __init__(self, context: Any, options: Any = None) -> None:
        super().__init__(context, options)
        self.kept: dict[int, Mapping[str, Any]] = {}

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterable[tuple[str, LowRankDelta]]:
        if len(self.kept) > 100:
            self.kept.clear()
        return super().read_deltas(self.kept.setdefault(id(config), dict(config)), tensors)


@mutant
class TakesZeroForNone(Changed):
    """Takes an alpha of 0 for one that is missing."""

    def change(self, name: str, delta: LowRankDelta, config: Mapping[str, Any]) -> LowRankDelta:
        return replace(delta, scale=delta.scale or 1.0)


class Edited(LoraFormat):
    """Reads another configuration of PEFT than is stored."""

    def edit(self, config: dict[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        return super().read_config(self.edit(dict(config)))

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterator[tuple[str, LowRankDelta]]:
        return super().read_deltas(self.edit(dict(config)), tensors)


LORA = AdapterCapabilities(selects=(("peft_type", "LORA"), ("use_dora", None)))
DORA = AdapterCapabilities(selects=(("peft_type", "LORA"), ("use_dora", True)))


@mutant.using(capabilities=LORA)
class TakesTheLastPattern(Edited):
    """The last pattern that matches a layer counts."""

    def edit(self, config: dict[str, Any]) -> Mapping[str, Any]:
        patterns = {key: value for key, value in config.items() if key.endswith("pattern") and isinstance(value, dict)}
        return config | {key: dict(reversed(value.items())) for key, value in patterns.items()}


@mutant.using(capabilities=LORA)
class DefaultsToTheRank(Edited):
    """The alpha is the rank where the configuration has none, and not 8 as PEFT's."""

    def edit(self, config: dict[str, Any]) -> Mapping[str, Any]:
        return {"lora_alpha": config.get("r", 8)} | config


@mutant.using(capabilities=LORA)
class RefusesNull(Edited):
    """Refuses patterns that are null, as PEFT writes those that are not used."""

    def edit(self, config: dict[str, Any]) -> Mapping[str, Any]:
        if None in (config.get("alpha_pattern", {}), config.get("rank_pattern", {})):
            raise AdapterError("adapter_config.json: a pattern is null: save the adapter again")
        return config


@mutant.using(capabilities=LORA)
class TakesTheRankOfAll(LoraFormat):
    """Gives the rank of the configuration, also where a pattern has a larger one."""

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        return replace(super().read_config(config), rank=config.get("r", 8))


@mutant.using(capabilities=DORA)
class RoundsNorms(DoraFormat):
    """Rounds the norms of rows to the type of the factors."""

    def read_layer(self, *arguments: Any) -> LowRankDelta:
        delta = super().read_layer(*arguments)
        return replace(delta, output_norm=None if delta.output_norm is None else delta.output_norm.to(delta.a.dtype))


for target in adapter_state.WRONG:
    mutant(target, capabilities=LORA)
