"""Device state by slot: a failed allocation keeps the rows of the other slots."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from frame.plugins.logits_processors.slot_state import Column, SlotState

COLUMNS = {"counts": Column(torch.int32, shape=(5,)), "ids": Column(torch.int64, -1, (0,)), "factor": Column(torch.float32, 1.0)}


def admit(state: SlotState, slot: int) -> None:
    state.admit(slot, {"counts": torch.full((5,), slot, dtype=torch.int32), "ids": torch.arange(slot), "factor": slot / 2})


def check(state: SlotState, slots: list[int]) -> None:
    rows = state.rows(torch.tensor(slots, dtype=torch.int64))
    assert len(set(rows.tolist())) == len(slots)
    for slot, row in zip(slots, rows.tolist(), strict=True):
        assert row < state.capacity
        assert state["counts"][row].tolist() == [slot] * 5
        assert [i for i in state["ids"][row].tolist() if i >= 0] == list(range(slot))
        assert float(state["factor"][row]) == slot / 2


def test_an_allocation_that_fails_leaves_the_others_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each allocation of each admission fails once."""
    fill = SlotState._filled
    failures = 0
    for fails_at in range(30):
        state, calls, admitted = SlotState(16, torch.device("cpu"), COLUMNS), count(), []

        def allocate(self: SlotState, column: Column, shape: tuple[int, ...], calls=calls, fails_at=fails_at) -> torch.Tensor:  # type: ignore[no-untyped-def]
            if next(calls) == fails_at:
                raise torch.OutOfMemoryError("no memory is left")
            return fill(self, column, shape)

        monkeypatch.setattr(SlotState, "_filled", allocate)
        for slot in range(1, 10):
            try:
                admit(state, slot)
                admitted.append(slot)
            except torch.OutOfMemoryError:
                failures += 1
            if admitted:
                check(state, admitted)
        for slot in admitted:
            state.release(slot)
        assert state.capacity == 0
    assert failures > 10
