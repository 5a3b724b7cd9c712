"""Tiny random checkpoints of models with encoders: weights and configuration saved by transformers,
a tokenizer with the architecture's special tokens, a chat template, and the processor's files.

Used by the tests of models and of the whole path of media. Equal arguments give equal bytes.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from frame.testing.checkpoints import LOADING, save_tokenizer, set_weights
from frame.testing.modality.folders import MINICPM_NAMES, OMNI_NAMES
from tests.models.fallback_families import FALLBACK_FAMILIES
from tests.models.media_family import (
    _CLIP,
    _DELTA,
    _GEMMA_TURN,
    _GLM_MOE,
    _IM,
    _LLAMA4,
    _MOE,
    _ONEVISION_FILM,
    _ONEVISION_PICTURES,
    _QWEN3_TOWER,
    _QWEN_PLACEHOLDERS,
    _QWEN_SPECIAL,
    _QWEN_TOKENS,
    _QWEN_TOWER,
    _SIGLIP,
    _TEXT,
    _TOWER,
    _WHISPER_TOWER,
    CLIP_MEAN,
    CLIP_STD,
    Family,
    _gemma4,
    _glm,
    _pictures,
    _qwen,
    _rope,
)

FAMILIES: dict[str, Family] = {  # by architecture, and a form of it after a hyphen
    "Qwen2VLForConditionalGeneration": _qwen(
        "qwen2_vl", "Qwen2VLProcessor", _rope(2, 3, 3), {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    ),
    "Qwen2_5_VLForConditionalGeneration": _qwen(
        "qwen2_5_vl",
        "Qwen2_5_VLProcessor",
        _rope(2, 3, 3),
        {**_QWEN_TOWER, "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    ),
    "Qwen3VLForConditionalGeneration": _qwen(
        "qwen3_vl",
        "Qwen3VLProcessor",
        {"head_dim": 16, **_rope(4, 2, 2, interleaved=True)},
        {**_QWEN3_TOWER, "deepstack_visual_indexes": [0, 1]},
    ),
    "Qwen3VLMoeForConditionalGeneration": _qwen(
        "qwen3_vl_moe",
        "Qwen3VLProcessor",
        {"head_dim": 16, **_MOE, **_rope(4, 2, 2, interleaved=True)},
        {**_QWEN3_TOWER, "deepstack_visual_indexes": [0, 1]},
    ),
    "Qwen3_5ForConditionalGeneration": _qwen(
        "qwen3_5",
        "Qwen3VLProcessor",
        {**_DELTA, **_rope(2, 1, 1, interleaved=True, partial_rotary_factor=0.25)},
        _QWEN3_TOWER,
    ),
    "Qwen3_5MoeForConditionalGeneration": _qwen(
        "qwen3_5_moe",
        "Qwen3VLProcessor",
        {**_DELTA, **_MOE, "shared_expert_intermediate_size": 48, **_rope(2, 1, 1, interleaved=True, partial_rotary_factor=0.25)},
        _QWEN3_TOWER,
    ),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3",
        {
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"vision_config": _SIGLIP},
        {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
        ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        _GEMMA_TURN,
        {"image": "<start_of_image>"},
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        {"preprocessor_config.json": _pictures("Gemma3ImageProcessor", {"height": 56, "width": 56}, image_seq_length=4)},
        {"mm_tokens_per_image": 4},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "Gemma4ForConditionalGeneration": _gemma4(
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384, "num_kv_shared_layers": 1}
    ),
    "Gemma4ForConditionalGeneration-spans": _gemma4(
        {
            "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision",
            "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        }
    ),
    "LlavaOnevisionForConditionalGeneration": Family(
        "llava_onevision",
        {"model_type": "qwen2"},
        {"vision_config": _SIGLIP},
        {"image_token_index": "<image>", "video_token_index": "<video>"},
        ("<|endoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>", "<image>", "<video>"),
        _IM,
        {"image": "<image>", "video": "<video>"},
        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        {"preprocessor_config.json": _ONEVISION_PICTURES, "video_preprocessor_config.json": _ONEVISION_FILM},
        {"image_grid_pinpoints": _ONEVISION_PICTURES["image_grid_pinpoints"], "vision_aspect_ratio": "anyres_max_9"},
    ),
    "LlavaForConditionalGeneration": Family(
        "llava",
        {"model_type": "llama"},
        {"vision_config": _CLIP},
        {"image_token_index": "<image>"},
        ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<image>"),
        _IM,
        {"image": "<image>"},
        {
            "processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        {
            "preprocessor_config.json": _pictures(
                "CLIPImageProcessor", {"shortest_edge": 56}, CLIP_MEAN, CLIP_STD, do_center_crop=True, crop_size={"height": 56, "width": 56}
            )
        },
        {"image_seq_length": 16},
    ),
    "LlavaNextForConditionalGeneration": Family(
        "llava_next",
        {"model_type": "mistral", "sliding_window": None},
        {"vision_config": _CLIP},
        {"image_token_index": "<image>"},
        ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<image>"),
        _IM,
        {"image": "<image>"},
        {
            "processor_class": "LlavaNextProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        {
            "preprocessor_config.json": _pictures(
                "LlavaNextImageProcessor", {"shortest_edge": 56}, CLIP_MEAN, CLIP_STD, do_center_crop=True,
                crop_size={"height": 56, "width": 56}, image_grid_pinpoints=_ONEVISION_PICTURES["image_grid_pinpoints"],
            )
        },
        {"image_seq_length": 16, "image_grid_pinpoints": _ONEVISION_PICTURES["image_grid_pinpoints"]},
    ),
    "InternVLForConditionalGeneration": Family(
        "internvl",
        {"model_type": "qwen3", "head_dim": 16},
        {"vision_config": {**_TOWER, "image_size": [56, 56], "patch_size": [14, 14]}},
        {"image_token_id": "<IMG_CONTEXT>"},
        ("<|endoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>", "<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        _IM,
        {"image": "<IMG_CONTEXT>\n", "video": "<video>\n"},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {
            "preprocessor_config.json": _pictures(
                "GotOcr2ImageProcessorFast", {"height": 56, "width": 56}, crop_to_patches=True, min_patches=1, max_patches=4
            ),
            "video_preprocessor_config.json": {
                **_pictures("", {"height": 56, "width": 56}), "video_processor_type": "InternVLVideoProcessor"
            },
        },
        {"image_seq_length": 4},
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
    ),
    "Mistral3ForConditionalGeneration": Family(
        "mistral3",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {"vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 112, "patch_size": 14, "head_dim": 16}},
        {"image_token_index": "[IMG]"},
        ("<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        ("[INST]", ":", "[/INST]"),
        {"image": "[IMG]"},
        {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
        {
            "preprocessor_config.json": _pictures(
                "PixtralImageProcessor", {"longest_edge": 112}, CLIP_MEAN, CLIP_STD, patch_size={"height": 14, "width": 14}
            )
        },
        {"spatial_merge_size": 2, "vision_feature_layer": -1},
    ),
    "Glm4vForConditionalGeneration": _glm("glm4v", "Glm4vProcessor", _rope(2, 1, 1, partial_rotary_factor=0.5)),
    "Glm46VForConditionalGeneration": _glm(
        "glm46v", "Glm46VProcessor", {"model_type": "glm4v_text", **_rope(2, 1, 1, partial_rotary_factor=0.5)}
    ),
    "Glm4vMoeForConditionalGeneration": _glm(
        "glm4v_moe",
        "Glm4vProcessor",
        {**_GLM_MOE, **_rope(2, 1, 1, partial_rotary_factor=0.5)},
    ),
    "Qwen2AudioForConditionalGeneration": Family(
        "qwen2_audio",
        {"model_type": "qwen2"},
        {
            "audio_config": {
                **_WHISPER_TOWER, "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
            }
        },
        {"audio_token_index": "<|AUDIO|>"},
        ("<|endoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        _IM,
        {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>\n"},
        {"processor_class": "Qwen2AudioProcessor"},
        {
            "preprocessor_config.json": {
                "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "return_attention_mask": True
            }
        },
    ),
    "VoxtralForConditionalGeneration": Family(
        "voxtral",
        {"model_type": "llama", "head_dim": 16},
        {"audio_config": {**_TOWER, **_WHISPER_TOWER, "intermediate_size": 128}},
        {"audio_token_id": "[AUDIO]"},
        ("<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[AUDIO]", "[BEGIN_AUDIO]"),
        ("[INST]", ":", "[/INST]"),
        {"audio": "[BEGIN_AUDIO][AUDIO]"},
        {"processor_class": "VoxtralProcessor"},
        {"preprocessor_config.json": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16}},
    ),
    "DeepseekOcr2ForConditionalGeneration": Family(
        "deepseek_ocr2",
        {
            **{key: value for key, value in _GLM_MOE.items() if key not in ("first_k_dense_replace", "head_dim")}, "n_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        {
            "vision_config": {
                "sam_config": {
                    **_TOWER, "output_channels": 16, "downsample_channels": [24, 32], "window_size": 7, "global_attn_indexes": [1],
                    "mlp_dim": 48, "image_size": 256,
                },
                "encoder_config": {**_TOWER, "num_key_value_heads": 2, "vocab_size": 8},
            }
        },
        {"image_token_id": "<image>"},
        ("<|begin|>", "<|end|>", "<|pad|>", "<|User|>", "<|Assistant|>", "<image>"),
        ("<|", "|>", "\n"),
        {"image": "<image>\n"},
        {"processor_class": "DeepseekOcr2Processor"},
        {
            "preprocessor_config.json": _pictures(
                "DeepseekOcr2ImageProcessor", {"height": 768, "width": 768}, tile_size=768, crop_to_patches=True, min_patches=2,
                max_patches=6, background_color=[127, 127, 127],
            )
        },
        named={"image_token": "<image>"},
    ),
    "Kimi_K25ForConditionalGeneration": Family(
        "kimi_k25",
        {
            **_GLM_MOE, "model_type": "deepseek_v3", "head_dim": 8, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
            "n_shared_experts": 1, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        },
        {"vision_config": {**_TOWER, "pos_emb_height": 8, "pos_emb_width": 8}},
        {
            "image_token_id": "<|media_pad|>", "video_token_id": "<|kimi_k25_video_placeholder|>",
            "vision_start_token_id": "<|media_begin|>", "vision_end_token_id": "<|media_end|>",
        },
        (
            "[BOS]", "[EOS]", "[PAD]", "<|im_user|>", "<|im_middle|>", "<|im_end|>", "<|media_begin|>", "<|media_content|>",
            "<|media_pad|>", "<|media_end|>", "<|kimi_k25_video_placeholder|>",
        ),
        ("<|im_user|>", "<|im_middle|>", "<|im_end|>"),
        {"image": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"},
        {"processor_class": "Kimi_K25Processor"},
        {
            "preprocessor_config.json": _pictures(
                "Kimi_K25ImageProcessor", {"max_height": 16, "max_width": 16}, patch_size=14, merge_size=2, max_patches=64
            )
        },
        {"projection_hidden_size": 32},
    ),
    "Llama4ForConditionalGeneration": Family(
        "llama4",
        _LLAMA4,
        {
            "vision_config": {
                **_TOWER, "image_size": 56, "patch_size": 14, "vision_output_dim": 48, "projector_input_dim": 48,
                "projector_output_dim": 48, "intermediate_size": 128,
            }
        },
        {"image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>"},
        (
            "<|begin_of_text|>", "<|eot|>", "<|pad|>", "<|header_start|>", "<|header_end|>", "<|image|>", "<|patch|>", "<|image_start|>",
            "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
        ),
        ("<|header_start|>", "<|header_end|>\n\n", "<|eot|>"),
        {"image": "<|image|>"},
        {"processor_class": "Llama4Processor", "patch_size": 14},
        {
            "preprocessor_config.json": _pictures(
                "Llama4ImageProcessorFast", {"height": 56, "width": 56}, max_patches=4, resize_to_max_canvas=False
            )
        },
    ),
}  # fmt: skip


FAMILIES["MiniCPMV4_6ForConditionalGeneration"] = Family(
    "minicpmv4_6",
    {"model_type": "qwen3_5_text", **_DELTA, **_rope(2, 1, 1, interleaved=True, partial_rotary_factor=0.25)},
    {"vision_config": {**_TOWER, "image_size": 56, "patch_size": 14}},
    {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
    ("<|endoftext|>", "<|im_end|>", "<|pad|>", "<|im_start|>", *MINICPM_NAMES.values()),
    _IM,
    {"image": "<|image_pad|>"},
    {"processor_class": "MiniCPMV4_6Processor"},
    {
        "preprocessor_config.json": _pictures(
            "MiniCPMV4_6ImageProcessor", {"height": 56, "width": 56}, patch_size=14, scale_resolution=56, max_slice_nums=4
        )
    },
    {"insert_layer_id": 0},
    MINICPM_NAMES,
)
_VISUAL = _qwen(
    "qwen3_omni_moe_thinker",
    "Qwen3OmniMoeProcessor",
    {"head_dim": 16, **_MOE, **_rope(4, 2, 2, interleaved=True)},
    {**_QWEN3_TOWER, "deepstack_visual_indexes": [0]},
)
FAMILIES["Qwen3OmniMoeThinkerForConditionalGeneration"] = replace(
    _VISUAL,
    towers={
        **_VISUAL.towers,
        "audio_config": {
            "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 64,
            "downsample_hidden_size": 8,
        },
    },
    tokens={**_QWEN_TOKENS, "audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>"},
    special=(*_QWEN_SPECIAL, "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
    placeholders={**_QWEN_PLACEHOLDERS, "audio": "<|audio_start|><|audio_pad|><|audio_end|>"},
    files={
        name: {**contents, "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16}
        for name, contents in _VISUAL.files.items()
    },
    config={"position_id_per_seconds": 13},
    named=OMNI_NAMES,
)  # fmt: skip


def find_family(name: str) -> Family:
    """One of those with a plugin, or of those of the fallback."""
    return FAMILIES.get(name) or FALLBACK_FAMILIES[name]


def make_media_checkpoint(folder: str | Path, name: str, seed: int = 0, **text: Any) -> Path:
    """Write a checkpoint of a family to `folder`, and return the folder. text: fields of
    the language model's configuration."""
    import torch
    import transformers

    folder, family, architecture = Path(folder), find_family(name), name.partition("-")[0]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(folder, 4096, family.special, _write_template(family), family.named)
    ids = tokenizer.convert_tokens_to_ids
    numbers = dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), ids(list(family.special[:3])), strict=True))
    nested = {"text_config": {**_TEXT, **numbers, **family.text, **text}, **family.towers}
    tied = bool(nested["text_config"]["tie_word_embeddings"])
    others = {key: ids(token) for key, token in family.tokens.items()} | {"tie_word_embeddings": tied}
    config_class = transformers.CONFIG_MAPPING[family.model_type]
    config = config_class(**copy.deepcopy(nested), **others, **copy.deepcopy(dict(family.config)))
    config.architectures = [architecture]
    model = getattr(transformers, architecture)._from_config(config, attn_implementation="eager").to(torch.float32)
    set_weights(model, seed)
    model.save_pretrained(folder)
    if family.model_type == "kimi_k25":
        _write_published_names(folder / "model.safetensors")
    files = {**family.files, "processor_config.json": family.processor}
    for name, contents in files.items():
        stored = {**contents, "processor_class": family.processor["processor_class"]}
        (folder / name).write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
    return folder


