"""Folders with the configuration, the tokenizer and the processor files of tiny checkpoints, one
for each architecture that reads media. They have no weights.

Used by the suite `modality/1` and the tests of modalities.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from frame.checkpoint.model_config import read_model_config
from frame.core.interfaces.model import ModelConfig

_TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "head_dim": 8,
}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}}
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


class Family(NamedTuple):
    """An architecture's configuration, processor files and special tokens."""

    architecture: str
    config: dict[str, Any]  # of config.json, beside the text configuration
    images: dict[str, Any]  # of preprocessor_config.json
    processor: dict[str, Any]  # of processor_config.json
    tokens: tuple[str, ...]
    named: Mapping[str, str] = MappingProxyType({})  # token of tokenizer_config.json by name
    videos: dict[str, Any] | None = None  # of video_preprocessor_config.json
    text: Mapping[str, Any] = MappingProxyType({})  # of the text configuration


_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN_TOKEN_IDS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}


def _qwen(architecture: str, model_type: str, processor: str, patch: int, **vision: Any) -> Family:
    images = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 16 * patch * patch, "longest_edge": 400 * patch * patch}, **(_CLIP if patch == 14 else _HALF),
    }  # fmt: skip
    kind = "Qwen3VLVideoProcessor" if "qwen3" in model_type else "Qwen2VLVideoProcessor"
    sizes = {"shortest_edge": 16 * patch * patch, "longest_edge": (6400 if "qwen3" in model_type else 100) * patch * patch}
    return Family(
        architecture,
        {"model_type": model_type, **_QWEN_TOKEN_IDS, "vision_config": {"patch_size": patch, "spatial_merge_size": 2, **vision}},
        images,
        {"processor_class": processor},
        _QWEN_TOKENS,
        videos={**images, "video_processor_type": kind, "size": sizes, "fps": 2, "min_frames": 4, "max_frames": 768},
        text=_MROPE,
    )


FAMILIES: dict[str, Family] = {
    "qwen2_vl": _qwen("Qwen2VLForConditionalGeneration", "qwen2_vl", "Qwen2VLProcessor", 14),
    "qwen2_5_vl": _qwen("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "Qwen2_5_VLProcessor", 14, tokens_per_second=2),
    "qwen3_vl": _qwen("Qwen3VLForConditionalGeneration", "qwen3_vl", "Qwen3VLProcessor", 16),
    "qwen3_5": _qwen("Qwen3_5ForConditionalGeneration", "qwen3_5", "Qwen3VLProcessor", 16),
    "glm4v": Family(
        "Glm4vForConditionalGeneration",
        {"model_type": "glm4v", "image_token_id": "<|image|>", "video_token_id": "<|video|>", "vision_config": {"patch_size": 14}},
        {"image_processor_type": "Glm4vImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
         "size": {"shortest_edge": 12544, "longest_edge": 400000}, **_CLIP},
        {"processor_class": "Glm4vProcessor"},
        ("<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>", "<|begin_of_image|>", "<|end_of_image|>"),
        text=_MROPE,
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        {"model_type": "gemma3", "image_token_index": "<image_soft_token>", "vision_config": {"patch_size": 14}},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 112, "width": 112}, **_HALF},
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "gemma4": Family(
        "Gemma4ForConditionalGeneration",
        {"model_type": "gemma4", "image_token_id": "<|image|>", "vision_config": {"patch_size": 4}, "audio_token_id": "<|audio|>",
         "audio_config": {"hidden_size": 32}},
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3,
         "feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 128},
        {"processor_class": "Gemma4Processor", "audio_seq_length": 300, "audio_ms_per_token": 40},
        ("<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"),
        named={"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
               "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    ),
    "llava_onevision": Family(
        "LlavaOnevisionForConditionalGeneration",
        {"model_type": "llava_onevision", "image_token_index": "<image>", "vision_config": {"patch_size": 14}},
        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 56, "width": 56},
         "image_grid_pinpoints": [[56, 56], [56, 112], [112, 56], [112, 112], [112, 168], [168, 112]], **_HALF},
        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        ("<image>", "<video>"),
    ),
    "llava": Family(
        "LlavaForConditionalGeneration",
        {"model_type": "llava", "image_token_index": "<image>", "vision_config": {"patch_size": 14}},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, **_CLIP},
        {"processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1},
        ("<image>",),
    ),
    "llava_next": Family(
        "LlavaNextForConditionalGeneration",
        {"model_type": "llava_next", "image_token_index": "<image>", "vision_config": {"patch_size": 14}},
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56},
         "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]], **_CLIP},
        {"processor_class": "LlavaNextProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1},
        ("<image>",),
    ),
    "pixtral": Family(
        "LlavaForConditionalGeneration",
        {"model_type": "llava", "image_token_index": "[IMG]", "vision_config": {"patch_size": 16}},
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 256}, "patch_size": {"height": 16, "width": 16},
         **_CLIP},
        {"processor_class": "PixtralProcessor", "patch_size": 16},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral3", "image_token_index": "[IMG]", "vision_config": {"patch_size": 14}},
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 280}, "patch_size": {"height": 14, "width": 14},
         **_CLIP},
        {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        {"model_type": "internvl", "image_token_id": "<IMG_CONTEXT>", "vision_config": {"patch_size": [14, 14]}},
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56}, "crop_to_patches": True,
         "min_patches": 1, "max_patches": 6, **_HALF},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        named={"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"},
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        {"model_type": "idefics3", "image_token_id": "<image>", "vision_config": {"patch_size": 14}},
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, **_HALF},
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
         *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7))),
    ),
    "qwen2_audio": Family(
        "Qwen2AudioForConditionalGeneration",
        {"model_type": "qwen2_audio", "audio_token_index": "<|AUDIO|>", "audio_config": {"num_mel_bins": 128}},
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "sampling_rate": 16000, "hop_length": 160,
         "chunk_length": 30, "n_fft": 400, "return_attention_mask": True},
        {"processor_class": "Qwen2AudioProcessor"},
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    ),
    "voxtral": Family(
        "VoxtralForConditionalGeneration",
        {"model_type": "voxtral", "audio_token_id": "[AUDIO]", "audio_config": {"num_mel_bins": 128, "max_source_positions": 1500,
         "hidden_size": 32, "intermediate_size": 128}},
        {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "sampling_rate": 16000, "hop_length": 160,
         "chunk_length": 30, "n_fft": 400},
        {"processor_class": "VoxtralProcessor"},
        ("[AUDIO]", "[BEGIN_AUDIO]"),
    ),
}  # fmt: skip


