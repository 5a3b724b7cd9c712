"""The rules that property tests of a `SchedulerRig` share."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from frame.testing.scheduler_rig import SchedulerRig


class RigMachine(RuleBasedStateMachine):
    """A subclass makes `rig` and adds requests. At the end the rig is run until it is idle."""

    rig: SchedulerRig

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.rig.abort(data.draw(st.sampled_from(sorted(self.rig.requests))))
        self.rig.scheduler.check_integrity()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            self.rig.now += 0.5

    @rule()
    def commit_early(self) -> None:
        self.rig.commit()
        self.rig.scheduler.check_integrity()

    @precondition(lambda self: len(self.rig.scheduler._running) > 1)
    @rule()
    def preempt(self) -> None:
        planner = self.rig.scheduler._planner
        planner.preempt(planner._running.requests[-1])

    @rule()
    def flush_cache(self) -> None:
        self.rig.scheduler.flush_cache()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.run(max_steps=3000)
