"""The presets of examples/: what they become on the machines they were written for. No weights, no
GPU: facts and hardware are data."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from frame.checkpoint.model_config import read_model_config
from frame.config.hardware import Accelerator, Hardware
from frame.config.resolve import resolve
from frame.config.resolved import Resolved
from frame.config.schema import FrameConfig
from frame.core.interfaces.attention import AttentionCapabilities
from frame.core.interfaces.plugin import PluginRecord
from frame.entrypoints.cli.main import cli
from frame.entrypoints.configuration.sources import load_config
from frame.plugins.loader import load_registry

EXAMPLES = Path(__file__).parents[2] / "examples"
GIB = 2**30
B200 = Hardware(64, 512 * GIB, accelerators=(Accelerator("cuda", "B200", (10, 0), 180 * GIB),) * 8)
H200 = Hardware(64, 512 * GIB, accelerators=(Accelerator("cuda", "H200", (9, 0), 140 * GIB),) * 8)

# DeepSeek-V3's shape (arXiv 2412.19437, section 4.2), as its config.json states it.
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "max_position_embeddings": 163840, "eos_token_id": 1, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}  # fmt: skip
BLACKWELL = PluginRecord(
    kind="attention_backend",
    name="trtllm_mla",
    target="elsewhere:Backend",
    api="attention/2",
    capabilities=AttentionCapabilities(
        devices=("cuda",),
        compute_capability=((10, 0), (10, 3)),
        kinds=("mla",),
        latents=((512, 64),),
        page_sizes=(32, 64),
        dtypes=("bfloat16", "float16"),
        graphs="decode",
    ),
    rank=100,
    distribution="elsewhere",
    version="1",
)


def serve(config: FrameConfig, hardware: Hardware, folder: Path) -> Resolved:
    """What `config` resolves to where the checkpoint lies in `folder` and the Blackwell backend is
    installed."""
    (folder / "config.json").write_text(json.dumps(DEEPSEEK))
    model = config.model.model_copy(update={"path": str(folder)})
    records = load_registry(installed=False).all_records()
    gpu = [replace(record, problems=()) for record in records["attention_backend"]]  # as if every library were there
    records = {**records, "attention_backend": [*gpu, BLACKWELL]}
    return resolve(config.model_copy(update={"model": model}), hardware, read_model_config(str(folder)), records)


@pytest.mark.parametrize(("hardware", "backend"), [(H200, "triton"), (B200, "trtllm_mla")], ids=["hopper", "blackwell"])
def test_deepseek_serves_on_eight_gpus(hardware: Hardware, backend: str, tmp_path: Path) -> None:
    """fp8 weights, latent attention, the longest cached prefix first, and graphs of all decodes."""
    resolved = serve(load_config(str(EXAMPLES / "deepseek.yaml"), environ={}).config, hardware, tmp_path)
    assert (resolved.choice("attention_backend").name, resolved.model.kind) == (backend, "mla")
    assert (resolved.page_size, resolved.plan.tp, resolved.dtype) == (64, 8, "bfloat16")
    assert resolved.choice("weight_format").name == "fp8"
    assert resolved.choice("scheduling_policy").name == "lpm"
    assert resolved.cuda_graph_max_bs == resolved.max_running_requests == 256


@pytest.mark.slow
def test_the_header_of_deepseek_says_what_the_plan_prints() -> None:
    path = EXAMPLES / "deepseek.yaml"
    done = CliRunner().invoke(cli, ["plan", "--config", str(path), "--machine", "8xh200", "--json"])
    found, text = json.loads(done.stdout), path.read_text()
    assert f"{found['ranks'][0]['weights'] / GIB:.0f} GiB" in text
    assert f"about {found['max_total_tokens'] // 10_000 * 10_000:,} tokens" in text


@pytest.mark.slow
def test_the_laptop_preset_checks_here() -> None:
    command = [sys.executable, "-m", "frame", "config", "check", "--config", str(EXAMPLES / "laptop.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "frame-tiny" in done.stdout
