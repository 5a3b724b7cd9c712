"""Encoders of images, videos and audio: transformers' own towers and projectors, beside a decoder
of ours.

`ReadsMedia` is the base of the architectures with encoders. transformers' modelling code is
imported only where `BuildContext.media` says so. Must not know a file format, a processor or the
placement of rows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.errors import ConfigurationError
from frame.core.interfaces.platform import SupportsStreams
from frame.models.encoder_modules import replace_modules
from frame.models.layer_pauses import LayerThreads
from frame.models.layers.decoder import Decoder

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.model import LazyTensor, ModelConfig, ModelContext

Arrays = Mapping[str, torch.Tensor]

_SCALE, _OFFSET = ".scale", ".offset"  # see `Modality.compute_features`
_PREFIX = "encoders.model."  # of the encoders' parameters, and of their tensors while they are loaded
_IGNORED = (r"(?:model\.)?image_newline$", rf"{re.escape(_PREFIX)}.*\.position_ids$")
_MAX_CHUNKS = 32  # of a sound, which are convolved at once
# keys of config.json that choose code or quantize; the towers have none of it
_DROPPED = re.compile(r"_.*|.*_implementation|auto_map|quantization_config")


class ReadsMedia(Decoder):
    """A decoder whose checkpoint has encoders (`HasEncoders`). An architecture derives from it
    first, and then from its text model. `nested_kinds`: the values of `text_config.model_type` that
    it implements; (): all that its architectures have."""

    nested_kinds: ClassVar[tuple[str, ...]] = ()

    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        nested = (context.model_config.full_config or {}).get("text_config") or {}
        kind = nested.get("model_type")
        if kind is not None and self.nested_kinds and kind not in self.nested_kinds:
            sentence = f"{context.model_config.architecture} with text_config.model_type {kind!r} is not implemented here"
            raise ConfigurationError(f"{sentence}; it can be served with model.implementation: transformers.")
        super().__init__(context, options)
        has_encoders = context.media is not None and self.is_first and bool(context.model_config.full_config)
        self.encoders = TransformersEncoders(context) if has_encoders else None

    @property
    def encoder_width(self) -> int:
        vision = self.model_config.full_config.get("vision_config") or {}
        return self.model_config.hidden_size * (1 + len(vision.get("deepstack_visual_indexes") or ()))

    def encode(self, modality: str, items: Sequence[Arrays]) -> list[torch.Tensor]:
        if self.encoders is None:
            raise TypeError(f"{type(self).__name__} was built without its encoders")
        return self.encoders.encode(modality, items)

    def encode_by_layer(self, modality: str, item: Arrays) -> Generator[None, None, torch.Tensor]:
        if self.encoders is None:
            raise TypeError(f"{type(self).__name__} was built without its encoders")
        return self.encoders.encode_by_layer(modality, item)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterable[tuple[str, LazyTensor]]:
        return super().map_weights(weights if self.encoders is None else self.encoders.rename_weights(weights))

    def get_ignored(self) -> tuple[str, ...]:
        return (*super().get_ignored(), *_IGNORED)


class TransformersEncoders(nn.Module):
    """The towers and projectors of an architecture's base model in transformers, without its
    language model. model: one that is loaded; None: it is built, and its weights follow."""

    def __init__(self, context: ModelContext, model: Any = None) -> None:
        super().__init__()
        self.device = context.device
        self.dtype = context.dtype
        self.is_deterministic = context.deterministic
        self._platform = context.platform
        self.threads = LayerThreads()
        self.model: Any = _build_model(context.model_config, context.dtype) if model is None else model
        self.family = str(self.model.config.model_type)
        if model is None:
            replace_modules(self.model, context.device, deterministic=context.deterministic)

    def rename_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        """The tensors, those of the encoders under the names of their parameters. transformers 4
        has a module `vision_model` in towers of SigLIP and CLIP, and no `model` around them."""
        known = {name.partition(".")[0] for name, _ in self.model.named_parameters()}
        tower = getattr(self.model, "vision_tower", None)
        has_inner = hasattr(tower, "vision_model")
        for name, tensor in weights:
            short = name.removeprefix("model.")
            if short.partition(".")[0] in known:
                if not has_inner:
                    short = short.replace("vision_tower.vision_model.", "vision_tower.", 1)
                name = f"{_PREFIX}{short}"
            yield name, tensor

    def process_weights_after_loading(self) -> None:
        """Compute the buffers that no checkpoint stores, such as rotary frequencies, as
        transformers does after loading."""
        for tensor in self.model.parameters():
            tensor._is_hf_initialized = True  # noqa: SLF001 - these have their values
        for module in self.model.modules():
            module._is_hf_initialized = False  # noqa: SLF001
            for name, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta:  # they depend on no weight
                    return
                module.register_buffer(name, torch.empty_like(buffer, device=self.device), persistent=False)
        self.model.initialize_weights()

    @torch.inference_mode()
    def encode(self, modality: str, items: Sequence[Arrays]) -> list[torch.Tensor]:
        """As `HasEncoders.encode`. In the batch-invariant mode each item alone, since products of
        more rows have other bits."""
        if (self.is_deterministic or modality in _ALONE.get(self.family, ())) and len(items) > 1:
            return [rows for item in items for rows in self.encode(modality, [item])]
        compute, names = _FAMILIES.get(self.family) or (_call_model, _list_inputs(self.model, modality))
        # processors write other arrays for the text
        prepared = [{name: self._prepare(item, name) for name in item if name in names} for item in items]
        units = [min(len(array) for array in item.values()) for item in prepared]
        pooled, further = compute(self.model, modality, _join(prepared))
        columns = [_split(features, units) for features in (pooled, *further)]
        return [torch.cat([torch.cat(list(parts)) for parts in rows], -1).to(self.dtype) for rows in zip(*columns, strict=True)]

    def encode_by_layer(self, modality: str, item: Arrays) -> Generator[None, None, torch.Tensor]:
        """As `DividesEncoders.encode_by_layer`. An encoder has one list of layers, its first but
        those of mergers."""
        tower = getattr(self.model, _TOWERS[modality], self.model)
        lists = ((name, module) for name, module in tower.named_modules() if isinstance(module, nn.ModuleList))
        layers = next((module for name, module in lists if "merger" not in name), ())
        platform = self._platform if isinstance(self._platform, SupportsStreams) else None
        stream = None if platform is None else platform.get_current_stream()

        def compute() -> torch.Tensor:
            if platform is not None and stream is not None:
                platform.set_stream(stream)
            return self.encode(modality, [item])[0]

        return self.threads.compute_by_layer(compute, list(layers))

    def _prepare(self, item: Arrays, name: str) -> torch.Tensor:
        """An array as the encoder reads it: bytes rescaled and normalised in float32, then in the
        model's dtype."""
        array = item[name]
        if array.dtype == torch.uint8 and f"{name}{_SCALE}" in item:
            shape = (-1, *(1,) * (array.dim() - 2))
            array = array.float() * item[f"{name}{_SCALE}"].view(shape) + item[f"{name}{_OFFSET}"].view(shape)
            if array.dim() == 5:  # patches
                frames = self.model.config.vision_config.temporal_patch_size
                array = array.expand(-1, -1, max(frames, array.shape[2]), -1, -1).flatten(1)
            elif name == "pixel_values_videos" and array.dim() == 4:
                array = array[None]
        return array.to(self.dtype) if array.is_floating_point() else array


