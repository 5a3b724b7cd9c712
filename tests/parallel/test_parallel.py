"""Greedy tokens under a parallel plan equal those of one rank. The ranks are threads that meet over
gloo; batches travel as bytes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from frame.config.resolve import ResolveError
from frame.config.schema import FrameConfig
from frame.core.execution.decode_graphs import DecodeGraphs
from frame.core.interfaces.batch import StepResult
from frame.core.interfaces.platform import HOST
from frame.entrypoints.configuration.prepare import Prepared, prepare
from frame.entrypoints.processes.build_engine import add_group, build_rank, load_parts
from frame.entrypoints.processes.build_scheduler import build_scheduler, build_schedulers
from frame.entrypoints.processes.components import RunnerPlan, build_runner
from frame.entrypoints.processes.join_groups import Groups, Place, join_groups
from frame.parallel.attention_groups import GroupRunner, LeadingGroupRunner
from frame.parallel.rank_channels import decode_batch, decode_result, encode_batch, encode_result
from frame.parallel.rank_watch import RankWatch
from frame.parallel.tp_follower import LeadingRunner, follow
from frame.testing.checkpoints import make_checkpoint
from frame.testing.local_loop import LocalLoop
from tests.core.greedy import greedy, random_prompts
from tests.speculation.test_draft_graphs import CapturableAttention

PROMPTS = random_prompts([3, 40, 17, 55, 9, 40])
PROMPTS[5][:32] = PROMPTS[1][:32]
TOKENS = greedy(12)


class Wires:
    """Carries batches from rank 0 to the others, as encoded bytes."""

    def __init__(self, size: int) -> None:
        self.queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
        self.results: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(size)]

    def send(self, batch: Any) -> None:
        for each in self.queues[1:]:
            each.put(encode_batch(batch))

    def receive(self, rank: int) -> Any:
        data = self.queues[rank].get(timeout=60)
        return decode_batch(data) if isinstance(data, bytes) else data

    def close(self) -> None:
        for each in self.queues:
            each.put(None)

    def send_order(self, order: Any) -> None:
        for each in self.queues[1:]:
            each.put(order)


class Results:
    """Rank 0's end of the results of another rank."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.get = wires.results[rank].get

    def receive(self, step: int) -> StepResult:
        result = decode_result(self.get(timeout=60))
        assert result.step == step
        return result

    def close(self) -> None: ...


