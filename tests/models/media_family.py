"""What the tiny checkpoints of models with encoders are made of: `Family`, and the parts that
several architectures share. Used by `media_checkpoints`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5, 0.5, 0.5]

_TEXT = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_QWEN3_TOWER = {**_QWEN_TOWER, "patch_size": 16, "num_position_embeddings": 64}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14, "vision_use_head": False}
_CLIP = {**_TOWER, "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "projection_dim": 32}
_WHISPER_TOWER = {"num_mel_bins": 16, "max_source_positions": 1500}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GLM_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "head_dim": 16}
_DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}  # fmt: skip
_LLAMA4 = {
    "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": 12, "no_rope_layers": [1, 0, 1],
    "moe_layers": [1], "floor_scale": 8,
}  # fmt: skip


def _rope(*section: int, interleaved: bool = False, **others: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section), **others}
    return {"rope_parameters": {**parameters, "mrope_interleaved": True} if interleaved else parameters}


def _pictures(kind: str, size: dict[str, int], mean: list[float] = HALF, std: list[float] = HALF, **others: Any) -> dict[str, Any]:
    """The contents of preprocessor_config.json."""
    steps = {"do_convert_rgb": True, "do_resize": True, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
    return {**steps, "image_processor_type": kind, "size": size, "image_mean": mean, "image_std": std, **others}


def _qwen_pictures(kind: str, patch: int, mean: list[float] = HALF, std: list[float] = HALF) -> dict[str, Any]:
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2}
    return _pictures(kind, size, mean, std, patch_size=patch, temporal_patch_size=2, merge_size=2)


@dataclass(frozen=True)
class Family:
    """What differs between the architectures."""

    model_type: str
    text: Mapping[str, Any]
    towers: Mapping[str, Mapping[str, Any]]  # by key of the configuration
    tokens: Mapping[str, str]  # key of the configuration -> the special token whose id it gets
    special: tuple[str, ...]  # beginning, end, padding, and the others
    turn: tuple[str, str, str]  # before the role, after it, and at a message's end
    placeholders: Mapping[str, str]  # type of a part -> what the chat template writes for it
    processor: Mapping[str, Any]  # processor_config.json
    files: Mapping[str, Mapping[str, Any]]  # other files
    config: Mapping[str, Any] = field(default_factory=dict)  # other keys of the configuration
    named: Mapping[str, str] = field(default_factory=dict)  # attributes of the tokenizer, such as `image_token`


_IM = ("<|im_start|>", "\n", "<|im_end|>\n")
_QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
)  # fmt: skip
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_QWEN_PLACEHOLDERS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}


def _qwen(model_type: str, processor: str, text: Mapping[str, Any], tower: Mapping[str, Any]) -> Family:
    is_third = model_type.startswith("qwen3")
    mean, std = (HALF, HALF) if is_third else (CLIP_MEAN, CLIP_STD)
    pictures = _qwen_pictures("Qwen2VLImageProcessorFast" if is_third else "Qwen2VLImageProcessor", tower.get("patch_size", 14), mean, std)
    film = {**pictures, "video_processor_type": "Qwen3VLVideoProcessor" if is_third else "Qwen2VLVideoProcessor"}
    del film["image_processor_type"]
    return Family(
        model_type,
        text,
        {"vision_config": tower},
        _QWEN_TOKENS,
        _QWEN_SPECIAL,
        _IM,
        _QWEN_PLACEHOLDERS,
        {"processor_class": processor},
        {"preprocessor_config.json": pictures, "video_preprocessor_config.json": film},
    )


_ONEVISION_PICTURES = _pictures(
    "LlavaOnevisionImageProcessor", {"height": 56, "width": 56}, image_grid_pinpoints=[[56, 56], [56, 112], [112, 56], [112, 112]],
    do_pad=True,
)  # fmt: skip
_ONEVISION_FILM = {
    **_pictures("", {"height": 56, "width": 56}), "video_processor_type": "LlavaOnevisionVideoProcessor",
}  # fmt: skip
del _ONEVISION_FILM["image_processor_type"]
_GEMMA_TURN = ("<start_of_turn>", "\n", "<end_of_turn>\n")
_GLM_SPECIAL = (
    "[gMASK]", "<|endoftext|>", "<|pad|>", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|end_of_image|>",
    "<|image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>",
)  # fmt: skip
_GLM_TOKENS = {
    "image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>",
}  # fmt: skip


def _glm(model_type: str, processor: str, text: Mapping[str, Any], **tower: Any) -> Family:
    name = processor.removesuffix("Processor")
    pictures = _qwen_pictures(f"{name}ImageProcessor", 14, CLIP_MEAN, CLIP_STD)
    film = {**pictures, "video_processor_type": f"{name}VideoProcessor", "fps": 2}
    del film["image_processor_type"]
    return Family(
        model_type,
        text,
        {"vision_config": {**_QWEN_TOWER, "image_size": 112, "patch_size": 14, **tower}},
        _GLM_TOKENS,
        _GLM_SPECIAL,
        ("<|", "|>\n", ""),
        {"image": "<|begin_of_image|><|image|><|end_of_image|>", "video": "<|begin_of_video|><|video|><|end_of_video|>"},
        {"processor_class": processor},
        {"preprocessor_config.json": pictures, "video_preprocessor_config.json": film},
    )


def _gemma4(text: Mapping[str, Any], **audio: Any) -> Family:
    return Family(
        "gemma4",
        {
            "head_dim": 16, "global_head_dim": 24, "sliding_window": 8, "tie_word_embeddings": True, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], **text,
        },
        {
            "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 256},
            "audio_config": {
                "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [16, 4],
                "attention_chunk_size": 4, "attention_context_left": 5, "output_proj_dims": 24, **audio,
            },
        },
        {
            "image_token_id": "<|image|>", "video_token_id": "<|video|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>", "eoa_token_index": "<audio|>",
        },
        (
            "<bos>", "<eos>", "<pad>", "<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio>", "<audio|>",
            "<|audio|>",
        ),
        ("<|turn>", "\n", "<turn|>\n"),
        {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"},
        {"processor_class": "Gemma4Processor"},
        {
            "preprocessor_config.json": {
                "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3,
                "feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 16, "audio_seq_length": 750,
            }
        },
        named={
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
            "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
    )  # fmt: skip
