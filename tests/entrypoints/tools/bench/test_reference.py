"""The reference workloads keep the lengths that published figures were taken with; floors come out
as published; the table is made."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from frame.core.interfaces.model import ModelConfig
from frame.entrypoints.tools.bench.floors import H200, Ceilings, LayerCost, ModelCost, floor_seconds
from frame.entrypoints.tools.bench.workload import Arrivals, chosen, reference_workloads
from tests.entrypoints.fork_server import run_forked

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
QWEN3 = ModelConfig(
    "Qwen3ForCausalLM", 28, 1024, 151936, 16, 8, 128, 128, "mha", None, 40960, "bfloat16", config={"intermediate_size": 3072}
)  # fmt: skip
QWEN3_MOE = ModelConfig(
    "Qwen3MoeForCausalLM", 48, 2048, 151936, 32, 4, 128, 128, "mha", None, 40960, "bfloat16",
    num_experts=128, config={"moe_intermediate_size": 768, "num_experts_per_tok": 8},
)  # fmt: skip


def test_lengths_are_those_of_the_published_figures() -> None:
    found = {name: (len(w.prompts), sum(map(len, w.prompts)), sum(w.outputs)) for name, w in reference_workloads().items()}
    assert found == {
        "mixed256": (256, 146_878, 139_901),
        "single": (1, 128, 256),
        "batch8": (8, 1024, 2048),
        "prefill": (16, 65_536, 16),
        "prefix": (64, 266_240, 4096),
        "longctx": (4, 64_000, 512),
    }


def test_a_round_shares_no_prompt_with_another_and_its_ids_exist() -> None:
    workload = reference_workloads()["prefix"].shrunk(16)
    first, second = ([job.prompt for job in workload.jobs(300, number)] for number in (0, 1))
    assert len({tuple(prompt[: workload.shared]) for prompt in first}) == 1
    assert first[0][0] != second[0][0]
    assert all(10 <= token < 300 for prompt in first + second for token in prompt)


def test_a_change_makes_a_workload_anew_and_all_are_six() -> None:
    nothing = {"requests": None, "input": None}
    every = chosen(["all"], nothing)
    assert every.keys() == reference_workloads().keys()
    assert every["batch8"].jobs(20_000, 1) == reference_workloads()["batch8"].jobs(20_000, 1)
    fewer = chosen(["batch8"], {"requests": 2, "input": (5, 5)})["batch8"]
    assert [len(job.prompt) for job in fewer.jobs(500, 0)] == [5, 5]
    later = chosen(["batch8"], nothing)["batch8"].jobs(500, 0, Arrivals(10.0))
    assert later[-1].at > 0


@pytest.mark.parametrize(("name", "model_config"), [("Qwen3-0.6B", QWEN3), ("Qwen3-30B-A3B", QWEN3_MOE)])
def test_floors_are_the_published_limits(name: str, model_config: ModelConfig) -> None:
    published = json.loads((BENCHMARKS / "peers_h200.json").read_text())["models"][name]["workloads"]
    cost = ModelCost.of(model_config)
    assert cost is not None
    for workload, row in published.items():
        given = reference_workloads()[workload]
        lengths = [len(prompt) for prompt in given.prompts]
        tokens = sum(lengths) if given.counts == "prompt" else sum(given.outputs)
        assert tokens / floor_seconds(cost, H200, lengths, given.outputs, given.shared) == pytest.approx(row["limit"], rel=0.005)


def test_sizes_of_a_latent_mixture_add_up() -> None:
    """DeepSeek-V3: 671 billion parameters, of which a token meets 37 billion; 576 cached values a
    layer."""
    sizes = {
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "q_lora_rank": 1536,
    }  # fmt: skip
    model_config = ModelConfig(
        "DeepseekV3ForCausalLM", 61, 7168, 129280, 128, 128, 192, 128, "mla", (512, 64), 163840, "bfloat16", num_experts=256, config=sizes
    )
    cost = ModelCost.of(model_config)
    assert cost is not None
    assert sum(layers.count * (layers.dense + layers.experts * layers.expert) for layers in cost.layers) + 2 * cost.head == pytest.approx(
        671e9, rel=0.002
    )
    assert sum(layers.met for layers in cost.layers) + cost.head == pytest.approx(37e9, rel=0.02)
    assert cost.cached == 61 * 576
    assert cost.step(1, 0)[0] == pytest.approx(2 * 37e9, rel=0.02)
    assert ModelCost.of(replace(model_config, sliding_window=4096)) is None


def test_sizes_of_recurrent_layers_and_windows_add_up() -> None:
    """Qwen3.5-35B-A3B has 30 layers of gated delta network, gpt-oss-20b 12 of 24 with a window of
    128 tokens; their names say the parameters, with two vocabulary matrices."""
    delta = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128}
    experts = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8}
    qwen = ModelConfig(
        "Qwen3_5MoeForCausalLM", 40, 2048, 248320, 16, 2, 256, 256, "mha", None, 262144, "bfloat16", num_experts=256, config=delta | experts
    )
    kinds = ["sliding_attention", "full_attention"] * 12
    sizes = {"intermediate_size": 2880, "num_experts_per_tok": 4, "layer_types": kinds}
    oss = ModelConfig(
        "GptOssForCausalLM", 24, 2880, 201088, 64, 8, 64, 64, "mha", None, 131072, "bfloat16",
        num_experts=32, sliding_window=128, config=sizes,
    )  # fmt: skip
    for model_config, whole, active in ((qwen, 34.6e9, 2.9e9), (oss, 20.9e9, 3.6e9)):
        cost = ModelCost.of(model_config)
        assert cost is not None
        matrices = sum(layers.count * (layers.dense + layers.experts * layers.expert) for layers in cost.layers)
        assert matrices + 2 * cost.head == pytest.approx(whole, rel=0.005)
        assert sum(layers.met for layers in cost.layers) + cost.head == pytest.approx(active, rel=0.01)
    hybrid, windowed = ModelCost.of(qwen), ModelCost.of(oss)
    assert hybrid is not None and windowed is not None and windowed.window is not None
    assert hybrid.state * 4 == 30 * 32 * 128 * 128 * 4  # 63 MB of a sequence
    assert hybrid.step(2, 0)[0] - replace(hybrid, state=0).step(2, 0)[0] == 2 * 2 * 4 * hybrid.state
    assert hybrid.cached == 10 * 2 * 2 * 256
    assert windowed.cached == windowed.window.cached == 12 * 2 * 8 * 64
    assert windowed.window.pairs(100) == 5000
    assert windowed.window.pairs(200) == 128 * 64 + 72 * 128
    long, short = (floor_seconds(windowed, H200, [length], [2]) for length in (4096, 128))
    assert long > short
    assert ModelCost.of(replace(oss, config=sizes | {"layer_types": ["chunked_attention"] * 24})) is None


def test_a_step_is_bound_by_what_is_slower() -> None:
    cost = ModelCost((LayerCost(1, dense=100),), head=0, cached=10, pair=40)
    read, operations = cost.step(rows=4, tokens=50)
    assert (read, operations) == (2 * (100 + 500), 2 * 4 * 100)
    assert Ceilings(1200, 1e9).seconds(read, operations) == 1
    assert Ceilings(1e9, 400).seconds(read, operations) == 2


@pytest.mark.slow
def test_the_table_is_made_of_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    few = ["--only", "single,mixed256", "--shrink", "64", "--max-len", "512", "--budget", "90", "--set", "threads=1"]
    few += ["--ceilings", "h200", "--json", str(path)]
    command = [sys.executable, str(BENCHMARKS / "h200_table.py"), "frame-tiny", *few]
    done = run_forked(command)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["rows"]["frame-tiny"]
    assert found["ended"] == "done"
    assert found["rows"].keys() == {"single", "mixed256"}
    assert all(row["complete"] and row["tokens_per_s"] > 0 for row in found["rows"].values())
    assert "ready after" in done.stdout
