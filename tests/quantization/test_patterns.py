"""Names of layers in published configurations and files: lists, and layers stored as one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.quantization.patterns import find_match, matches
from tests.models.ranks import on_ranks
from tests.quantization.checkpoints import DIALECTS, make_pair
from tests.quantization.test_formats import logits_of, open_session, reference_logits


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("model.layers.3", "model.layers.3.mlp.up_proj", True),
        ("model.layers.3", "model.layers.30.mlp.up_proj", False),
        ("model", "model.layers.3.mlp.up_proj", True),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.0.", "model.layers.0.mlp.experts.0.down_proj", True),  # QuantTrio
        ("model.layers.0.", "model.layers.01.mlp.down_proj", False),
        (r"model\.layers\.[02]\.self_attn", "model.layers.2.self_attn.q_proj", True),
        (r"model\.layers\.[02]\.self_attn", "model.layers.1.self_attn.q_proj", False),
        (r"model\.layers\.0\.mlp\.gate", "model.layers.0.mlp.gate_proj", False),
        ("^model.layers.(0|1).", "model.layers.1.mlp.up_proj", True),
        ("model.language_model.layers.0.linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_a", True),
        ("model.language_model.layers.0.linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_b", False),
        ("model.language_model.layers.*.self_attn*", "model.layers.7.self_attn.q_proj", True),
        ("language_model.model.layers.4.mlp", "model.layers.4.mlp.up_proj", True),
        ("language_model.lm_head", "lm_head", True),
        ("backbone.layers.54.mixer.in_proj", "model.layers.54.mixer.in_proj", True),
        ("backbone.layers.5", "model.layers.54.mixer.in_proj", False),
        ("backbone.layers.54.mixer.in_proj", "model.layers.54.mixer.in_proj_dt", True),
        ("backbone.layers.5.mixer.in_proj", "model.layers.54.mixer.in_proj_x", False),
        ("model.layers.0.mamba.in_proj", "model.layers.0.mamba.in_proj_z", True),
        ("in_proj", "model.layers.0.mamba.in_proj_c", True),
        ("in_proj", "model.layers.0.mamba.out_proj", False),
        ("re:.*mamba.in_proj$", "model.layers.0.mamba.in_proj_b", True),
        (r"re:.*mixer\.(in|out)_proj$", "model.layers.0.mixer.in_proj_z", True),
        ("in_proj", "model.layers.0.linear_attn.in_proj_z", False),
        ("re:.*_proj$", "model.layers.0.linear_attn.in_proj_b", False),
        ("in_proj_qkv", "model.layers.0.linear_attn.in_proj_k", True),
        ("re:.*linear_attn.in_proj_qkv$", "model.layers.0.linear_attn.in_proj_v", True),
        ("in_proj_qkv", "model.layers.0.linear_attn.in_proj_z", False),
        ("model.layers.3.self_attn.qkv_proj", "model.layers.3.self_attn.v_proj", True),
        ("model.layers.3.self_attn.qkv_proj", "model.layers.3.self_attn.o_proj", False),
        ("re:.*gate_up_proj", "model.layers.3.mlp.up_proj", True),
        ("re:.*up_proj", "model.layers.3.mlp.gate_proj", False),
        ("*up_proj", "model.layers.3.mlp.gate_proj", False),
        ("re:.*(qkv|o)_proj", "model.layers.3.self_attn.k_proj", True),
        (r"re:model\.language_model\.layers\.5\..*", "model.layers.5.mlp.up_proj", True),
        (r"re:backbone\.layers\.5\.", "model.layers.5.mixer.in_proj", True),
        ("re:vision_tower.*", "model.layers.5.mlp.up_proj", False),
        ("model.visual.*", "model.layers.5.mlp.up_proj", False),
        ("lm_head", "model.layers.0.mlp.up_proj", False),
        ("mtp.fc", "mtp.fc", True),
        ("thinker.model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("thinker.model.layers.0", "model.layers.10.mlp.up_proj", False),
        ("thinker.lm_head", "lm_head", True),
        ("re:thinker.lm_head", "lm_head", True),
        (r"re:thinker\.model\.layers\.5\..*", "model.layers.5.mlp.up_proj", True),
        ("thinker.visual", "model.layers.5.mlp.up_proj", False),
    ],
)
def test_names_of_published_lists(pattern: str, name: str, is_match: bool) -> None:
    assert matches(pattern, name) is is_match
    if pattern.startswith("re:"):
        assert find_match(pattern.removeprefix("re:"), name) is is_match


@pytest.mark.parametrize("dialect", ["gptq 3", "gptq 4 ordered", "awq", "packed", "torchao fp8", "fp8 blocks"])
def test_fused_layers(dialect: str, tmp_path: Path) -> None:
    """Phi-3 stores queries, keys and values as one, with the outputs in either dimension."""
    stored, plain = make_pair("Phi3ForCausalLM", dialect, tmp_path)
    want, method = reference_logits(plain), DIALECTS[dialect][0]["quant_method"]
    torch.testing.assert_close(logits_of(open_session(stored, quantization=method, gemm_kernel="torch")), want, rtol=1e-3, atol=1e-3)
    both = on_ranks(2, lambda group: logits_of(open_session(stored, tp=group, quantization=method, gemm_kernel="torch")))
    torch.testing.assert_close(both[0], want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("architecture", "kept", "dialect"),
    [
        *(("Phi3ForCausalLM", "model.layers.1.self_attn.qkv_proj", dialect) for dialect in ("packed", "fp8 blocks", "gptq 4")),
        ("FalconH1ForCausalLM", "model.layers.1.mamba.in_proj", "int8"),
        ("Qwen3_5ForCausalLM", "model.layers.0.linear_attn.in_proj_qkv", "int8"),
    ],
)
def test_a_fused_layer_that_is_left_out(architecture: str, kept: str, dialect: str, tmp_path: Path) -> None:
    """The list names the layer as the checkpoint stores it."""
    stored, plain = make_pair(architecture, dialect, tmp_path)
    want = reference_logits(plain)
    tensors = {name: tensor for name, tensor in load_file(stored / "model.safetensors").items() if not name.startswith(f"{kept}.")}
    tensors[f"{kept}.weight"] = load_file(plain / "model.safetensors")[f"{kept}.weight"]
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    quantization = config["quantization_config"]
    if dialect == "gptq 4":
        quantization["dynamic"] = {"-:" + re.escape(kept): {}}
    else:
        key = "modules_to_not_convert" if dialect == "fp8 blocks" else "ignore"
        quantization[key] = [*quantization[key], kept]
    (stored / "config.json").write_text(json.dumps(config))
    got = logits_of(open_session(stored, quantization=DIALECTS[dialect][0]["quant_method"], gemm_kernel="torch"))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
