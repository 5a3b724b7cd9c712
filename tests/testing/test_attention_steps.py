"""The steps that the attention suite plays, and its check for written arguments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from frame.core.interfaces.attention import Phase
from frame.core.interfaces.plugin import PluginRecord
from frame.entrypoints.tools.bench.paged_batches import Case, Rows, build_context
from frame.testing import conformance
from frame.testing.attention.steps import Script, check_steps, layers_of, write
from frame.testing.tensors import unchanged
from tests.testing.plain_attention import CAPABILITIES, PlainAttention

CASE = Case(Rows.of([1]), head_dim=16, v_head_dim=16)


def subject(*phases: Phase) -> conformance.Subject:
    capabilities = replace(CAPABILITIES, phases=phases)
    target = type("Partial", (PlainAttention,), {"capabilities": capabilities})
    record = PluginRecord("attention_backend", "partial", "m:Partial", "attention_backend/4", capabilities)
    return conformance.Subject(record, target, None, conformance.Setting())


def play(found: conformance.Subject) -> None:
    check_steps(lambda case: found.target(build_context("cpu", case.dtype, case.page_size)), found, CASE)


def test_a_backend_for_decodes_plays_its_steps() -> None:
    play(subject("decode"))


def test_steps_of_no_phase_are_skipped_not_passed() -> None:
    with pytest.raises(conformance.SkipCheck, match="its phases are verify"):
        play(subject("verify"))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_steps_hold_what_they_are_there_for(page_size: int) -> None:
    case = replace(CASE, page_size=page_size)
    script = Script(case, layers_of(case, subject("decode")))
    steps = write(script)
    firsts = [[step.table[slot, 0] for slot in {row.slot for row in step.rows}] for step in steps]
    assert any(len(set(pages)) < len(pages) for pages in firsts), "a prefix hit"
    assert any(0 < step.num_decodes < len(step.rows) for step in steps)
    assert any(len({row.slot for row in step.rows}) < len(step.rows) for step in steps), "two rows of one slot"
    assert any(step.freed for step in steps)
    assert len({row.slot for step in steps for row in step.rows if row.sequence is steps[0].rows[0].sequence}) == 2, "preempted"
    assert max(row.stop for step in steps for row in step.rows) <= 96


def test_unchanged_sees_one_bit() -> None:
    tensor, array = torch.tensor([0.0, torch.nan])[None].T, np.zeros(3, np.int32)
    with unchanged({"tensor": tensor, "array": array}, "it"):
        pass
    with pytest.raises(AssertionError, match="it wrote to tensor;"), unchanged({"tensor": tensor, "array": array}, "it"):
        tensor[0] = -0.0
