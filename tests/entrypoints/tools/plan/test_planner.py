"""`frame plan`: DeepSeek-V3.1 on eight H200s, targets, machines and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from frame.core.config.schema import FrameConfig
from frame.core.errors import ConfigError
from frame.entrypoints.cli.main import cli
from frame.entrypoints.tools.plan.machines import CARDS, parse_machine, recognise
from frame.entrypoints.tools.plan.planner import DeploymentPlan, Target, plan_deployment, try_plans

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