MINICPM_NAMES = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>", "image_end_token": "</image>",
    "slice_start_token": "<slice>", "slice_end_token": "</slice>", "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}  # fmt: skip
FAMILIES["minicpmv4_6"] = Family(
    "MiniCPMV4_6ForConditionalGeneration",
    {"model_type": "minicpmv4_6", "image_token_id": "<|image_pad|>", "vision_config": {"patch_size": 14}},
    {"image_processor_type": "MiniCPMV4_6ImageProcessor", "patch_size": 14, "scale_resolution": 112, "max_slice_nums": 6, **_HALF},
    {"processor_class": "MiniCPMV4_6Processor"},
    tuple(MINICPM_NAMES.values()),
    named=MINICPM_NAMES,
)
_VISUAL = _qwen("Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker", "Qwen3OmniMoeProcessor", 16)
OMNI_NAMES = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "audio_token": "<|audio_pad|>", "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>",
}  # fmt: skip
FAMILIES["qwen3_omni"] = _VISUAL._replace(
    config={**_VISUAL.config, "audio_token_id": "<|audio_pad|>", "position_id_per_seconds": 13,
            "vision_config": {**_VISUAL.config["vision_config"], "tokens_per_second": 2},  # which nothing reads
            "audio_config": {"num_mel_bins": 128, "n_window": 50}},
    images={**FAMILIES["qwen2_audio"].images, **_VISUAL.images},
    tokens=tuple(OMNI_NAMES.values()),
    named=OMNI_NAMES,
    videos=None,
)  # fmt: skip


def write_folder(folder: Path, family: str) -> ModelConfig:
    """Write the files of a family's checkpoint. -> its configuration."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    one = FAMILIES[family]
    words = ["<unk>", "<s>", "</s>", *one.tokens, *"abcdefghijklmnopqrstuvwxyz0123456789.,:<>\n"]
    ids = {token: number for number, token in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(list(one.tokens))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    config = {key: ids[value] if key.endswith(("_id", "_index")) else value for key, value in one.config.items()}
    text = {**_TEXT, **one.text, "model_type": "llama"}
    files = {
        "config.json": {"architectures": [one.architecture], "torch_dtype": "float32", **config, "text_config": text},
        "tokenizer_config.json": {**settings, **({"extra_special_tokens": dict(one.named)} if one.named else {})},
        "preprocessor_config.json": {**one.images, "processor_class": one.processor["processor_class"]},
        "processor_config.json": one.processor,
        **({"video_preprocessor_config.json": one.videos} if one.videos is not None else {}),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return read_model_config(folder)
