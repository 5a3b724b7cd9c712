"""`frame plan`: DeepSeek-V3.1 on eight H200s, targets, machines and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from frame.config.schema import CacheSection, FrameConfig, SpeculativeSection
from frame.config.server_sections import PluginsSection
from frame.core.errors import ConfigError
from frame.entrypoints.cli.main import cli
from frame.entrypoints.processes.components import limits_of
from frame.entrypoints.tools.plan.machines import CARDS, parse_machine, recognise
from frame.entrypoints.tools.plan.planner import DeploymentPlan, Target, plan_deployment, try_plans
from frame.loading.capacity import GIB, activation_bytes
from frame.testing.checkpoints import make_checkpoint
from tests.architecture.source import ROOT

DEEPSEEK = {"model": {"path": "/nowhere/DeepSeek-V3.1"}, "parallel": {"tp": 8}, "cache": {"page_size": 64}}

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 128256, "max_position_embeddings": 131072, "dtype": "bfloat16",
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip


def llama(folder: Path, **parallel: int) -> FrameConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    return FrameConfig.model_validate({"model": {"path": str(folder), "skip_tokenizer_init": True}, "parallel": parallel})


@pytest.fixture(scope="module")
def plan() -> DeploymentPlan:
    return plan_deployment(FrameConfig.model_validate(DEEPSEEK), parse_machine("8xh200"))


@pytest.mark.slow
def test_deepseek_on_eight_h200(plan: DeploymentPlan) -> None:
    """The parameters without the MTP layer are 671 billion: 671 GB in fp8, of which embedding, head
    and routers are bfloat16. A latent is 576 values of 2 bytes in each of 61 layers, whole on every
    rank."""
    memory = plan.memory
    assert 671e9 / 8 < memory.weights < 1.02 * 671e9 / 8 + 2 * 2 * 129280 * 7168 / 8
    assert memory.bytes_per_token == 61 * 576 * 2
    assert memory.used == pytest.approx(0.9 * memory.total, rel=1e-3)
    assert memory.tokens == pytest.approx(memory.cache / memory.bytes_per_token, rel=1e-3)
    assert plan.largest_context == 163840
    assert plan.count_requests(memory.tokens // 10) == 10


def test_keys_of_prompts_in_another_form_are_planned(plan: DeploymentPlan, tmp_path: Path) -> None:
    """Latents are expanded; keys of a quantized cache are dequantized."""

    def count(found: DeploymentPlan) -> int:
        return found.memory.activations - activation_bytes(found.resolved.model, limits_of(found.resolved), torch.bfloat16)

    assert count(plan) == 2 * GIB
    config = llama(tmp_path, tp=4)
    for name, expected in ((None, 0), ("int8", GIB)):
        cached = config.model_copy(update={"cache": config.cache.model_copy(update={"kv_dtype": name})})
        assert count(plan_deployment(cached, parse_machine("4xh100"))) == expected


def test_lower_bounds_follow_from_bytes_and_operations(plan: DeploymentPlan) -> None:
    """37 billion parameters are active for a token (arXiv 2412.19437)."""
    single, prefill = plan.bound_decode(1, 1), plan.bound_prefill()
    assert single is not None
    assert prefill is not None
    sums = 2 * 61 * 5e-6
    assert single.seconds - sums == pytest.approx(37e9 / 8 / 4.39e12, rel=0.05)
    assert (single.bound, prefill.bound) == ("reading weights", "matrix products")
    assert prefill.rate < 8 * 2 * 780e12 / (2 * 36e9)
    long = plan.bound_decode(256, 1_000_000)
    assert long is not None
    assert long.bound == "reading the KV cache"


def test_a_target_names_what_is_short(plan: DeploymentPlan) -> None:
    assert plan.find_shortage(Target(requests=8, context=4096, rate=10)) == ""
    assert "holds" in plan.find_shortage(Target(requests=10_000, context=4096))
    assert "model.max_context is 163840" in plan.find_shortage(Target(context=200_000))
    assert "tokens/s each" in plan.find_shortage(Target(rate=10_000))
    assert "cannot be bounded" in replace(plan, card=None).find_shortage(Target(rate=1))


def test_the_fewest_devices_that_hold_the_weights(tmp_path: Path) -> None:
    """70.6 billion parameters take 141 GB: two H100s have no room for 64 requests beside them."""
    tried = list(try_plans(llama(tmp_path), parse_machine("8xh100"), Target(requests=64, context=4096, rate=10)))
    assert [name for name, shortage in tried if not shortage] == ["--tp 4 --pp 1"]
    assert "do not fit" in tried[0][1]
    assert len(tried) == 4


def test_stages_divide_the_layers(tmp_path: Path) -> None:
    plan = plan_deployment(llama(tmp_path, tp=2, pp=2), parse_machine("4xh100"))
    assert sum(stage.bytes_per_token for stage in plan.stages) == 80 * 2 * 4 * 128 * 2
    assert sum(stage.weights for stage in plan.stages) == pytest.approx(2 * 70.55e9 / 2, rel=0.01)


def test_machines_by_name() -> None:
    machine = parse_machine("4xH100")
    assert (machine.count, machine.card) == (4, CARDS["h100"])
    assert recognise(machine.hardware) == machine
    for wrong in ("0xh100", "8xh20000", "x", ""):
        with pytest.raises(ConfigError, match="write COUNTxCARD"):
            parse_machine(wrong)


def test_the_command_prints_the_plan() -> None:
    runner = CliRunner()
    done = runner.invoke(cli, ["plan", "--model", "frame-tiny", "--machine", "h100"])
    assert done.exit_code == 0, done.output
    assert "memory of a rank, GiB" in done.output
    found = json.loads(runner.invoke(cli, ["plan", "--model", "frame-tiny", "--machine", "h100", "--json"]).output)
    assert found["ranks"][0]["used"] < found["ranks"][0]["total"]
    refused = runner.invoke(cli, ["plan", "--requests", "4"])
    assert refused.exit_code == 78
    assert "--machine" in refused.output
    refused = runner.invoke(cli, ["plan", "--context", "4096"])
    assert (refused.exit_code, "--context is part of a target; add --requests" in refused.output) == (78, True)


def test_tiers_are_planned_in_blocks() -> None:
    options = ["--cache-tiers", "host", "--set", "plugins.options.kv_tier/host.size_gib=1"]
    done = CliRunner().invoke(cli, ["plan", "--model", "frame-tiny", "--machine", "h100", "--json", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    (tier,) = found["tiers"]
    assert tier["name"] == "host"
    assert tier["blocks"] == GIB // tier["block_bytes"] > 0
    assert tier["host_bytes"] == GIB


def test_buffers_of_transfers_are_planned_in_device_memory() -> None:
    flags = ["plan", "--model", "frame-tiny", "--json", "--disaggregation-mode", "prefill", "--machine", "h100", "--set"]
    found = []
    for size in ("3", "0", "null"):
        done = CliRunner().invoke(cli, [*flags, f"plugins.options.kv_tier/nixl.device_size_gib={size}"])
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.output))
    (device,), (host,), (share,) = (each["tiers"] for each in found)
    assert (device["device_bytes"], device["host_bytes"], device["blocks"]) == (3 * GIB, 0, 3 * GIB // device["block_bytes"])
    assert (host["device_bytes"], host["host_bytes"]) == (0, 8 * GIB)
    assert share["device_bytes"] == int(0.05 * found[2]["ranks"][0]["total"])
    assert found[0]["ranks"][0]["activations"] - found[1]["ranks"][0]["activations"] == 3 * GIB


def test_ranks_share_a_tier_and_replicas_have_their_own(tmp_path: Path) -> None:
    config = llama(tmp_path, tp=4, dp=2)
    tiers = CacheSection(tiers=("host", "disk"))
    options = PluginsSection(options={"kv_tier/host": {"size_gib": 16}, "kv_tier/disk": {"size_gib": 32, "buffer_gib": 2}})
    planned = plan_deployment(config.model_copy(update={"cache": tiers, "plugins": options}), parse_machine("8xh100"))
    host, disk = planned.tiers
    page = planned.memory.bytes_per_token * planned.resolved.page_size
    assert [tier.block_bytes for tier in planned.tiers] == [4 * page, 4 * page]
    assert [host.blocks, disk.blocks] == [16 * GIB // (4 * page), 32 * GIB // (4 * page)]
    assert [host.host_bytes, disk.host_bytes] == [32 * GIB, 4 * GIB]


def test_the_model_of_a_drafter_is_counted(tmp_path: Path) -> None:
    """An EAGLE-3 head: one layer over two inputs, three hidden states joined to one, and a head of
    its own vocabulary."""
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA_70B, "num_hidden_layers": 1, "draft_vocab_size": 32000}))
    config, machine = llama(tmp_path, tp=4), parse_machine("4xh100")
    plain = plan_deployment(config, machine)
    drafting = config.model_copy(update={"speculative": SpeculativeSection(algorithm="eagle3", draft_model_path=str(folder))})
    planned = plan_deployment(drafting, machine)
    hidden, inner, keys = 8192, 28672, 1024
    joined, vocabulary = 3 * hidden * hidden, 32000 * hidden / 4
    layer = (2 * hidden * (hidden + 2 * keys) + hidden * hidden + 3 * hidden * inner) / 4
    rotations = 4 * 131072 * 128  # bytes of the table
    assert planned.memory.drafter == pytest.approx(2 * (joined + vocabulary + layer) + rotations, rel=0.001)
    assert planned.memory.weights == plain.memory.weights + planned.memory.drafter
    assert planned.memory.bytes_per_token == plain.memory.bytes_per_token * 81 / 80
    assert planned.cost == plain.cost


def test_redundant_experts_take_memory_and_no_time(tmp_path: Path) -> None:
    sizes = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True, "head_dim": 128}
    config = {**LLAMA_70B, **sizes, "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 8, "decoder_sparse_step": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plans = []
    for redundant in (0, 8):
        given = {"model": {"path": str(tmp_path), "skip_tokenizer_init": True}}
        parallel = {"tp": 4, "ep": 4, "redundant_experts": redundant}
        plans.append(plan_deployment(FrameConfig.model_validate({**given, "parallel": parallel}), parse_machine("4xh100")))
    more = plans[1].memory.weights - plans[0].memory.weights
    assert more == pytest.approx(8 / 4 * 8 * 3 * 8192 * 1536 * 2, rel=0.01)
    costs = [plan.cost for plan in plans]
    assert costs[0] is not None and costs[1] is not None
    assert costs[1].weight_bytes == pytest.approx(costs[0].weight_bytes, rel=0.01)


@pytest.mark.parametrize(("architecture", "is_recurrent"), [("Gemma3ForCausalLM", False), ("Qwen3NextForCausalLM", True)])
def test_windows_and_states_have_lower_bounds(architecture: str, is_recurrent: bool, tmp_path: Path) -> None:
    """Beyond the window a longer context reads more keys in the layers of full attention alone."""
    given = {"model": {"path": str(make_checkpoint(architecture, tmp_path))}, "cache": {"max_total_tokens": 4096}}
    plan = plan_deployment(FrameConfig.model_validate(given), parse_machine("h200"))
    assert (plan.memory.state_bytes > 0, plan.memory.window_bytes > 0) == (is_recurrent, not is_recurrent)
    cost = plan.cost
    assert cost is not None
    window = cost.window.tokens if cost.window is not None else 0
    near, far = plan.bound_decode(4, window + 1), plan.bound_decode(4, window + 1001)
    assert near is not None and far is not None and plan.bound_prefill() is not None
    assert far.seconds - near.seconds == pytest.approx(4 * 1000 * plan.memory.bytes_per_token / 4.39e12, rel=1e-6)
    if cost.window is not None:
        assert plan.memory.window_bytes / plan.memory.bytes_per_token == cost.window.cached / cost.cached


@pytest.mark.slow
def test_a_plan_for_another_machine_imports_no_kernel_of_it(plan: DeploymentPlan) -> None:
    """The base installation on a CPU has no Triton, which the machine has."""
    script = """
import importlib.metadata, importlib.util, sys
sys.modules["triton"] = None
version, find = importlib.metadata.version, importlib.util.find_spec
def without(name):
    if name == "triton":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = without
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] == "triton" else find(name, *more)
from frame.entrypoints.cli.main import cli
cli(["plan", "--config", "examples/deepseek.yaml", "--machine", "8xh200", "--json"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"][0]["weights"] == plan.memory.weights
