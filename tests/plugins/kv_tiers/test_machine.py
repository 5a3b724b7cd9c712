"""Random calls of the in-tree tiers, compared with a dictionary after each."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from frame.testing.kv_tier.rig import PATIENCE, Rig, make_keys
from tests.plugins.kv_tiers.tier_rig import subject

KEYS = make_keys(24)
NUM_BLOCKS = 8
runs = st.tuples(st.integers(0, 20), st.integers(1, 4)).map(lambda one: KEYS[one[0] : one[0] + one[1]])


def wait_until(condition: Callable[[], bool]) -> None:
    """A run is the same again where no step depends on the speed of a thread."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


class TierMachine(RuleBasedStateMachine):
    """`holds` has the keys of committed blocks that the tier has held at the last look."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.rig = self.open()
        self.committed: set[bytes] = set()
        self.stores: dict[int, tuple[list[bytes], Any]] = {}
        self.loads: dict[int, tuple[list[bytes], Any]] = {}  # before poll has returned them
        self.read: dict[int, tuple[list[bytes], Any]] = {}  # with contents at that time

    def open(self) -> Rig:
        rig = Rig(subject(self.name), Path(self.folder.name) / "tier", NUM_BLOCKS, 256)
        wait_until(lambda: rig.tier._pool.num_free >= NUM_BLOCKS)  # type: ignore[attr-defined]
        return rig

    def wait_for_files(self) -> None:
        """Until evicted files are removed, without which a store may have no room."""
        wait_until(lambda: not getattr(self.rig.tier, "_removing", ()))

    @rule(keys=runs)
    def begin_store(self, keys: list[bytes]) -> None:
        job = self.rig.next_job()
        self.wait_for_files()
        buffers = self.rig.tier.store(job, keys)
        if buffers is None:
            return
        for key, buffer in zip(keys, buffers, strict=True):
            is_stored = any(key in other and held[other.index(key)] is not None for other, held in self.stores.values())
            if buffer is None:
                assert is_stored or self.rig.tier.match([key]), "there is no buffer for a block that is not held"
            else:
                assert not is_stored, "two jobs have buffers for one block"
                buffer.copy_(self.rig.make(key))
        self.stores[job] = (keys, buffers)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), commit=st.booleans())
    def end_store(self, data: st.DataObject, commit: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.stores)))
        keys, _ = self.stores.pop(job)
        self.rig.tier.finish(job, commit=commit)
        if commit:
            self.collect(job)
            self.committed.update(keys)

    @rule(keys=runs)
    def begin_load(self, keys: list[bytes]) -> None:
        job = self.rig.next_job()
        buffers = self.rig.tier.load(job, keys)
        if buffers is not None:
            self.loads[job] = (keys, buffers)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def abandon_load(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.loads)))
        del self.loads[job]
        tier: Any = self.rig.tier
        entry = tier._jobs[job]
        tier.finish(job)

        def is_released() -> bool:
            tier._collect_results()
            return entry.num_pending == 0

        wait_until(is_released)

    @rule()
    def poll(self) -> None:
        self.collect()

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.read)))
        del self.read[job]
        self.rig.tier.finish(job)

    @precondition(lambda self: not self.stores and not self.loads and not self.read)
    @rule()
    def restart(self) -> None:
        self.wait_for_files()
        held = {key for key in KEYS if self.rig.tier.match([key])}
        self.rig.tier.close()
        self.rig = self.open()
        if self.rig.is_persistent:
            self.rig.wait_until(lambda: {key for key in KEYS if self.rig.tier.match([key])} == held, "blocks are lost or come back")
        else:
            self.committed.clear()

    def collect(self, *jobs: int) -> None:
        for job, result in self.rig.wait_for([*jobs, *self.loads]).items():
            if job in self.loads:
                keys, buffers = self.loads.pop(job)
                self.rig.compare(keys, buffers, result)
                self.read[job] = (keys[: result.num_blocks], [*buffers])
            else:
                assert not result.error, result.error

    @invariant()
    def buffers_are_the_callers(self) -> None:
        for keys, buffers in (*self.read.values(), *self.stores.values()):
            for key, buffer in zip(keys, buffers, strict=False):
                assert buffer is None or torch.equal(buffer, self.rig.make(key))

    @invariant()
    def held_blocks_are_committed(self) -> None:
        held = {key for key in KEYS if self.rig.tier.match([key])}
        assert held <= self.committed
        assert len(held) <= NUM_BLOCKS

    def teardown(self) -> None:
        for job in self.stores:
            self.rig.tier.finish(job, commit=False)
        for job in (*self.loads, *self.read):
            self.rig.tier.finish(job)
        self.loads.clear()
        self.rig.store(KEYS[:NUM_BLOCKS])  # no room was lost
        self.rig.load_all(KEYS[:NUM_BLOCKS])
        self.rig.tier.close()
        self.folder.cleanup()


@pytest.mark.parametrize("name", ["host", "disk"])
def test_random_calls(name: str) -> None:
    machine = type("Machine", (TierMachine,), {"name": name})
    limits = settings(max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=limits)
