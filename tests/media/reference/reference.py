"""transformers' model and image processor over a checkpoint with encoders: the tokens and the
log-probabilities that an engine must give. Videos and sounds are read as frame prepared them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.media import MediaItem
from tests.media.reference.prompts import Prompt
from tests.models.media_checkpoints import load_media_reference

_NESTED = ("mistral3", "llava_next", "gemma3")  # processors that take a list for each prompt
_OMNI = "qwen3_omni_moe_thinker"
_TIE = 1e-4  # logits that are closer are equal within rounding


@dataclass(frozen=True)
class Expected:
    """What transformers generates."""

    token_ids: list[int]
    logits: torch.Tensor  # float32 [tokens, vocabulary]

    def check(self, token_ids: Sequence[int], name: str) -> None:
        """Raises AssertionError unless the tokens are these, up to a tie of two logits."""
        assert len(token_ids) == len(self.token_ids), name
        for place, (token, reference) in enumerate(zip(token_ids, self.token_ids, strict=True)):
            if token != reference:
                lead = float(self.logits[place, reference] - self.logits[place, token])
                assert lead < _TIE, f"{name}: token {place} is {token} instead of {reference}, whose logit is {lead} above it"
                return


def _find_positions(find: Callable[..., Any], input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor, **keys: Any) -> Any:
    """M-RoPE positions of a prompt, int64 [3, 1, tokens], and their offset. What follows a file has
    the largest position of the file plus one (arXiv 2409.12191, section 2.1); transformers 5 counts
    the height and the width alone, and texts after a video repeat positions of frames."""
    positions, _ = find(input_ids, mm_token_type_ids=mm_token_type_ids, **keys)
    place = following = 0
    for _, group in itertools.groupby(mm_token_type_ids[0].tolist()):
        count = len(list(group))
        some = positions[:, 0, place : place + count]
        some += following - some.min()
        place, following = place + count, int(some.max()) + 1
    return positions, torch.tensor([[following - place]])


def _concatenate(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """Along the first axis; sounds of different lengths get zeros at their ends."""
    shape = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
    joined = arrays[0].new_zeros(sum(len(array) for array in arrays), *shape)
    start = 0
    for array in arrays:
        joined[(slice(start, start := start + len(array)), *map(slice, array.shape[1:]))] = array
    return joined


def _encode_alone(encode: Callable[..., Any], input_features: torch.Tensor, feature_lens: torch.Tensor, **keys: Any) -> Any:
    """Sounds each alone. The tower of Qwen3-Omni pads the last chunk of each to the longest chunk
    of all, and its convolutions read that: beside others, a short sound has other rows."""
    pieces = input_features.split(feature_lens.tolist(), 1)
    outputs = [encode(piece, feature_lens=length[None], **keys) for piece, length in zip(pieces, feature_lens, strict=True)]
    outputs[0].last_hidden_state = torch.cat([each.last_hidden_state for each in outputs])
    return outputs[0]


def _embed_first(model: Any, forward: Callable[..., Any], input_ids: Any = None, pixel_values: Any = None, **keys: Any) -> Any:
    """A placeholder that Kimi-K2.5 generates is embedded as it is; transformers takes token 0."""
    if pixel_values is None and keys.get("inputs_embeds") is None:
        keys["inputs_embeds"], input_ids = model.get_input_embeddings()(input_ids), None
    return forward(input_ids=input_ids, pixel_values=pixel_values, **keys)


class Reference:
    """One checkpoint."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor

        self._config = json.loads((folder / "config.json").read_text())
        self.family = str(self._config["model_type"])
        self.model = load_media_reference(folder)
        has_images = "vision_config" in self._config and self.family not in ("kimi_k25", "llama4")  # whose processors need torchvision
        if self.family == _OMNI:
            tower = self.model.model.audio_tower
            tower.forward = partial(_encode_alone, tower.forward)
        elif self.family == "kimi_k25":
            self.model.model.forward = partial(_embed_first, self.model.model, self.model.model.forward)
        elif hasattr(getattr(self.model, "model", None), "get_rope_index"):
            self.model.model.get_rope_index = partial(_find_positions, self.model.model.get_rope_index)
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil") if has_images else None

    @torch.inference_mode()
    def generate(self, prompt: Prompt, ids: list[int], items: Sequence[MediaItem], num_tokens: int) -> Expected:
        inputs = self._make_inputs(prompt, ids, items)
        output = self.model.generate(
            **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_logits=True
        )  # fmt: skip
        return Expected(output.sequences[0, len(ids) :].tolist(), torch.cat(output.logits).float())

    @torch.inference_mode()
    def score(self, prompt: Prompt, ids: list[int], items: Sequence[MediaItem]) -> torch.Tensor:
        """The log-probabilities after each token of the prompt."""
        return self.model(**self._make_inputs(prompt, ids, items)).logits[0].float().log_softmax(-1)

    def _make_inputs(self, prompt: Prompt, ids: list[int], items: Sequence[MediaItem]) -> dict[str, Any]:
        from frame.media.files import map_features

        tokens = torch.tensor([ids])
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        kinds = torch.zeros_like(tokens)
        for item in items:
            for run in item.runs:
                kinds[0, run.start : run.start + run.count] = {"image": 1, "video": 2, "audio": 3}[item.modality]
        if self.family != _OMNI and hasattr(getattr(self.model, "model", None), "get_rope_index"):
            inputs["mm_token_type_ids"] = kinds
        elif self.family.startswith("gemma"):
            inputs["token_type_ids" if self.family == "gemma3" else "mm_token_type_ids"] = kinds
        if prompt.images and self._processor is not None:
            inputs |= self._read_images(prompt.images)
        others = [item for item in items if item.modality != "image" or self._processor is None]
        for _, group in itertools.groupby(sorted(others, key=attrgetter("modality")), attrgetter("modality")):  # which keeps their order
            arrays = [self._read_arrays(map_features(item)) for item in group]
            inputs |= {name: _concatenate([each[name] for each in arrays]) for name in arrays[0] if name != "aspect_ratios"}
            if "input_features_mask" in inputs:
                inputs["input_features_mask"] = inputs["input_features_mask"].bool()
            if "video_position_ids" in arrays[0]:
                inputs["num_frames_per_video"] = torch.tensor([len(each["video_position_ids"]) for each in arrays])
        if self.family == "internvl" and "pixel_values_videos" in inputs:  # its frames are images
            inputs["pixel_values"] = inputs.pop("pixel_values_videos")
        if self.family == "qwen2_5_vl" and others:
            speed = self._config["vision_config"]["tokens_per_second"]
            inputs["second_per_grid_ts"] = torch.tensor([item.runs[0].frame_step / speed for item in others])
        if self.family == _OMNI and (films := [item for item in others if item.modality == "video"]):
            speed = self._config["position_id_per_seconds"]
            inputs["video_second_per_grid"] = torch.tensor([item.runs[0].frame_step / speed for item in films])
        return inputs

    def _read_images(self, images: Sequence[Any]) -> dict[str, Any]:
        assert self._processor is not None
        given = [list(images)] if self.family in _NESTED else list(images)
        arguments: dict[str, Any] = {}
        if self.family == "mistral3":  # as PixtralProcessor does: images are cut to whole merged patches
            side = self._config["vision_config"]["patch_size"] * self._config["spatial_merge_size"]
            arguments["patch_size"] = {"height": side, "width": side}
        features = dict(self._processor(given, return_tensors="pt", **arguments))
        for name in ("num_crops", "num_patches", "num_soft_tokens_per_image", "grids", "num_patches_per_image"):
            features.pop(name, None)
        if self.family == "llava_onevision":
            features["batch_num_images"] = torch.ones(len(images), dtype=torch.int64)
        return features

    def _read_arrays(self, stored: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Arrays as transformers takes them: bytes are rescaled and normalised."""
        arrays = {name: torch.from_numpy(np.array(array)) for name, array in stored.items()}
        for name in [name for name in arrays if f"{name}.scale" in arrays]:
            scale, offset, array = arrays.pop(f"{name}.scale"), arrays.pop(f"{name}.offset"), arrays[name]
            shape = (-1, *(1,) * (array.dim() - 2))
            array = array.float() * scale.view(shape) + offset.view(shape)
            if array.dim() == 5:
                frames = self._config["vision_config"]["temporal_patch_size"]
                array = array.expand(-1, -1, max(frames, array.shape[2]), -1, -1).flatten(1)
            elif name == "pixel_values_videos" and array.dim() == 4 and self.family != "internvl":
                array = array[None]
            arrays[name] = array
        return arrays
