"""The roster says who is on the device, to a process that did not write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.inflight_file import ROSTER, mark_of, open_roster, read_roster
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.plugins.loader import load_registry
from frame.testing.scheduler_rig import SchedulerRig


def test_marks() -> None:
    assert mark_of("a") == mark_of("a") != mark_of("b")
    assert mark_of("half \ud800 a pair")  # rids are clients' strings


def test_it_is_read_from_the_file(tmp_path: Path) -> None:
    assert read_roster(tmp_path / ROSTER) == {}
    roster = open_roster(tmp_path / ROSTER, 3)
    assert read_roster(tmp_path / ROSTER) == {}
    roster[:, 1], roster[0, 2] = (mark_of("a"), 512), mark_of("b")
    assert read_roster(tmp_path / ROSTER) == {mark_of("a"): 512, mark_of("b"): 0}
    with pytest.raises(OSError, match="none"):
        open_roster(tmp_path / "none" / ROSTER, 3)


def test_a_scheduler_keeps_it(tmp_path: Path) -> None:
    registry = load_registry(installed=False)
    config = SchedulerConfig(page_size=4, num_pages=40, max_running=2, token_budget=16, max_context=64, vocab_size=50)
    rig = SchedulerRig(config, registry.load(registry.get("scheduling_policy", "fcfs"))())
    rig.scheduler.publish_roster(tmp_path / ROSTER)
    rids = [rig.add([5, 6, 7], SamplingParams(max_tokens=3, temperature=0.0)) for _ in range(3)]
    rig.step()
    assert read_roster(tmp_path / ROSTER) == dict.fromkeys(map(mark_of, rids[:2]), 3)
    rig.run()
    assert read_roster(tmp_path / ROSTER) == {}
    rig.scheduler.publish_roster(tmp_path / "none" / ROSTER)  # is not worth ending for