class End:
    """A follower's end of the wires."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.receive = lambda: wires.receive(rank)
        self.send = lambda result: wires.results[rank].put(encode_result(result))

    def close(self) -> None: ...


def prepared_for(folder: Path, tokens: int = 4096, **sections: Any) -> Prepared:
    config = {
        "model": {"path": str(folder), "dtype": "float32"},
        "cache": {"max_total_tokens": tokens},
        "scheduler": {"max_running_requests": 8, "chunked_prefill_size": 32, "overlap": True},
        "execution": {"device": "cpu", "threads": 1},
    }
    return prepare(FrameConfig.model_validate(config | sections), classes=[CapturableAttention])


def generate_with(prepared: Prepared, scratch: Path, act: Callable[[LocalLoop], Any], graphs: int = 0) -> Any:
    """The result of `act` with rank 0's loop, while the other ranks of the plan follow. graphs:
    rows of the largest captured decode."""
    resolved, registry = prepared.resolved, prepared.registry
    plan = resolved.plan
    size = plan.num_ranks
    wires = Wires(size)

    def run(rank: int) -> Any:
        groups = join_groups(resolved, registry, Place(rank, size, f"file://{scratch / 'ranks'}", watch=RankWatch(rank, size)), HOST)
        try:
            return serve(rank, groups)
        finally:
            pipeline = (groups.pipeline.hidden, groups.pipeline.tokens) if groups.pipeline is not None else ()
            for group in (groups.tp, groups.experts, *pipeline):  # ranks that wait for this one raise
                if group is not None:
                    group.close()

    def serve(rank: int, groups: Groups) -> Any:
        own = build_runner(RunnerPlan(resolved, load_parts(resolved, registry), HOST, groups))
        if graphs:
            own.capture_decode_graphs(graphs)
        runner = add_group(resolved, own, own, rank)
        end: Any = End(wires, rank)
        if rank:
            return follow(runner, end, results=end if rank in plan.result_ranks else None, group=plan.find_group(rank))
        results: Any = [Results(wires, other) for other in plan.result_ranks if other]
        leader: Any
        if isinstance(runner, GroupRunner):
            leader = LeadingGroupRunner(runner, wires, results)  # type: ignore[arg-type]
        else:
            leader = LeadingRunner(runner, wires, results[0] if results else None)  # type: ignore[arg-type]
        scheduler: Any = build_schedulers(resolved, registry, own.capacity.pools)
        loop = LocalLoop(scheduler, leader)
        try:
            return act(loop)
        finally:
            loop.runner.close()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        done, _ = wait(futures, timeout=120, return_when=FIRST_EXCEPTION)
        results = [future.result() for future in futures if future in done]
    return results[0]


class Model:
    """A checkpoint and one rank's tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        prepared = prepared_for(folder)
        runner = build_rank(prepared.resolved, prepared.registry)
        loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
        self.tokens = loop.generate(PROMPTS, TOKENS)

    def check(self, scratch: Path, tokens: int = 4096, **sections: Any) -> dict[str, int]:
        """Twice the same prompts: the second time with prefix hits. -> the scheduler's counters."""

        def act(loop: LocalLoop) -> dict[str, int]:
            for _ in range(2):
                assert loop.generate(PROMPTS, TOKENS) == self.tokens
            assert loop.stats["cached"] > 0
            loop.scheduler.check_integrity()
            return loop.scheduler.get_load()

        return generate_with(prepared_for(self.folder, tokens, **sections), scratch, act)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    names = ("DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM", "NemotronHForCausalLM", "Gemma3ForCausalLM")
    names += ("FalconH1ForCausalLM",)
    return {name: Model(make_checkpoint(name, tmp_path_factory.mktemp("model"))) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["all_reduce", "all_gather_reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_whole_experts_on_two_ranks(models: dict[str, Model], architecture: str, dispatcher: str, tmp_path: Path) -> None:
    models[architecture].check(tmp_path, parallel={"tp": 2, "ep": 2}, moe={"dispatcher": dispatcher})


GROUPS = {"tp": 2, "ep": 2, "dp": 2, "dp_attention": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "dispatcher", "parallel"),
    [
        ("DeepseekV3ForCausalLM", "all_gather_reduce_scatter", GROUPS),
        ("DeepseekV3ForCausalLM", "all_to_all", GROUPS),
        ("Qwen3MoeForCausalLM", "all_gather_reduce_scatter", GROUPS),
        pytest.param("Qwen3MoeForCausalLM", "all_gather_reduce_scatter", GROUPS | {"tp": 4, "ep": 4}, marks=pytest.mark.soak),
    ],
)
def test_attention_groups(models: dict[str, Model], architecture: str, dispatcher: str, parallel: Any, tmp_path: Path) -> None:
    """With overlap, chunks, prefix hits and few pages."""
    models[architecture].check(tmp_path, tokens=96, parallel=parallel, moe={"dispatcher": dispatcher})


@pytest.mark.parametrize(
    ("architecture", "dispatcher", "parallel"),
    [
        ("DeepseekV3ForCausalLM", "all_reduce", {"tp": 2, "ep": 2}),
        ("Qwen3MoeForCausalLM", "all_to_all", {"tp": 2, "ep": 2, "redundant_experts": 2}),
        ("Qwen3MoeForCausalLM", "all_gather_reduce_scatter", GROUPS | {"redundant_experts": 4}),
    ],
)
def test_experts_move_under_traffic(
    models: dict[str, Model], architecture: str, dispatcher: str, parallel: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One expert between two steps: a layer's moves take many, with requests running."""
    caplog.set_level("INFO", "frame.parallel.expert_moves")
    parallel = parallel | {"eplb": True, "eplb_interval": 3, "eplb_stage_bytes": 1}
    models[architecture].check(tmp_path, parallel=parallel, moe={"dispatcher": dispatcher})
    moved = [record.args[0] for record in caplog.records if record.msg.startswith("experts have moved")]  # type: ignore[index]
    assert len(moved) >= 2 and max(moved) > 1  # type: ignore[type-var]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_an_idle_group_stays_in_step(models: dict[str, Model], tmp_path: Path, steps: int) -> None:
    """One request alone, then requests in both groups."""
    model, alone = models["Qwen3MoeForCausalLM"], greedy(steps)
    prepared = prepared_for(model.folder)
    runner = build_rank(prepared.resolved, prepared.registry)
    expected = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner).generate(PROMPTS[:1], alone)

    def act(loop: LocalLoop) -> None:
        assert loop.generate(PROMPTS[:1], alone) == expected
        assert loop.stats["steps"] >= steps
        assert loop.generate(PROMPTS, TOKENS) == model.tokens

    generate_with(prepared_for(model.folder, parallel=GROUPS, moe={"dispatcher": "all_gather_reduce_scatter"}), tmp_path, act)


def test_attention_groups_replay_graphs_of_equal_sizes(models: dict[str, Model], tmp_path: Path) -> None:
    """Captured decodes, with groups that have different numbers of rows or none."""
    model = models["Qwen3MoeForCausalLM"]
    sections = {"parallel": GROUPS, "attention": {"backend": "capturable"}, "cache": {"max_total_tokens": 4096, "page_size": 16}}

    def act(loop: LocalLoop) -> None:
        for rows in (1, 2, 3, 6):
            assert loop.generate(PROMPTS[:rows], TOKENS) == model.tokens[:rows]

    generate_with(prepared_for(model.folder, **sections), tmp_path, act, graphs=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "parallel", "overlap"),
    [
        ("LlamaForCausalLM", {"pp": 2}, True),
        ("LlamaForCausalLM", {"pp": 2}, False),
        ("DeepseekV3ForCausalLM", {"tp": 2, "pp": 2, "ep": 2}, True),
        ("NemotronHForCausalLM", {"pp": 2}, True),  # states and attention are in different stages
        ("FalconH1ForCausalLM", {"tp": 2, "pp": 2}, True),  # and in each layer
        ("Gemma3ForCausalLM", {"pp": 2}, True),
    ],
)
def test_two_stages(models: dict[str, Model], architecture: str, parallel: Any, overlap: bool, tmp_path: Path) -> None:
    scheduler = {"max_running_requests": 8, "chunked_prefill_size": 32, "overlap": overlap}
    models[architecture].check(tmp_path, 65_536, parallel=parallel, scheduler=scheduler)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "parallel"),
    [
        ("LlamaForCausalLM", {"tp": 4}),
        ("LlamaForCausalLM", {"pp": 2}),
        ("Qwen3MoeForCausalLM", {"pp": 2}),
        pytest.param("DeepseekV3ForCausalLM", {"pp": 2}, marks=pytest.mark.soak),
        pytest.param("DeepseekV3ForCausalLM", {"tp": 4}, marks=pytest.mark.soak),
        pytest.param("Qwen3MoeForCausalLM", {"tp": 4}, marks=pytest.mark.soak),
        pytest.param("Qwen3MoeForCausalLM", {"tp": 2, "ep": 2}, marks=pytest.mark.soak),
        pytest.param("LlamaForCausalLM", {"tp": 2, "pp": 2}, marks=pytest.mark.soak),
        pytest.param("DeepseekV3ForCausalLM", {"tp": 2, "pp": 2}, marks=pytest.mark.soak),
        pytest.param("Qwen3MoeForCausalLM", {"tp": 2, "pp": 2}, marks=pytest.mark.soak),
    ],
)
def test_plans_with_few_pages(models: dict[str, Model], architecture: str, parallel: dict[str, int], tmp_path: Path) -> None:
    """With overlap, chunks, prefix hits and preemption."""
    model = models[architecture]

    def act(loop: LocalLoop) -> dict[str, int]:
        loop.scheduler._planner._growth_reserve = 1  # pages that running requests need are not kept free
        for _ in range(2):
            assert loop.generate(PROMPTS, TOKENS) == model.tokens
        return {**loop.stats, **loop.scheduler.get_load()}

    counts = generate_with(prepared_for(model.folder, 160, parallel=parallel), tmp_path, act)
    assert counts["preempted"] > 0 and counts["cached"] > 0