def _build_model(model_config: ModelConfig, dtype: torch.dtype) -> Any:
    """The architecture's base model in transformers, on the current device, without its language
    model. Raises ConfigurationError if transformers has none."""
    import transformers

    stored = clean_config(model_config.full_config)
    kind = stored.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigurationError(
            f"transformers {transformers.__version__} has no encoders for model_type {kind!r} of config.json: install a newer one, or set "
            "media.enabled: false."
        )
    config = transformers.CONFIG_MAPPING[kind].from_dict(stored)
    attention = {"": "sdpa", **_ATTENTION.get(str(kind), {})}
    model = transformers.AutoModel.from_config(config, dtype=dtype, attn_implementation=attention, trust_remote_code=False)
    del model.language_model
    for module in model.modules():
        if hasattr(module, "conv_chunksize"):  # what a chunk's convolutions make is larger than what the memory plan counts
            module.conv_chunksize = min(module.conv_chunksize, _MAX_CHUNKS)
    for module in model.modules():  # so that they are loaded and counted as the others
        for name, buffer in [*module.named_buffers(recurse=False)]:
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001
                delattr(module, name)
                setattr(module, name, nn.Parameter(buffer, requires_grad=False))
    return model


def clean_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the keys that choose code."""
    kept = {key: value for key, value in config.items() if not _DROPPED.fullmatch(key)}
    return {key: clean_config(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def _join(items: Sequence[Arrays]) -> dict[str, torch.Tensor]:
    """The arrays of all items along their first axis; images of different sizes are padded with
    zeros at their ends, which the encoder cuts off."""
    joined = {}
    for name in items[0]:
        arrays = [item[name] for item in items]
        shape = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
        if any(list(array.shape[1:]) != shape for array in arrays):
            arrays = [_pad(array, shape) for array in arrays]
        joined[name] = torch.cat(arrays)
    return joined


def _pad(array: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An array with zeros at the ends of all axes but the first, to `shape`."""
    return F.pad(array, [pad for size, have in zip(shape[::-1], array.shape[:0:-1], strict=True) for pad in (0, size - have)])


