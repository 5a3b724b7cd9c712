"""The adapter format of PEFT's LoRA (arXiv 2106.09685), with rsLoRA, aLoRA and experts.

A tensor is `base_model.model.LAYER.lora_A.weight`; some files have the adapter's name before
`.weight`. Parameters that PEFT wraps (`target_parameters`) are stacked over experts, and two of one
module are nested: `MODULE.base_layer.lora_A.weight` is the inner one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from frame.interfaces.adapter import AdapterConfig, AdapterError, AdapterFormat, LowRankDelta
from frame.plugins.adapters.peft_config import LayerScales, PeftConfig, list_ends, read_peft_config

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

_PREFIX, _WRAPPER = r"(?:base_model\.model\.)?", r"\.base_layer"
# module, wrappers, kind; the adapter's name may follow the kind
_FACTOR = re.compile(
    rf"{_PREFIX}(.+?)((?:{_WRAPPER})*)\.lora_"
    r"(?:([AB])(?:\.[^.]+)?\.weight|(embedding_[AB]|magnitude_vector)(?:\.(?!bias$)[^.]+)?(?:\.weight)?)"
)
# What PEFT copies where it is a target: a wrapped layer, or an embedding or head
_COPY = re.compile(rf"{_PREFIX}(?:(.+){_WRAPPER}|((?:.+\.)?(?:embed_tokens|lm_head)))\.(?:weight|bias)")
_MAX_NAME = 1000  # letters of a tensor's name; the work for one grows with its square
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_AGAIN = "save the adapter again with PEFT"
# Stacked parameters of one module, in the order in which models declare them, which is the order of
# wrapping; the outputs of the first by the inputs of the second.
_STACKED = {("gate_up_proj", "down_proj"): 2, ("up_proj", "down_proj"): 1}

# A layer's tensors: after "lora_" -> (name, tensor)
Factors = dict[str, tuple[str, "LazyTensor"]]
NamedDelta = tuple[str, LowRankDelta]


class LoraFormat(AdapterFormat):
    """LoRA as PEFT 0.19 to 0.21 writes it."""

    uses_dora = False

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        options = read_peft_config(config, self.uses_dora)
        rank = max([options.r, *(options.rank_pattern or {}).values()])
        return AdapterConfig(rank, options.base_model_name_or_path or "", tuple(options.alora_invocation_tokens or ()))

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> Iterator[NamedDelta]:
        options = read_peft_config(config, self.uses_dora)
        scales, targets = LayerScales(options), _index_parameters(options.target_parameters or ())
        for module, levels in _group_factors(tensors).items():
            if wrapped := list(dict.fromkeys(name for end in list_ends(module) for name in targets.get(end, ()))):
                yield from self._read_parameters(module, wrapped, levels, scales)
            elif len(levels) == 1:
                yield module, self.read_layer(module, levels[0], scales, options)
            else:
                raise AdapterError(f"{_some_name(levels[1])}: target_parameters names no parameter of {module!r:.200}: {_AGAIN}")

    def read_layer(self, module: str, factors: Factors, scales: LayerScales, options: PeftConfig) -> LowRankDelta:
        """The delta of a layer with a weight of its own. `fan_in_fan_out` says how PEFT's base
        stored its weight, not these factors; a checkpoint of Conv1D layers has transposed axes."""
        kind = "embedding_" if any(kind.startswith("embedding") for kind in factors) else ""
        a, b = _read_pair(factors, scales.find_rank(module), kind)
        if kind:  # whose weight is stored [inputs, outputs]
            a, b = b.t(), a.t()
        return LowRankDelta(a, b, scales.find_scale(module))

    def _read_parameters(self, module: str, names: list[str], levels: list[Factors], scales: LayerScales) -> Iterator[NamedDelta]:
        """The deltas of the module's parameters `names`, which are wrapped in some order."""
        if len(names) != len(levels):
            raise AdapterError(
                f"{_some_name(levels[0])}: {module!r:.200} has {len(names)} parameters that are targets, not {len(levels)}: {_AGAIN}"
            )
        order, is_flipped = (names, False) if len(names) == 1 else _tell_apart(module, names, levels)
        for name, factors in zip(order, levels, strict=True):
            full = f"{module}.{name}"
            rank = scales.find_rank(full)
            a, b = _read_pair(factors, rank, "", is_stacked=True)
            if len(a) > rank or name != "weight":
                a = a.reshape(-1, rank, a.shape[1])
                b = b.reshape(len(b), rank, -1).permute(2, 0, 1)
                a, b = (b.mT, a.mT) if is_flipped else (a, b)
                yield full, LowRankDelta(a, b, scales.find_scale(full))
            else:
                yield module, LowRankDelta(a, b, scales.find_scale(full))