@pytest.mark.parametrize(("architecture", "parallel"), [("LlamaForCausalLM", {"pp": 2}), ("NemotronHForCausalLM", {"pp": 2})])
def test_stages_replay_decode_graphs(
    models: dict[str, Model], architecture: str, parallel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured decodes of micro-batches: a replay reads the hidden states of the stage before."""
    model, sizes, replay = models[architecture], [], DecodeGraphs.replay

    def noted(graphs: DecodeGraphs, tokens: Any, *others: Any, **more: Any) -> Any:
        sizes.append(len(tokens.slots))
        return replay(graphs, tokens, *others, **more)

    monkeypatch.setattr(DecodeGraphs, "replay", noted)
    sections = {"attention": {"backend": "capturable"}, "cache": {"max_total_tokens": 65_536, "page_size": 16}}

    def act(loop: LocalLoop) -> None:
        assert loop.generate(PROMPTS, TOKENS) == model.tokens

    generate_with(prepared_for(model.folder, parallel=parallel, **sections), tmp_path, act, graphs=3)
    assert len(sizes) > 2 * max(map(len, model.tokens)) and max(sizes) == 3  # two stages, two micro-batches a step


def test_two_stages_verify_drafts(models: dict[str, Model], tmp_path: Path) -> None:
    load = models["LlamaForCausalLM"].check(tmp_path, parallel={"pp": 2}, speculative={"algorithm": "ngram", "adaptive": False})
    assert load["drafted_tokens"] > 0


@pytest.mark.parametrize(
    ("architecture", "parallel", "dispatcher", "words"),
    [
        ("LlamaForCausalLM", {"tp": 2, "ep": 2}, None, "parallel.ep is 2, but LlamaForCausalLM has no experts"),
        ("Qwen3MoeForCausalLM", {"tp": 2, "eplb": True}, None, r"parallel.eplb is true, but parallel.ep is 1"),
        ("Qwen3MoeForCausalLM", {"tp": 2, "ep": 2, "redundant_experts": 9}, None, "more than the model's 8 experts"),
        (
            "Qwen3MoeForCausalLM",
            {"tp": 2, "ep": 2, "redundant_experts": 1},
            None,
            r"does not divide 8 experts and 1 redundant ones: 9 = 2 x 4 \+ 1.\n.*redundant_experts: 0",
        ),
        ("Qwen3MoeForCausalLM", {"tp": 2, "ep": 4}, None, "experts are divided among all tensor-parallel ranks or none"),
        ("LlamaForCausalLM", {"pp": 3}, None, r"parallel.pp is 3, more stages than the model has layers \(2\)"),
        ("LlamaForCausalLM", {"tp": 2, "dp": 2, "dp_attention": True}, None, "has no experts that the groups could share"),
        ("Qwen3MoeForCausalLM", {"tp": 2, "dp": 2, "dp_attention": True}, None, "experts, divided among all 2 ranks"),
        ("Qwen3MoeForCausalLM", GROUPS | {"dp": 3}, None, r"parallel.dp is 3, which does not divide parallel.tp \(2\)"),
        ("Qwen3MoeForCausalLM", GROUPS | {"pp": 2}, None, "groups of a pipeline"),
        ("Qwen3MoeForCausalLM", GROUPS, "all_reduce", "does not exchange the tokens of attention groups"),
        ("Qwen3MoeForCausalLM", {"tp": 1}, "all_to_all", "between the ranks of parallel.ep, and there is one\n.*all_reduce"),
        ("LlamaForCausalLM", {"tp": 1}, "all_reduce", "moe.dispatcher is all_reduce, but LlamaForCausalLM has no experts.\n.*: auto"),
        ("Qwen3MoeForCausalLM", {"tp": 2}, "all_to_all", r"needs whole experts on each rank \(try parallel.ep: 2\)"),
    ],
)
def test_plans_that_do_not_fit(tmp_path: Path, architecture: str, parallel: Any, dispatcher: str | None, words: str) -> None:
    with pytest.raises(ResolveError, match=words):
        prepared_for(make_checkpoint(architecture, tmp_path), parallel=parallel, moe={"dispatcher": dispatcher})
