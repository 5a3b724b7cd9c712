"""Reads PEFT's `adapter_config.json`: the rank and the scale of each layer. Used by the formats of
PEFT. Must not know tensors.

The file is untrusted. Keys of `rank_pattern` and `alpha_pattern` are regular expressions. Those
that are names of layers, perhaps with `^`, `$` and `\\.`, are looked up, and a dot is a dot. The
others are matched in linear time by the engine that pydantic brings.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from pydantic_core import SchemaError, SchemaValidator, core_schema

from frame.interfaces.adapter import AdapterError

Rank = Annotated[int, Meta(ge=1, le=65536)]
Alpha = Annotated[float, Meta(ge=-1e6, le=1e6)]

_INITIAL = (True, False, "gaussian", "eva", "orthogonal", "mica")  # values that leave the base model's weights as they are
_MERGE = "merge the adapter into the base model with PEFT and serve the result"
_REFUSED = {
    "lora_bias": "trains biases of the factors", "modules_to_save": "names layers that are trained whole",
    "trainable_token_indices": "trains single rows of the embedding", "layer_replication": "repeats layers of the model",
    "megatron_config": "is for layers of Megatron", "use_qalora": "pools the inputs of layers", "use_bdlora": "has factors of blocks",
    "arrow_config": "routes between adapters", "kasa_config": "truncates the base model's weights",
    "monteclora_config": "draws the factors at random", "velora_config": "keeps a state of the training among the factors",
}  # fmt: skip
# Keys that say how the adapter was trained or where, or belong to an option that is off.
_HARMLESS = frozenset(
    (
        "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config", "target_modules", "exclude_modules",
        "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
        "corda_config", "lora_ga_config", "ensure_weight_tying",
    )
)  # fmt: skip
_MAX_EXPRESSIONS, _MAX_LETTERS, _MAX_SECONDS = 32, 200, 20.0  # of an option
_PLAIN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?", re.ASCII)


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
        self._ranks = _Patterns("rank_pattern", config.rank_pattern)
        self._alphas = _Patterns("alpha_pattern", config.alpha_pattern)

    def find_rank(self, name: str) -> int:
        return int(self._ranks.find(name, self._config.r))

    def find_scale(self, name: str) -> float:
        rank, alpha = self.find_rank(name), self._alphas.find(name, self._config.lora_alpha)
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
        raise AdapterError(f"adapter_config.json: bias is {options.bias!r:.100}, and biases are left as they are: {_MERGE}")
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
    if options.alora_invocation_tokens == []:
        raise AdapterError("adapter_config.json: alora_invocation_tokens is empty, so the adapter would never be active: remove it")
    for key in ("alora_invocation_tokens", "target_parameters"):
        if uses_dora and getattr(options, key):
            raise AdapterError(f"adapter_config.json: use_dora and {key} exclude each other: save the adapter again with PEFT")
    LayerScales(options)
    return options


class _Patterns:
    """Values of an option by patterns of names, which PEFT matches with a layer's whole name or the
    end of it after a dot. The first in the file counts."""

    def __init__(self, option: str, patterns: Mapping[str, float] | None) -> None:
        self._option = option
        self._plain: dict[str, tuple[int, float]] = {}  # names that are to be whole begin with `^`
        self._expressions: list[tuple[int, float, SchemaValidator]] = []
        self._seconds = 0.0
        for place, (key, value) in enumerate((patterns or {}).items()):
            if _PLAIN.fullmatch(key):
                self._plain.setdefault(key.removesuffix("$").replace("\\.", "."), (place, value))
            else:
                self._expressions.append((place, value, self._compile(key)))

    def find(self, name: str, default: float) -> float:
        start = time.perf_counter()
        values = [self._plain[key] for key in (f"^{name}", *list_ends(name)) if key in self._plain]
        values += [(place, value) for place, value, expression in self._expressions if expression.isinstance_python(name)]
        self._seconds += time.perf_counter() - start
        if self._seconds > _MAX_SECONDS:
            raise AdapterError(f"adapter_config.json: the expressions of {self._option} take too long: write the names of the layers")
        return min(values)[1] if values else default

    def _compile(self, key: str) -> SchemaValidator:
        with suppress(SchemaError):
            if len(key) <= _MAX_LETTERS and len(self._expressions) < _MAX_EXPRESSIONS:
                SchemaValidator(core_schema.str_schema(pattern=key))  # alone, it has all of its brackets
                return SchemaValidator(core_schema.str_schema(pattern=rf"^(?:(?:.*\.)?(?:{key}))$"))
        limits = f"{_MAX_EXPRESSIONS} expressions of {_MAX_LETTERS} letters, without references and look-around, are read"
        raise AdapterError(f"adapter_config.json: {self._option} has the key {key!r:.100}, but {limits}: write the names of the layers")


def list_ends(name: str) -> Iterator[str]:
    """The name, and its ends after each dot."""
    while name:
        yield name
        name = name.partition(".")[2]
