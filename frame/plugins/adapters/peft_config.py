"""Reads PEFT's `adapter_config.json`: the rank and the scale of each layer. Used by the formats of
PEFT. Must not know tensors.

The file is untrusted. Keys of `rank_pattern` and `alpha_pattern` are regular expressions in PEFT;
here they are names of layers, with `^`, `$` and `\\.`, and are looked up without a matcher.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from frame.core.interfaces.adapter import AdapterError

Rank = Annotated[int, Meta(ge=1, le=65536)]
Alpha = Annotated[float, Meta(ge=-1e6, le=1e6)]

_INITIAL = (True, False, "gaussian", "eva", "orthogonal", "mica")  # values that leave the base model's weights as they are
_MERGE = "merge the adapter into the base model with PEFT and serve the result"
_REFUSED = MappingProxyType(
    {
        "lora_bias": "trains biases of the factors",
        "modules_to_save": "names layers that are trained whole",
        "trainable_token_indices": "trains single rows of the embedding",
        "layer_replication": "repeats layers of the model",
        "megatron_config": "is for layers of Megatron",
        "use_qalora": "pools the inputs of layers",
        "use_bdlora": "has factors of blocks",
        "arrow_config": "routes between adapters",
        "kasa_config": "truncates the base model's weights",
        "monteclora_config": "draws the factors at random",
        "velora_config": "keeps a state of the training among the factors",
    }
)
# Keys that say how the adapter was trained or where, or belong to an option that is off.
_HARMLESS = frozenset(
    (
        "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config", "target_modules", "exclude_modules",
        "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
        "corda_config", "lora_ga_config", "ensure_weight_tying",
    )
)  # fmt: skip
_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?", re.ASCII)


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The options that change the product, with PEFT's defaults."""

    peft_type: str | None = None
    base_model_name_or_path: str | None = None
    r: Rank = 8
    lora_alpha: Alpha = 8
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Alpha] | None = None
    use_rslora: bool = False
    use_dora: bool | None = False
    fan_in_fan_out: bool | None = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    target_parameters: list[str] | None = None
    alora_invocation_tokens: list[Annotated[int, Meta(ge=0, lt=2**31)]] | None = None


class LayerScales:
    """The rank and the scale of each layer, by its name in PEFT's model."""

    def __init__(self, config: PeftConfig) -> None:
        self._config = config
        self._ranks = _index_patterns("rank_pattern", config.rank_pattern)
        self._alphas = _index_patterns("alpha_pattern", config.alpha_pattern)

    def find_rank(self, name: str) -> int:
        return int(_find(self._ranks, name, self._config.r))

    def find_scale(self, name: str) -> float:
        rank, alpha = self.find_rank(name), _find(self._alphas, name, self._config.lora_alpha)
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)


def read_peft_config(config: Mapping[str, Any], uses_dora: bool = False) -> PeftConfig:
    """The options of an adapter. Raises AdapterError for one that is not implemented."""
    try:
        options = msgspec.convert(dict(config), PeftConfig)
    except msgspec.ValidationError as error:
        reason, _, key = str(error).partition(" - at `$.")
        raise AdapterError(f"adapter_config.json: {key.strip('`') or 'the file'} is invalid ({reason}): save the adapter again") from None
    if options.peft_type != "LORA":
        raise AdapterError(f"adapter_config.json: peft_type is {options.peft_type!r:.100}, and LORA is read: {_MERGE}")
    if bool(options.use_dora) != uses_dora:
        other = "dora" if options.use_dora else "lora"
        raise AdapterError(f"adapter_config.json: use_dora is {options.use_dora}: set adapters.format to {other}")
    if options.bias != "none":
        raise AdapterError(
            f"adapter_config.json: bias is {options.bias!r:.100}, so biases are trained, which adapters leave alone: {_MERGE}"
        )
    initial = options.init_lora_weights
    if initial is not None and (initial.lower() if isinstance(initial, str) else initial) not in _INITIAL:
        remedy = "save it with path_initial_model_for_weight_conversion, or merge it into the base model with PEFT"
        raise AdapterError(f"adapter_config.json: init_lora_weights {initial!r:.100} may change the base model's weights: {remedy}")
    for key, value in config.items():
        if key in _REFUSED and value not in (None, False, []):
            raise AdapterError(f"adapter_config.json: {key} {_REFUSED[key]}, which is not implemented: {_MERGE}")
        known = key in _HARMLESS or key in _REFUSED or key in PeftConfig.__struct_fields__
        if not known and value not in (None, False, [], {}):
            raise AdapterError(f"adapter_config.json: {key!r:.100} is an unknown option: remove it if it changes no product, else {_MERGE}")
    for key in ("alora_invocation_tokens", "target_parameters"):
        if uses_dora and getattr(options, key):
            raise AdapterError(f"adapter_config.json: use_dora and {key} exclude each other: save the adapter again with PEFT")
    LayerScales(options)
    return options


def _index_patterns(option: str, patterns: Mapping[str, float] | None) -> dict[str, tuple[int, float]]:
    """Name -> (place in the file, value); names that are to be whole begin with `^`."""
    index: dict[str, tuple[int, float]] = {}
    for place, (key, value) in enumerate((patterns or {}).items()):
        if not _PATTERN.fullmatch(key):
            raise AdapterError(f"adapter_config.json: {option} has the key {key!r:.100}, an expression: write the names of the layers")
        index.setdefault(key.removesuffix("$").replace("\\.", "."), (place, value))
    return index


def _find(index: Mapping[str, tuple[int, float]], name: str, default: float) -> float:
    """The value of the first pattern that is the name or the end of it after a dot."""
    values = [index[key] for key in (f"^{name}", *list_ends(name)) if key in index]
    return min(values)[1] if values else default


def list_ends(name: str) -> Iterator[str]:
    """The name, and its ends after each dot."""
    while name:
        yield name
        name = name.partition(".")[2]
