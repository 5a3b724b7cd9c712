"""`frame simulate`: against stored measurements, against itself step by step, and what it
refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from frame.config.schema import FrameConfig
from frame.core.errors import ConfigError
from frame.entrypoints.cli.main import cli
from frame.entrypoints.cli.simulate import parse_span
from frame.entrypoints.tools.bench.workload import reference_workloads
from frame.entrypoints.tools.simulate import engine
from frame.entrypoints.tools.simulate.measures import Gaps, Measures
from frame.entrypoints.tools.simulate.shares import DENSE
from frame.entrypoints.tools.simulate.simulation import Simulation, parse_cluster
from frame.entrypoints.tools.simulate.step_times import CAUSES, StepTimes, StepWork
from frame.entrypoints.tools.simulate.workload import Arrival, Distribution
from tests.architecture.source import ROOT

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072, "dtype": "bfloat16",
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "eos_token_id": 128001,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def build(folder: Path, machine: str = "h200", policy: str = "prefix_load", **sections: dict[str, Any]) -> Simulation:
    config = FrameConfig.model_validate({"model": {"path": str(folder), "skip_tokenizer_init": True}, **sections})
    return Simulation.build(config, parse_cluster(machine), policy=policy)


def draw(rate: float, seconds: float, **changes: Any) -> list[Arrival]:
    return list(Distribution(**{"rate": rate, "seconds": seconds, "input": (64, 512), "output": (8, 64), **changes}).draw(32_000, 3))


def test_workloads_take_the_measured_time(folder: Path) -> None:
    """docs/simulate.md has the same errors."""
    simulation, workloads = build(folder), reference_workloads()
    stored = json.loads((ROOT / "benchmarks/results/2026-11-21-h200-table-7.json").read_text())["rows"]["llama-3.1-8b"]["rows"]
    for name in ("single", "batch8", "prefill", "longctx", "mixed256"):
        jobs = workloads[name].jobs(LLAMA_8B["vocab_size"], 0)  # type: ignore[arg-type]
        row = simulation.run(Arrival(0.0, job.prompt, job.output) for job in jobs)
        assert row[f"{workloads[name].counts}_tokens_per_s"] == pytest.approx(stored[name]["tokens_per_s"], rel=0.05), name


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}], ids=["tp 1", "pp 2"])
def test_steps_counted_at_once_are_the_same_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, int]) -> None:
    """Few pages, so requests are preempted and prefixes evicted."""
    simulation = build(folder, "2xh200", parallel=parallel, cache={"max_total_tokens": 6000}, scheduler={"max_running_requests": 24})
    arrivals = draw(60, 1, shared=128, groups=3, output=(64, 300))
    at_once = simulation.run(arrivals)
    monkeypatch.setattr(engine, "MAX_STEPS", 1)
    singly = simulation.run(arrivals)
    assert at_once["preempted"] > 0
    assert 0.1 < at_once["hit_rate"] < 0.9
    for name, value in singly.items():
        assert at_once[name] == (value if isinstance(value, str | list) else pytest.approx(value, rel=1e-4)), name


def test_a_seed_gives_one_result(folder: Path) -> None:
    simulation = build(folder, "4xh200", policy="power_of_two")
    runs = [simulation.run(Distribution(40, 2, (64, 512), (8, 64)).draw(32_000, seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_request_waits_for_the_step_that_is_scheduled(folder: Path) -> None:
    """With overlap, one that arrives in a step is computed after the next one."""
    simulation = build(folder)
    first = Arrival(0.0, [11] * 64, 200)
    alone = simulation.run([first, Arrival(100.0, [12] * 64, 1)])
    step = alone["between_tokens_ms"]["p50"]
    beside = simulation.run([first, Arrival(0.3005, [12] * 64, 1)])
    waited = beside["first_token_ms"]["mean"] - alone["first_token_ms"]["mean"]
    assert step / 2 < 2 * waited < 2.2 * step  # of two requests, one waits for the rest of a step and one more


def test_more_load_and_fewer_devices_are_slower(folder: Path) -> None:
    slow, fast = build(folder).run(draw(30, 2)), build(folder, "4xh200").run(draw(30, 2))
    assert slow["first_token_ms"]["p50"] > fast["first_token_ms"]["p50"]
    assert slow["between_tokens_ms"]["p50"] > fast["between_tokens_ms"]["p50"]
    assert slow["busy"] > fast["busy"]
    assert (slow["requests"], slow["failed"]) == (fast["requests"], 0)


def test_the_policy_decides_the_hits(folder: Path) -> None:
    arrivals = draw(40, 4, shared=2048, groups=12, input=(32, 64))
    by_turns, by_prefix = (build(folder, "8xh200", policy) for policy in ("round_robin", "prefix_load"))
    assert by_prefix.run(arrivals)["hit_rate"] > 1.3 * by_turns.run(arrivals)["hit_rate"]


def test_recorded_outputs_are_cached(folder: Path) -> None:
    """The second turn of a conversation contains the output of the first one."""
    import numpy as np

    prompt, output = [*range(100, 164)], [*range(300, 364)]
    turns = [Arrival(0.0, prompt, 64, np.array(output)), Arrival(10.0, [*prompt, *output, 7], 4)]
    assert build(folder).run(turns)["hit_rate"] == pytest.approx(112 / (64 + 129), abs=0.01)  # the last token has no K and V


def test_a_long_request_is_refused_and_counted(folder: Path) -> None:
    row = build(folder, cache={"max_total_tokens": 4096}).run([Arrival(0.0, [11] * 5000, 5), Arrival(0.1, [11] * 50, 5)])
    assert row["failed"] == 1
    assert "the context holds 4096" in row["errors"][0]


def test_replicas_join_and_drain(folder: Path) -> None:
    simulation = build(folder, "4xh200")
    measures = Measures(0.0)
    fleet = simulation.make_fleet(measures, 1)
    sizes = []

    def control(now: float) -> None:
        fleet.scale(3 if now < 4 else 1, now, delay=1.5)
        sizes.append((fleet.num_wanted, len(fleet.loads), fleet.num_replicas))

    arrivals = draw(30, 8)
    fleet.run(arrivals, control)
    assert sizes[0] == (3, 1, 3)
    assert sizes[2][1] == 3
    assert (sizes[-1][0], fleet.num_replicas) == (1, 1)
    assert measures.describe(1)["requests"] == len(arrivals)  # those of drained replicas end


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"cache": {"tiers": ["host"]}}, "cache tiers"),
        ({"speculative": {"algorithm": "ngram"}}, "speculation"),
        ({"disaggregation": {"mode": "prefill"}}, "prefill and decode servers"),
    ],
)
def test_what_has_no_model_is_refused_by_name(folder: Path, sections: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"does not model .*{name}"):
        build(folder, **sections)


@pytest.mark.parametrize(
    ("machine", "sentence"), [("0x8xh200", "1 to 1024 hosts"), ("8xh20", "h200"), ("2x2xh200", "room for 4"), ("x", "COUNTxCARD")]
)
def test_machines_and_replicas_that_do_not_fit(folder: Path, machine: str, sentence: str) -> None:
    config = FrameConfig.model_validate({"model": {"path": str(folder), "skip_tokenizer_init": True}})
    with pytest.raises(ConfigError, match=sentence):
        Simulation.build(config, parse_cluster(machine), replicas=5)


def test_a_step_takes_what_its_parts_take(folder: Path) -> None:
    """Two ranks halve all parts but the launches, and add sums."""
    one, two = (StepTimes(build(folder, f"{ranks}xh200", parallel={"tp": ranks}).plan, DENSE) for ranks in (1, 2))
    for work in (StepWork(1, 1, 1000, 0.0), StepWork(8192, 4, 0, 8192 * 4096.0)):
        alone, shared = (dict(zip(CAUSES, times.measure(work), strict=True)) for times in (one, two))
        assert bool(alone["reading weights"]) != bool(alone["matrix products"])
        assert alone["sums over ranks"] == 0 < shared["sums over ranks"]
        assert alone["launches"] == shared["launches"] > 0
        for cause in ("reading weights", "matrix products", "reading the KV cache", "attention"):
            assert shared[cause] == pytest.approx(alone[cause] / 2, rel=0.02), cause


def test_lengths_are_ranges() -> None:
    assert (parse_span("7"), parse_span("3:9")) == ((7, 7), (3, 9))
    with pytest.raises(ValueError, match="range of lengths"):
        parse_span("9:3")


def test_gaps_are_right_within_a_bin() -> None:
    import numpy as np

    gaps = Gaps()
    gaps.add(np.linspace(1e-3, 0.1, 1000))
    gaps.add(np.array([5.0]), 3)
    found = gaps.describe()
    assert found["p50"] == pytest.approx(50.6, rel=0.015)
    assert found["mean"] == pytest.approx((1000 * 50.5 + 3 * 5000) / 1003, rel=1e-3)


def test_the_command_writes_a_report(folder: Path) -> None:
    model = ["--model", str(folder), "--skip-tokenizer-init"]
    done = CliRunner().invoke(
        cli, ["simulate", *model, "--machine", "2x4xh200", "--tp", "4", "--duration", "3", "--json", str(folder / "a")]
    )
    assert done.exit_code == 0, done.output
    report = json.loads((folder / "a").read_text())
    row = report["rows"]["simulated"]
    assert (row["replicas"], row["devices"], row["failed"]) == (2, 8, 0)
    assert "steps are bound by reading weights" in done.output
    assert "sums over more than 2 ranks were not measured" in " ".join(report["assumptions"])
    for flag in ("--input-len", "--shared-prefix", "--prefix-groups"):
        refused = CliRunner().invoke(cli, ["simulate", *model, "--machine", "h200", "--dump", str(folder / "none"), flag, "5"])
        assert (refused.exit_code, f"{flag} describes drawn requests" in refused.output) == (78, True)


def test_plans_are_ranked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.entrypoints.cli.plan.RANKED_SECONDS", 3.0)
    model = ["--model", str(folder), "--skip-tokenizer-init", "--machine", "2xh200"]
    done = CliRunner().invoke(cli, ["plan", *model, "--hosts", "2", "--arrivals", "2", "--json"])
    found = json.loads(done.output)
    assert found["order"][0] == "--tp 2 --pp 1"  # measured: 413.8 against 251.6 tokens/s of one request
    assert set(found["plans"]) == {"--tp 1 --pp 1", "--tp 1 --pp 2", "--tp 2 --pp 1"}
    assert CliRunner().invoke(cli, ["plan", *model, "--hosts", "2"]).exit_code == 78


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--input-len", "100000000"], "--input-len"),
        (["--output-len", "8:100000000"], "--output-len"),
        (["--shared-prefix", "200000"], "--shared-prefix"),
        (["--shared-prefix", "65536", "--prefix-groups", "65536"], "--prefix-groups"),
    ],
)
def test_lengths_beyond_the_context_are_refused_before_prompts_are_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], named: str
) -> None:
    monkeypatch.setattr(Distribution, "draw", lambda *_: pytest.fail("prompts are drawn"))
    model = ["--model", str(folder), "--skip-tokenizer-init"]
    refused = CliRunner().invoke(cli, ["simulate", *model, "--machine", "h200", "--duration", "1", *flags])
    assert refused.exit_code == 78
    assert named in refused.output
