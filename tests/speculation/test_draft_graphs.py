"""Drafts of captured passes give the tokens, and the accepted drafts, of plain passes. On a CPU a
captured pass is computed anew from its fixed inputs; tests/gpu/test_draft_graphs.py captures it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frame.config.schema import FrameConfig
from frame.core.interfaces.batch import ForwardBatch
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.checkpoints import make_checkpoint
from frame.testing.local_loop import LocalLoop
from tests.core.test_speculative_equality import FOLDER, make_requests
from tests.plugins.drafters.test_mtp import GLM, add_module
from tests.speculation.test_draft_runner import record_drafts
from tests.speculation.test_tree_passes import list_branches
from tests.testing.plain_attention import CAPABILITIES, PlainAttention

PROMPTS, PARAMS = make_requests(8, seed=5)
PROMPTS[4:6] = [[9], [7]]  # complete prompts of one token, beside drafts


class CapturableAttention(PlainAttention):
    """Reads the rows of a batch from its tensors when it runs, as kernels do."""

    name = "capturable"
    capabilities = replace(CAPABILITIES, graphs="decode")

    def plan(self, batch: ForwardBatch) -> Any:
        return None

    capture_plan = plan

    def rows(self, batch: ForwardBatch) -> Any:
        host = replace(
            batch.host,
            slots=batch.request_slots.numpy(),
            query_lens=batch.query_lens.numpy(),
            seq_lens=batch.seq_lens.numpy(),
            page_table=batch.page_table.numpy(),
        )
        return super().plan(replace(batch, host=host))


def run(
    maximum: int, algorithm: str, path: str = FOLDER, draft: str | None = None, *, overlap: bool = False, topk: int = 1
) -> tuple[list[list[int]], Any]:
    """The output, and each draft with the tokens that it follows. most: rows of the largest graph;
    topk: branches of trees."""
    config = {
        "model": {"path": path, "dtype": "float32"},
        "cache": {"max_total_tokens": 2048},
        "scheduler": {"max_running_requests": 4 if overlap else 8, "chunked_prefill_size": 64, "overlap": overlap},
        "attention": {"backend": "capturable"},
        "execution": {"device": "cpu", "threads": 1},
        "speculative": {"algorithm": algorithm, "adaptive": False, "draft_model_path": draft},
        "plugins": {"options": {f"drafter/{algorithm}": {"eagle_topk": topk}} if topk > 1 else {}},
    }
    prepared = prepare(FrameConfig.model_validate(config), classes=[CapturableAttention])
    runner = build_rank(prepared.resolved, prepared.registry)
    if maximum:
        if draft is not None:
            runner.capture_decode_graphs(maximum, is_dry=True)
        runner.capture_decode_graphs(maximum)
    loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
    found = record_drafts(loop)
    return loop.generate(PROMPTS, [msgspec.structs.replace(each, max_tokens=9) for each in PARAMS]), found


@functools.cache
def run_plain(algorithm: str, draft: str | None = None) -> tuple[list[list[int]], Any]:
    """Without graphs, branches and overlap: what several tests compare with."""
    return run(0, algorithm, draft=draft)


# of a draft model, the trees below are captured in `make test`
@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "draft"), [("mtp", None), pytest.param("draft_model", FOLDER, marks=pytest.mark.exhaustive)])
def test_captured_passes_draft_what_plain_passes_draft(algorithm: str, draft: str | None) -> None:
    captured = run(20, algorithm, draft=draft)
    assert captured == run_plain(algorithm, draft)
    assert len(captured[1]) > 12


@pytest.mark.slow
def test_captured_steps_verify_trees() -> None:
    captured = run(40, "mtp", topk=2)
    assert captured == run(0, "mtp", topk=2)
    assert captured[0] == run_plain("mtp")[0] == run(40, "mtp", topk=2, overlap=True)[0] and len(captured[1]) > 12


@pytest.mark.slow
def test_trees_of_a_draft_model_have_the_tokens_that_it_draws() -> None:
    """The target drafts for itself: the likeliest token of each tree is the next one, and most
    trees have those after it, but not in rows with logits processors or filters."""
    outputs, found = captured = run(40, "draft_model", draft=FOLDER, topk=2)
    assert captured == run(0, "draft_model", draft=FOLDER, topk=2)
    rows = zip(PROMPTS, outputs, PARAMS, strict=True)
    wholes = [prompt + output for prompt, output, params in rows if not (params.frequency_penalty or params.top_p < 1)]
    coming = [(whole[len(tokens) :][:3], tree) for tokens, tree in found for whole in wholes if whole[: len(tokens)] == tokens]
    assert all(tree[0][0] == branch[0] for branch, tree in coming if branch)
    whole = [(branch, list_branches(tree)) for branch, tree in coming if len(branch) == 3]
    hits = [max(count for count in (1, 2, 3) if tuple(branch[:count]) in branches) for branch, branches in whole]
    assert len(hits) >= 10 and sum(hits) > 2 * len(hits)


def test_captured_passes_select_keys(tmp_path: Path) -> None:
    """The indexer of a prediction layer reads the lengths of the replay."""
    add_module(make_checkpoint("DeepseekV32ForCausalLM", tmp_path / "plain"), tmp_path / "with", GLM, 64)
    captured = run(20, "mtp", str(tmp_path / "with"))
    assert captured == run(0, "mtp", str(tmp_path / "with"))
    assert len(captured[1]) > 12


OF_A_DRAFT_MODEL = pytest.param("draft_model", 20, marks=pytest.mark.exhaustive)  # as `windows`, with windows of the target in addition


@pytest.mark.slow
@pytest.mark.parametrize(("target", "maximum"), [("mtp", 20), OF_A_DRAFT_MODEL, ("mtp", 0), ("windows", 20)])
def test_overlapping_steps_take_their_lengths_from_the_device(target: str, maximum: int, tmp_path: Path) -> None:
    algorithm, path, draft = target, FOLDER, FOLDER if target == "draft_model" else None
    if target == "windows":
        windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}  # of the second layer
        path, draft = (str(make_checkpoint("Qwen2ForCausalLM", tmp_path / str(len(each)), **each)) for each in (windows, {}))
        algorithm = "draft_model"
    outputs, found = run(maximum, algorithm, path, draft, overlap=True)
    expected, alone = run(0, algorithm, path, draft) if target == "windows" else run_plain(algorithm, draft)
    assert outputs == expected
    drafts = {tuple(tokens): draft for tokens, draft in alone}
    wholes = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
    common = 0
    for tokens, draft in found:
        left = max(len(whole) for whole in wholes if whole[: len(tokens)] == tokens) - len(tokens)  # no pages for what comes after
        if (other := drafts.get(tuple(tokens))) is not None:
            common += 1
            assert draft[:left] == other[:left]
    assert common > 10