def _group_factors(tensors: Mapping[str, LazyTensor]) -> dict[str, list[Factors]]:
    """The factors by module, and within a module from the innermost wrapper to the outermost."""
    modules: dict[str, dict[int, Factors]] = {}
    others = []
    for name, tensor in tensors.items():
        if len(name) > _MAX_NAME:
            raise AdapterError(f"{name[:80]!r}... has more than {_MAX_NAME} letters: {_AGAIN}")
        if match := _FACTOR.fullmatch(name):
            module, wrappers, kind = match[1], match[2], match[3] or match[4]
            factors = modules.setdefault(module, {}).setdefault(wrappers.count("."), {})
            if kind in factors:
                raise AdapterError(f"{name!r:.200} and {factors[kind][0]!r:.200} are one factor: save one adapter in a file")
            factors[kind] = (name, tensor)
        else:
            others.append(name)
    for name in others:
        copy = _COPY.fullmatch(name)
        if copy is None or (copy[1] or copy[2]) not in modules:
            raise AdapterError(f"{name!r:.200} is no factor of LoRA: merge the adapter into the base model with PEFT and serve the result")
    if not modules:
        raise AdapterError(f"the adapter's file holds no factors of LoRA: {_AGAIN}")
    for module, levels in modules.items():
        if sorted(levels) != list(range(len(levels))):
            raise AdapterError(f"{_some_name(levels[max(levels)])}: a wrapper inside of {module!r:.200} has no factors: {_AGAIN}")
    return {module: [levels[depth] for depth in sorted(levels, reverse=True)] for module, levels in modules.items()}


def _index_parameters(targets: Iterable[str]) -> dict[str, list[str]]:
    """The parameters that are targets, by the end of their module's name."""
    parameters: dict[str, list[str]] = {}
    for target in targets:
        path, _, name = target.rpartition(".")
        parameters.setdefault(path or "experts", []).append(name)
    return parameters


def _tell_apart(module: str, names: list[str], levels: list[Factors]) -> tuple[list[str], bool]:
    """The parameters from the innermost wrapper to the outermost, and whether PEFT took the stored
    inputs for outputs, as it does where a model does not say so.

    The inputs of the first parameter are the outputs of the second."""
    expected = next((pair for pair in _STACKED if set(pair) == set(names)), None)
    if expected is None:
        raise AdapterError(f"{_some_name(levels[0])}: nothing tells the parameters {names!r:.200} apart: target one of them")
    sizes = [tuple(_get_shape(factors, kind)[axis] for kind, axis in (("A", 1), ("B", 0))) for factors in levels]
    for order, (first, second) in ((expected, sizes), (expected[::-1], sizes[::-1])):
        for is_flipped in (False, True):
            (inputs, outputs), (inner, last) = (first[::-1], second[::-1]) if is_flipped else (first, second)
            if inputs == last and outputs == _STACKED[expected] * inner:
                return list(order), is_flipped
    raise AdapterError(f"{_some_name(levels[0])}: its size does not fit the other parameter of {module!r:.200}: {_AGAIN}")


def _read_pair(factors: Factors, rank: int, kind: str, is_stacked: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """`A` [rank, inputs] and `B` [outputs, rank]; stacked: all experts' ranks in one dimension."""
    expected = {f"{kind}A", f"{kind}B"}
    for surplus in factors.keys() - expected:
        raise AdapterError(f"{factors[surplus][0]!r:.200} does not belong to a layer of this adapter: {_AGAIN}")
    (rows, _), (_, columns) = (_get_shape(factors, f"{kind}{side}") for side in "AB")
    if rows != columns or (rows % rank if is_stacked else rows != rank) or not rows:
        name = factors[f"{kind}A"][0]
        raise AdapterError(f"{name!r:.200} has {rows} ranks, its partner {columns}, and adapter_config.json says {rank}: {_AGAIN}")
    return read_factor(factors, f"{kind}A"), read_factor(factors, f"{kind}B")


def _get_shape(factors: Factors, kind: str) -> tuple[int, ...]:
    if kind not in factors:
        raise AdapterError(f"{_some_name(factors)} has no partner lora_{kind}: {_AGAIN}")
    name, tensor = factors[kind]
    if len(tensor.shape) != 2:
        raise AdapterError(f"{name!r:.200} has the shape {list(tensor.shape)}, and two dimensions are read: {_AGAIN}")
    return tuple(tensor.shape)


def read_factor(factors: Factors, kind: str) -> torch.Tensor:
    """The values, as they are stored. Raises AdapterError for another type than `_TYPES`, and for
    values that are no finite numbers."""
    name, tensor = factors[kind]
    values = tensor[...]
    if values.dtype not in _TYPES:
        *others, last = (str(each).removeprefix("torch.") for each in _TYPES)
        raise AdapterError(f"{name!r:.200} is of {values.dtype}: save the adapter in {', '.join(others)} or {last}")
    if not torch.isfinite(values.float()).all():
        raise AdapterError(f"{name!r:.200} has values that are no finite numbers: train the adapter again")
    return values


def _some_name(factors: Factors) -> str:
    return f"{next(iter(factors.values()))[0]!r:.200}"
