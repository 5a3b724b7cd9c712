"""Writes and reads frame-tiny in Hugging Face's DeepSeek-V3 layout.

The prediction layer is stored under `model.layers.{L}` as in DeepSeek's own checkpoints, without
copies of the shared embedding and head. It does not depend on the training loop.
"""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.train_frame_tiny.model import FrameTiny, Shape

EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = re.compile(r"(.*\.mlp)\.(gate_proj|up_proj|down_proj)$")


def _outer_name(name: str, layers: int) -> str:
    """The Hugging Face name of a training parameter (stacked experts aside)."""
    if name.startswith("lm_head"):
        return name
    if name.startswith("prediction.layer."):
        return f"model.layers.{layers}.{name.removeprefix('prediction.layer.')}"
    if name.startswith("prediction.norm."):
        return f"model.layers.{layers}.shared_head.{name.removeprefix('prediction.')}"
    if name.startswith("prediction."):
        return f"model.layers.{layers}.{name.removeprefix('prediction.')}"
    return f"model.{name}"


def outer_tensors(model: FrameTiny, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights under their Hugging Face names; the routing bias stays float32."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        outer = _outer_name(name, model.shape.layers)
        kept = value.detach().to("cpu", torch.float32 if name.endswith("e_score_correction_bias") else dtype)
        stacked = _EXPERTS.fullmatch(outer)
        if stacked is None:
            tensors[outer] = kept.contiguous()
            continue
        for index, matrix in enumerate(kept):
            tensors[f"{stacked[1]}.experts.{index}.{stacked[2]}.weight"] = matrix.contiguous()
    return tensors


def load_model(directory: Path, shape: Shape | None = None) -> FrameTiny:
    """The training model, in float32, with the weights kept in `directory`."""
    model = FrameTiny(shape or Shape())
    tensors = load_file(directory / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        outer = _outer_name(name, model.shape.layers)
        stacked = _EXPERTS.fullmatch(outer)
        if stacked is None:
            state[name] = tensors[outer].float()
        else:
            count = value.shape[0]
            state[name] = torch.stack([tensors[f"{stacked[1]}.experts.{index}.{stacked[2]}.weight"] for index in range(count)]).float()
    model.load_state_dict(state)
    return model


def configuration(shape: Shape) -> dict[str, object]:
    """`config.json` of this shape."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "first_k_dense_replace": shape.dense_layers,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.dense_width,
        "kv_lora_rank": shape.kv_rank,
        "max_position_embeddings": shape.positions,
        "moe_intermediate_size": shape.expert_width,
        "moe_layer_freq": 1,
        "n_group": shape.groups,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": shape.q_rank,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "rms_norm_eps": shape.epsilon,
        "rope_interleave": True,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "routed_scaling_factor": shape.routed_scale,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": shape.groups_per_token,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": shape.value,
        "vocab_size": shape.vocabulary,
    }


def save_model(model: FrameTiny, directory: Path) -> int:
    """Write config, generation config and bf16 weights; returns the size of the weights file in
    bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    generation = {"bos_token_id": 0, "eos_token_id": [1], "pad_token_id": 2, "do_sample": False}
    for name, content in (("config.json", configuration(model.shape)), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    path = directory / "model.safetensors"
    save_file(outer_tensors(model, torch.bfloat16), path, metadata={"format": "pt"})
    return path.stat().st_size
