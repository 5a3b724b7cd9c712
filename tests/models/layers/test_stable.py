"""`frame.models.layers` keeps the names and arguments that model plugins of other packages use."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frame.config.server_sections import PluginsSection
from frame.interfaces.kinds import KINDS
from frame.models import layers
from frame.plugins.loader import load_configured
from frame.testing.compare.plugins import compare

ROOT = Path(__file__).parents[3]
# Arguments by block, and by method of a block, of the interface version below. A change of a name
# or an order, or an argument without a default, breaks plugins: raise the version of the kind
# `model`, write the new name to `frame.plugins.renames`, and record the arguments here. New
# arguments with defaults need nothing.
VERSION = 4
ARGUMENTS = {
    "Attention": "context model_config layer prefix rotary options",
    "Attention.attend": "self q k v batch",
    "Attention.defer_sum": "self",
    "Attention.forward": "self x rows batch",
    "AttentionOptions": "qkv_bias out_bias qk_norm qk_norm_kind norm_offset sliding_window scale soft_cap",
    "ColumnLinear": "context names input_size output_sizes bias",
    "Decoder": "context options",
    "Decoder.build_attention": "self layer prefix",
    "Decoder.build_draft_layer": "self index prefix",
    "Decoder.build_layer": "self index prefix",
    "Decoder.build_mlp": "self layer prefix",
    "Decoder.build_norm": "self name",
    "Decoder.build_rotary": "self",
    "Decoder.embed": "self token_ids",
    "Decoder.embed_inputs": "self batch",
    "Decoder.find_draft_names": "self",
    "Decoder.forward": "self batch",
    "Decoder.get_attention_options": "self layer",
    "Decoder.get_ignored": "self",
    "Decoder.get_rotary": "self layer",
    "Decoder.has_bias": "self key",
    "Decoder.map_weights": "self weights",
    "Decoder.rename_weights": "weights",
    "DecoderLayer": "input_norm attention post_norm mlp",
    "DecoderLayer.forward": "self x residual rows batch selected",
    "ExpertSizes": "num_experts hidden inner names",
    "GatedMLP": "context prefix hidden_size inner_size bias activation",
    "GatedMLP.defer_sum": "self",
    "LayerNorm": "context name size eps bias",
    "LayerNorm.add_residual": "self x residual",
    "MoE": "context prefix sizes rule shared",
    "MoE.defer_sum": "self",
    "MoE.forward": "self x logits",
    "MoE.forward_normed": "self norm x residual",
    "MoE.get_counts": "self",
    "MoE.list_tensors": "self",
    "MoE.set_placement": "self placement",
    "NormedOutputLayer": "attention mlp output_norms input_norms",
    "NormedOutputLayer.forward": "self x residual rows batch selected",
    "ParallelLayer": "input_norm attention mlp",
    "ParallelLayer.forward": "self x residual rows batch selected",
    "PlainMLP": "context prefix hidden_size inner_size bias activation",
    "PlainMLP.defer_sum": "self",
    "RMSNorm": "context name size eps offset",
    "RMSNorm.add_residual": "self x residual",
    "RMSNorm.join_sum": "self x residual",
    "ReplicatedLinear": "context names input_size output_sizes bias",
    "Rotary": "context dim parameters interleaved",
    "Rotary.choose_table": "self batch rows",
    "Rotary.gather_rows": "self positions",
    "Rotary.prepare_rows": "self batch",
    "Rotary.rotate": "self x rows",
    "RoutingRule": "top_k scoring renormalize scale groups top_groups group_score correction precise",
    "RowLinear": "context name input_size output_size bias",
    "RowLinear.defer_sum": "self",
    "find_layer_window": "model_config layer pattern",
    "read_activation": "config key default",
    "read_rope_parameters": "model_config kind theta_key",
}


def find(name: str) -> Callable[..., Any]:
    block, _, method = name.partition(".")
    found: Callable[..., Any] = getattr(layers, block)
    return getattr(found, method) if method else found


def test_the_blocks_keep_their_arguments() -> None:
    assert KINDS["model"].version == VERSION, "record the arguments of the new version"
    assert {name for name in ARGUMENTS if "." not in name} == set(layers.__all__)
    for name, recorded in ARGUMENTS.items():
        parameters = list(inspect.signature(find(name)).parameters.values())
        known, added = parameters[: len(recorded.split())], parameters[len(recorded.split()) :]
        assert [each.name for each in known] == recorded.split(), name
        assert all(each.default is not each.empty for each in added), name


def test_the_reference_lists_every_block() -> None:
    page = (ROOT / "docs/reference/model_blocks.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == sorted(layers.__all__)
    methods = {section.split("\n")[0]: re.findall(r"^- `(\w+)\(", section, re.MULTILINE) for section in page.split("\n## ")}
    listed = {f"{block}.{method}" for block, found in methods.items() for method in found}
    names = [name.split(".") for name in ARGUMENTS if "." in name]
    assert listed == {f"{block}.{method}" for block, method in names if method in vars(find(block))}, "inherited methods are not listed"


def test_the_shortest_model_serves_what_llama_serves(tmp_path: Path) -> None:
    """The file in the documentation."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/write_a_plugin.md").read_text(), re.DOTALL)
    (text,) = (block for block in blocks if "class PlainLlama" in block)
    assert len([line for line in text.splitlines() if line.strip()]) <= 12
    ast.parse(text)
    file = tmp_path / "plain_llama.py"
    file.write_text(text)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    registry = load_configured(PluginsSection(paths=(str(file),)))
    records = [registry.get("model", name) for name in ("plain_llama", "llama")]
    settings = {
        "plugins": {"paths": [str(file)]},
        "model": {"load_format": "dummy", "dtype": "float32"},
        "execution": {"device": "cpu", "threads": 1},
    }
    (verdict,) = compare(records[0], records[1], {"llama": tmp_path}, settings, 6)
    assert (verdict.problem, verdict.skipped) == ("", "")
