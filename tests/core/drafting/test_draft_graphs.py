"""Drafts of captured passes give the tokens, and the accepted drafts, of plain passes. On a CPU a
captured pass is computed anew from its fixed inputs; tests/gpu/test_draft_graphs.py captures it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from frame.core.config.schema import FrameConfig
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.local_loop import LocalLoop
from frame.testing.plain_attention import CAPABILITIES, PlainAttention
from tests.core.test_speculative_equality import FOLDER, make_requests


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


def run(most: int, algorithm: str, count: int) -> tuple[list[list[int]], list[int]]:
    """The output, and how many drafted tokens of each place were accepted. most: rows of the
    largest graph."""
    config = {
        "model": {"path": FOLDER, "dtype": "float32"},
        "cache": {"max_total_tokens": 2048},
        "scheduler": {"max_running_requests": 8, "chunked_prefill_size": 64, "overlap": False},
        "attention": {"backend": "capturable"},
        "execution": {"device": "cpu", "threads": 1},
        "speculative": {"algorithm": algorithm, "adaptive": False, "draft_model_path": FOLDER if algorithm == "draft_model" else None},
    }
    prepared = prepare(FrameConfig.model_validate(config), classes=[CapturableAttention])
    runner = build_rank(prepared.resolved, prepared.registry)
    if most:
        runner.capture_decode_graphs(most)
    loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.num_pages), runner)
    prompts, params = make_requests(count, seed=5)
    outputs = loop.generate(prompts, [shorten(each) for each in params])
    return outputs, loop.scheduler.get_load()["accepted_at"]


def shorten(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, max_tokens=9)


@pytest.mark.parametrize("algorithm", ["mtp", "draft_model"])
def test_captured_passes_draft_what_plain_passes_draft(algorithm: str) -> None:
    assert run(20, algorithm, 6) == run(0, algorithm, 6)