def _write_published_names(file: Path) -> None:
    """Undo what transformers 5.24 renames beyond the names of Kimi-K2.5's publisher."""
    from safetensors.torch import load_file, save_file

    names = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        "model.mm_projector.": "mm_projector.",
    }
    tensors = load_file(file)
    for wrong, right in names.items():
        tensors = {name.replace(wrong, right): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": "pt"})


def load_media_reference(folder: str | Path) -> Any:
    """The checkpoint as transformers runs it, with its encoders: float32, eager attention."""
    import torch
    import transformers

    architecture = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    with LOADING:
        model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if architecture.startswith("Llama4"):  # transformers 5.24 reads attributes that its language model's output lacks
        model.language_model.register_forward_hook(
            lambda module, args, output: output.__dict__.update(image_outputs=None, router_logits=None)
        )
    return model


def _write_template(family: Family) -> str:
    """A chat template in the form of the architecture's own: contents are texts or lists of
    parts."""
    before, after, end = (json.dumps(text) for text in family.turn)
    branches = "".join(
        f"{{% elif part['type'].startswith({json.dumps(kind)}) %}}{{{{ {json.dumps(text)} }}}}"
        for kind, text in family.placeholders.items()
    )
    parts = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}{branches}{{% endif %}}{{% endfor %}}{{% endif %}}"
    )
    return (
        f"{{{{ {json.dumps(family.special[0])} }}}}{{% for message in messages %}}{{{{ {before} + message['role'] + {after} }}}}{parts}"
        f"{{{{ {end} }}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {before} + 'assistant' + {after} }}}}{{% endif %}}"
    )
