"""`RecordedForward`: what is recorded, what is repeated, and which steps stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from frame.core.interfaces.attention import AttentionCapabilities
from frame.core.interfaces.batch import ForwardBatch, SelectedTokens
from frame.entrypoints.tools.bench.paged_batches import PlainKVCache, Rows, build_context, forward_batch, lay_out
from frame.forward.recorded_forward import RecordedForward, record_decodes

_TABLE = torch.arange(40.0).view(20, 2)


class Package:
    """Row operations whose only operation adds positions to rows."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] | None = None

    def begin_recording(self) -> None:
        assert self.calls is None
        self.calls = []

    def end_recording(self) -> Callable[[], object]:
        calls, self.calls = self.calls, None
        assert calls is not None
        return lambda: [call() for call in calls]

    def add(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape)
        target, left, right = out.numpy(), x.numpy(), positions.numpy()

        def call() -> None:
            target[:] = left + right[:, None]

        call()
        if self.calls is not None:
            self.calls.append(call)
        return out


class Steps:
    """A recorded forward pass, which counts the calls of the pass itself."""

    def __init__(self, between: Callable[[torch.Tensor], Any] = lambda x: None) -> None:
        self.package, self.count, self.between = Package(), 0, between
        attention: Any = SimpleNamespace(capture_plan=lambda batch: "captured", replay_plan=self.replay_plan)
        package: Any = self.package
        self.forward = RecordedForward(self.compute, package, attention)
        self.lengths: list[list[int]] = []

    def replay_plan(self, plan: Any, batch: ForwardBatch) -> None:
        assert plan == "captured"
        self.lengths.append(batch.host.seq_lens.tolist())

    def compute(self, batch: ForwardBatch) -> torch.Tensor:
        self.count += 1
        x = self.package.add(F.embedding(batch.token_ids, _TABLE), batch.positions)
        x.view(-1).mul_(2)  # in place, through a view
        self.between(x)
        return self.package.add(x, batch.seq_lens)

    def run(self, decodes: list[int], extends: tuple[tuple[int, int], ...] = (), **fields: Any) -> bool:
        """Run a step of random tokens, check its result, -> whether the pass itself was called."""
        rows, before = Rows.of(decodes, extends), self.count
        pages = lay_out(rows, 4, np.random.default_rng(0))
        batch = forward_batch(rows, pages, PlainKVCache(4, ()), "cpu")
        batch = replace(batch, token_ids=torch.randint(20, batch.token_ids.shape), **fields)
        with torch.inference_mode():
            got = self.forward(batch)
            wanted = (_TABLE[batch.token_ids] + batch.positions[:, None]) * 2
            if not extends:
                assert torch.equal(got, wanted + batch.seq_lens[:, None])
        return self.count > before


def test_replays() -> None:
    """The second step in a row of as many rows is recorded, and four numbers of rows are kept."""
    steps = Steps()
    assert [steps.run([length]) for length in (3, 4, 5, 9)] == [True, True, False, False]
    assert steps.lengths == [[5], [9]]
    assert [steps.run([7, 2]) for _ in range(3)] == [True, True, False]
    assert not steps.run([3]), "recordings of other numbers of rows are kept"
    for rows in (3, 4, 5):
        assert [steps.run([2] * rows) for _ in range(3)] == [True, True, False]
    assert not steps.run([3])
    assert steps.run([7, 2]), "the recording that was unused for longest is dropped"


def test_other_steps_are_computed() -> None:
    steps = Steps()
    for _ in range(3):
        assert steps.run([3] * 9), "more rows"
    for _ in range(3):
        assert steps.run([3], extends=((0, 1),)), "a prompt"
    for _ in range(3):
        assert steps.run([3], extensions={SelectedTokens: SelectedTokens(torch.tensor([0]))})


@pytest.mark.parametrize("between", [lambda x: x.sum().item(), lambda x: [x + 1 for _ in range(9)]])
def test_steps_that_are_not_recorded(between: Callable[[torch.Tensor], Any]) -> None:
    """Values that reach the host, and many operators of PyTorch."""
    steps = Steps(between)
    assert [steps.run([length]) for length in (3, 4, 5, 6)] == [True] * 4
    assert steps.package.calls is None


def test_errors_end_the_recording() -> None:
    steps = Steps()
    steps.run([3])
    steps.between = lambda x: x.view(-1, 7)
    with pytest.raises(RuntimeError, match="shape"):
        steps.run([3])
    steps.between = lambda x: None
    assert [steps.run([3]) for _ in range(2)] == [True, False]


def test_which_models_are_recorded() -> None:
    def plain(batch: ForwardBatch) -> torch.Tensor:
        return batch.token_ids

    kernel: Any = SimpleNamespace(kernel=SimpleNamespace(row_operations=Package()))
    runner: Any = SimpleNamespace()
    graphs: Any
    for graphs, kernels, moe_runner, is_recorded in (
        ("decode", (kernel,), None, True),
        ("none", (kernel,), None, False),
        ("decode", (), None, False),
        ("decode", (kernel,), runner, False),  # experts are chosen on the host
    ):
        attention: Any = SimpleNamespace(capabilities=AttentionCapabilities(devices=("cpu",), graphs=graphs))
        context = build_context("cpu", torch.bfloat16, 16, attention=attention, gemm_kernels=kernels, moe_runner=moe_runner)
        assert isinstance(record_decodes(plain, context), RecordedForward) == is_recorded
