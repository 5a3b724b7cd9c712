"""Encoders of the fallback: those of a transformers model that is loaded whole.

Used by `TransformersForCausalLM` for architectures with encoders that have no plugin of their own.
A model is served if transformers puts its encoder's output in place of placeholders and nothing
else: attention stays causal, positions are those of text. Must not know an architecture by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from frame.core.errors import ConfigurationError
from frame.models.encoders import Arrays, TransformersEncoders, clean_config

if TYPE_CHECKING:
    from frame.core.interfaces.model import ModelConfig, ModelContext

_OUTPUT = "BaseModelOutputWithPooling"  # of `get_image_features`; other classes have rows for further layers or tokens
_PIXELS = "pixel_values"
_SHAPE_ERRORS = (IndexError, RuntimeError, TypeError, ValueError)  # of an array with an axis too few


def has_encoders(model_config: ModelConfig) -> bool:
    """Whether the checkpoint's language model is a part of its architecture."""
    kind = model_config.config.get("model_type")
    return bool(model_config.full_config.get("model_type", kind) != kind)


def check_encoders(model_config: ModelConfig, architecture: Any) -> None:
    """Raises ConfigurationError unless the rows of an image replace placeholders, and nothing
    else."""
    import transformers

    name, kind = model_config.architecture, model_config.full_config["model_type"]
    sentence = f"{name} is a language model with encoders of images or audio for which frame has no plugin, and the fallback does not"
    remedy = "serve a checkpoint of the language model alone"
    mapped = transformers.AutoModel._model_mapping  # noqa: SLF001 - the public form builds a model
    # lazy mappings, whose `get` finds only classes that are already imported
    known = kind in transformers.CONFIG_MAPPING and transformers.CONFIG_MAPPING[kind] in mapped
    base = mapped[transformers.CONFIG_MAPPING[kind]] if known else None
    get_features = getattr(base, "get_image_features", None)
    if base is None or get_features is None or "ForConditionalGeneration" not in architecture.__name__:
        raise ConfigurationError(f"{sentence} find its encoder of images: {remedy}.")
    result = inspect.signature(get_features).return_annotation
    if getattr(result, "__name__", str(result)).rpartition(".")[2].strip("'> ") != _OUTPUT:
        raise ConfigurationError(f"{sentence} place the further rows that this one computes: {remedy}.")
    finds_kinds = any("token_type_ids" in argument for argument in inspect.signature(base.forward).parameters)
    if finds_kinds or model_config.has_mrope or hasattr(base, "get_rope_index"):  # some have default sections of M-RoPE
        raise ConfigurationError(f"{sentence} compute attention or positions that depend on where an image is: {remedy}.")


def build_config(model_config: ModelConfig, architecture: Any, attention: str) -> Any:
    """The configuration of the whole model, whose language model alone computes by `attention`."""
    import transformers

    full = clean_config(model_config.full_config)
    config = transformers.CONFIG_MAPPING[full["model_type"]].from_dict(full)
    text = config.get_text_config()
    encoders = "sdpa" if architecture._supports_sdpa else "eager"  # noqa: SLF001
    names = {name: encoders for name in config.sub_configs if getattr(config, name, None) is not text}
    config._attn_implementation = {"": attention, **dict.fromkeys(config.sub_configs, attention), **names}  # noqa: SLF001
    return config


def find_decoder(model: Any) -> Any:
    """The language model in the base model. Raises ConfigurationError where the architecture has
    none of its own around it."""
    if model.base_model is model:
        raise ConfigurationError(f"{type(model).__name__} has no base model with a decoder, which the fallback needs to place images.")
    return model.base_model.get_decoder()


class WholeModelEncoders(TransformersEncoders):
    """The encoders in a model that was loaded. Items are encoded each alone: how a processor lays
    the arrays of several is the architecture's own."""

    def __init__(self, context: ModelContext, model: Any) -> None:
        super().__init__(context, model)
        self._names = frozenset(inspect.signature(model.get_image_features).parameters)  # of the arrays that it takes
        self._has_items = False  # the encoder takes an axis of items before that of tiles

    @torch.inference_mode()
    def encode(self, modality: str, items: Sequence[Arrays]) -> list[torch.Tensor]:
        return [self._encode(item) for item in items]

    def _encode(self, item: Arrays) -> torch.Tensor:
        """-> [rows, hidden size]."""
        arrays = {name: self._prepare(item, name) for name in item if name in self._names}
        try:
            rows = self._call(arrays)
        except torch.OutOfMemoryError:
            raise
        except _SHAPE_ERRORS:
            if self._has_items or arrays[_PIXELS].dim() != 4:
                raise
            rows = self._call(_with_items(arrays))
            self._has_items = True
        return rows.to(self.dtype)

    def _call(self, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        inputs = _with_items(arrays) if self._has_items else arrays
        rows = self.model.get_image_features(**inputs, return_dict=True).pooler_output
        pieces = [rows] if isinstance(rows, torch.Tensor) else list(rows)
        return torch.cat([piece.flatten(0, -2) for piece in pieces])


def _with_items(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**arrays, _PIXELS: arrays[_PIXELS][None] if arrays[_PIXELS].dim() == 4 else arrays[_PIXELS]}