def _split(features: Any, units: Sequence[int]) -> Iterator[Sequence[torch.Tensor]]:
    """The features of each item. features: one tensor for each unit, such as a tile, or one of all
    units."""
    total = sum(units)
    parts = features.reshape(total, -1, features.shape[-1]).unbind() if isinstance(features, torch.Tensor) else features
    start = 0
    for count in units:
        yield parts[start : start + count]
        start += count


def _list_inputs(model: Any, modality: str) -> Collection[str]:
    """The arrays that transformers' method for the modality takes, by name."""
    return inspect.signature(getattr(model, f"get_{modality}_features")).parameters


def _call_model(model: Any, modality: str, arrays: Arrays) -> tuple[Any, Sequence[Any]]:
    """-> the rows, and those for each further layer (DeepStack), by the method that transformers
    has for the modality."""
    output = getattr(model, f"get_{modality}_features")(**arrays, return_dict=True)
    return output.pooler_output, getattr(output, "deepstack_features", None) or ()


def _encode_qwen2_audio(model: Any, modality: str, arrays: Arrays) -> tuple[Any, Sequence[Any]]:
    """The tower attends to an audio's own frames; its rows are those of whole pairs of
    positions."""
    mask = arrays["feature_attention_mask"]
    positions, rows = model.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))  # noqa: SLF001
    inner = torch.arange((mask.shape[-1] - 2) // 2 + 1, device=mask.device) < positions[:, None]
    output = model.audio_tower(arrays["input_features"], attention_mask=inner[:, None, None])
    encoded = model.multi_modal_projector(output.last_hidden_state)
    return [each[:count] for each, count in zip(encoded, rows.tolist(), strict=True)], ()


def _encode_qwen3_omni(model: Any, modality: str, arrays: Arrays) -> tuple[Any, Sequence[Any]]:
    """Sounds each alone, since the tower pads the last chunk of each to the longest chunk of all.
    Their rows add nothing after further layers."""
    if modality != "audio":
        return _call_model(model, modality, arrays)
    rows = []
    for features, mask in zip(arrays["input_features"], arrays["feature_attention_mask"].bool(), strict=True):
        rows.append(model.audio_tower(features[:, mask], feature_lens=mask.sum()[None]).last_hidden_state)
    zeros = [torch.zeros_like(each) for each in rows]
    return rows, [zeros] * len(model.config.vision_config.deepstack_visual_indexes)


def _encode_minicpmv(model: Any, modality: str, arrays: Arrays) -> tuple[Any, Sequence[Any]]:
    """The patches of an image's slices follow each other in one array."""
    return [torch.cat(tuple(_call_model(model, modality, arrays)[0]))], ()


def _encode_gemma4(model: Any, modality: str, arrays: Arrays) -> tuple[Any, Sequence[Any]]:
    """The rows of all images, or of frames, follow each other: one for each square of patches that
    is no padding. Frames of a sound that are padding come last."""
    if modality == "audio":
        mask = arrays["input_features_mask"].bool()
        output = model.get_audio_features(arrays["input_features"], mask, return_dict=True)
        return [rows[mask] for rows, mask in zip(output.pooler_output, output.attention_mask, strict=True)], ()
    is_video = modality == "video"
    positions = arrays["video_position_ids" if is_video else "image_position_ids"]
    pixels = arrays["pixel_values_videos" if is_video else "pixel_values"]
    output = model.get_image_features(pixels, positions, return_dict=True).pooler_output
    rows = output if isinstance(output, torch.Tensor) else torch.cat(tuple(output))
    counts = positions.ne(-1).all(-1).sum(-1) // model.config.vision_config.pooling_kernel_size**2
    return rows.split(counts.tolist()), ()


def _encode_internvl(model: Any, modality: str, arrays: Arrays) -> tuple[Any, Sequence[Any]]:
    """The frames of a video are images."""
    pixels = arrays["pixel_values"] if modality == "image" else arrays["pixel_values_videos"].flatten(0, 1)
    return model.get_image_features(pixels, return_dict=True).pooler_output, ()


def _encode_mistral3(model: Any, modality: str, arrays: Arrays) -> tuple[Any, Sequence[Any]]:
    """transformers fails where all images together have one row: that image is computed twice."""
    square = model.vision_tower.patch_size * model.config.spatial_merge_size
    if int((arrays["image_sizes"] // square).prod(-1).sum()) > 1:
        return _call_model(model, modality, arrays)
    rows, further = _call_model(model, modality, {name: torch.cat((array, array)) for name, array in arrays.items()})
    return rows[:1], further


def _encode_llama4(model: Any, modality: str, arrays: Arrays) -> tuple[Any, Sequence[Any]]:
    """The projector is outside of transformers' method."""
    output = model.get_image_features(arrays["pixel_values"], return_dict=True)
    return model.multi_modal_projector(output.last_hidden_state), ()


_TOWERS = {"image": "visual", "video": "visual", "audio": "audio_tower"}  # by modality, of models with several
_PICTURES, _FILMS, _SOUNDS = (
    ("pixel_values", "image_grid_thw"),
    ("pixel_values_videos", "video_grid_thw"),
    ("input_features", "feature_attention_mask"),
)
# by family, modalities whose arrays of several items do not lie along one axis, or may be absent
_ALONE: Mapping[str, tuple[str, ...]] = {
    "deepseek_ocr2": ("image",),
    "internvl": ("video",),
    "llava_onevision": ("video",),
    "minicpmv4_6": ("image",),
}
# by model_type, encoders whose attention has one form alone
_ATTENTION: Mapping[str, Mapping[str, str]] = {"gemma4": {"audio_config": "eager"}}
# by model_type, with the names of the arrays; the others by transformers' methods
_FAMILIES: Mapping[str, tuple[Callable[[Any, str, Arrays], tuple[Any, Sequence[Any]]], Collection[str]]] = {
    "gemma4": (
        _encode_gemma4,
        ("pixel_values", "image_position_ids", "pixel_values_videos", "video_position_ids", "input_features", "input_features_mask"),
    ),
    "internvl": (_encode_internvl, ("pixel_values", "pixel_values_videos")),
    "llama4": (_encode_llama4, ("pixel_values",)),
    "minicpmv4_6": (_encode_minicpmv, ("pixel_values", "target_sizes")),
    "mistral3": (_encode_mistral3, ("pixel_values", "image_sizes")),
    "qwen2_audio": (_encode_qwen2_audio, _SOUNDS),
    "qwen3_omni_moe_thinker": (_encode_qwen3_omni, (*_PICTURES, *_FILMS, *_SOUNDS)),
}
