"""Tiers of several ranks: with a device pool of a tenth of what is asked, the tokens are those
of one rank whose pool holds everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import frame.models
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.kv_tiers import loads
from frame.testing.checkpoints import make_checkpoint
from frame.testing.local_loop import LocalLoop
from tests.core.greedy import greedy, random_prompts
from tests.kv_tiers.rank_rig import prepare_ranks, run_ranks

PROMPTS = random_prompts([40 + 7 * number % 24 for number in range(16)])
PARAMS = greedy(6)
WORKING_SET = sum(len(prompt) + 8 for prompt in PROMPTS)
FEWER = 8  # prompts for four ranks, whose threads share the cores
GROUPS = {"tp": 2, "ep": 2, "dp": 2, "dp_attention": True}


class Model:
    """A checkpoint and its tokens, on one rank whose pool holds everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        prepared = prepare_ranks(folder, None, 4 * WORKING_SET)
        runner = build_rank(prepared.resolved, prepared.registry)
        self.tokens = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner).generate(
            PROMPTS, PARAMS
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    names = ("LlamaForCausalLM", "DeepseekV3ForCausalLM")
    return {name: Model(make_checkpoint(name, tmp_path_factory.mktemp("model"))) for name in names}


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tp": ("LlamaForCausalLM", {"tp": 2}),
    "llama-pp": ("LlamaForCausalLM", {"pp": 2}),
    "mla-tp": ("DeepseekV3ForCausalLM", {"tp": 2}),
    "mla-pp": ("DeepseekV3ForCausalLM", {"pp": 2}),
    "mla-groups": ("DeepseekV3ForCausalLM", GROUPS),
    "llama-tp-pp": ("LlamaForCausalLM", {"tp": 2, "pp": 2}),
    "mla-groups-tp": ("DeepseekV3ForCausalLM", GROUPS | {"tp": 4, "ep": 4}),
}
TIERS = (("host",), ("disk",), ("host", "disk"))


@pytest.mark.slow
@pytest.mark.covering
@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("plan", PLANS)
def test_tokens_are_those_of_a_large_pool(
    models: dict[str, Model], plan: str, tiers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunks, overlap and preemption."""
    monkeypatch.setattr(loads, "DEADLINE_MARGIN", 60.0)  # seconds: on a busy machine too, no load is late
    architecture, parallel = PLANS[plan]
    model = models[architecture]
    moe = {"moe": {"dispatcher": "all_gather_reduce_scatter"}} if "dp" in parallel else {}
    prompts = PROMPTS[:FEWER] if plan in ("llama-tp-pp", "mla-groups-tp") else PROMPTS
    expected = model.tokens[: len(prompts)]
    prepared = prepare_ranks(model.folder, tmp_path / "blocks", WORKING_SET // 10, tiers, parallel=parallel, **moe)

    def act(loop: LocalLoop) -> dict[str, Any]:
        scheduler: Any = loop.scheduler
        for each in getattr(scheduler, "_schedulers", [scheduler]):
            each._planner._growth_reserve = 1  # pages that running requests need are not kept free
        assert loop.generate(prompts, PARAMS) == expected
        assert [loop.generate([prompt], PARAMS)[0] for prompt in prompts[::2]] == expected[::2]
        loop.scheduler.check_integrity()
        return {**loop.stats, **loop.scheduler.get_load()}

    counts = run_ranks(prepared, tmp_path, act)
    assert counts["preempted"] > 0 or "dp" in parallel  # whose pages are twice as many
    assert counts["tier_waiting"] == 0
    assert sum(tier["loaded_tokens"] for tier in counts["tiers"]) > len(prompts) * 20
    assert all(tier["stored_tokens"] for tier in counts["tiers"])


@pytest.mark.slow
def test_the_layers_of_a_drafter_are_read_back(tmp_path: Path) -> None:
    """As many drafts are accepted after a load as after a device hit."""
    folder = Path(frame.models.__file__).parent / "frame_tiny"
    speculative = {"algorithm": "mtp", "num_steps": 2, "adaptive": False}
    prompts = PROMPTS[:5]

    def act(loop: LocalLoop) -> tuple[list[list[list[int]]], list[int], dict[str, Any]]:
        rounds, accepted = [], [0]
        for _ in range(2):
            rounds.append([loop.generate([prompt], PARAMS)[0] for prompt in prompts])
            accepted.append(loop.scheduler.get_load()["accepted_tokens"])
        return rounds, [accepted[1], accepted[2] - accepted[1]], loop.scheduler.get_load()

    large = prepare_ranks(folder, None, 4 * WORKING_SET, parallel={"tp": 2}, speculative=speculative)
    small = prepare_ranks(folder, tmp_path, 96, ("host", "disk"), parallel={"tp": 2}, speculative=speculative)
    (tmp_path / "one").mkdir()
    expected = run_ranks(large, tmp_path / "one", act)
    rounds, accepted, load = run_ranks(small, tmp_path, act)
    assert rounds == expected[0]
    assert accepted == expected[1]
    assert min(accepted) > 0
    assert load["tiers"][0]["loaded_tokens"] > 20 * len(prompts)
