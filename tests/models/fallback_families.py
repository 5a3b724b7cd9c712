"""Architectures with encoders that frame serves through the fallback. Used by
`media_checkpoints`."""

from __future__ import annotations

from tests.models.media_family import _CLIP, _IM, _SIGLIP, _TOWER, CLIP_MEAN, CLIP_STD, Family, _pictures

_TILES = tuple(f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6))
_GOT = _pictures("GotOcr2ImageProcessor", {"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=3)
_PLAIN = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")

FALLBACK_FAMILIES: dict[str, Family] = {
    "Idefics3ForConditionalGeneration": Family(  # whose encoder takes an axis of items before that of tiles
        "idefics3",
        {"model_type": "llama"},
        {"vision_config": {**_TOWER, "image_size": 56, "patch_size": 14}},
        {"image_token_id": "<image>"},
        (*_PLAIN, "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES),
        _IM,
        {"image": "<image>"},
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        {
            "preprocessor_config.json": _pictures(
                "Idefics3ImageProcessor", {"longest_edge": 112}, max_image_size={"longest_edge": 56}, do_image_splitting=True, do_pad=True
            )
        },
        {"scale_factor": 2},
    ),
    "AyaVisionForConditionalGeneration": Family(  # whose decoder has windows, and whose placeholder is no row's token
        "aya_vision",
        {"model_type": "cohere2", "sliding_window": 24, "num_hidden_layers": 4, "tie_word_embeddings": True, "logit_scale": 0.25},
        {"vision_config": _SIGLIP},
        {"image_token_index": "<|IMG_PATCH|>"},
        (*_PLAIN, "<image>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"),
        _IM,
        {"image": "<image>"},
        {"processor_class": "AyaVisionProcessor", "patch_size": 14, "img_size": 56, "downsample_factor": 2},
        {"preprocessor_config.json": _GOT},
        {"downsample_factor": 2},
    ),
    "LightOnOcrForConditionalGeneration": Family(  # whose images have patches of their own number
        "lighton_ocr",
        {"model_type": "qwen3", "head_dim": 16},
        {"vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 16}},
        {"image_token_id": "<|image_pad|>"},
        (*_PLAIN, "<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
        _IM,
        {"image": "<|image_pad|>"},
        {"processor_class": "LightOnOcrProcessor", "patch_size": 14, "spatial_merge_size": 2},
        {"preprocessor_config.json": _pictures("PixtralImageProcessor", {"longest_edge": 112}, CLIP_MEAN, CLIP_STD, patch_size=14)},
        {"spatial_merge_size": 2},
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
    ),
    "GotOcr2ForConditionalGeneration": Family(  # whose tower computes attention eagerly alone
        "got_ocr2",
        {"model_type": "qwen2"},
        {
            "vision_config": {
                **_TOWER, "output_channels": 16, "image_size": 64, "patch_size": 16, "mlp_dim": 48, "window_size": 2,
                "global_attn_indexes": [1],
            }
        },
        {"image_token_index": "<imgpad>"},
        (*_PLAIN, "<imgpad>", "<img>", "</img>"),
        _IM,
        {"image": "<imgpad>"},
        {"processor_class": "GotOcr2Processor"},
        {"preprocessor_config.json": _pictures("GotOcr2ImageProcessor", {"height": 64, "width": 64}, CLIP_MEAN, CLIP_STD)},
        {"image_seq_length": 1},
    ),
    "VipLlavaForConditionalGeneration": Family(  # whose projector reads several layers
        "vipllava",
        {"model_type": "llama"},
        {"vision_config": _CLIP},
        {"image_token_index": "<image>"},
        (*_PLAIN, "<image>"),
        _IM,
        {"image": "<image>"},
        {
            "processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        {
            "preprocessor_config.json": _pictures(
                "CLIPImageProcessor", {"height": 56, "width": 56}, CLIP_MEAN, CLIP_STD, do_center_crop=False
            )
        },
        {"vision_feature_layers": [-2, -1, 0]},
    ),
}  # fmt: skip
