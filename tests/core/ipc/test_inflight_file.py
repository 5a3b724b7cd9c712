"""An in-flight file shows the requests on the device to another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.inflight_file import INFLIGHT, hash_request, open_inflight, read_inflight
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.plugins.loader import load_registry
from frame.testing.contexts import SCHEDULING
from frame.testing.scheduler_rig import SchedulerRig


def test_request_hashes() -> None:
    assert hash_request("a") == hash_request("a") != hash_request("b")
    assert hash_request("half \ud800 a pair")  # rids are clients' strings


def test_another_reader_sees_the_writes(tmp_path: Path) -> None:
    assert read_inflight(tmp_path / INFLIGHT) == {}
    inflight = open_inflight(tmp_path / INFLIGHT, 3)
    assert read_inflight(tmp_path / INFLIGHT) == {}
    inflight[:, 1], inflight[0, 2] = (hash_request("a"), 512), hash_request("b")
    assert read_inflight(tmp_path / INFLIGHT) == {hash_request("a"): 512, hash_request("b"): 0}
    with pytest.raises(OSError, match="none"):
        open_inflight(tmp_path / "none" / INFLIGHT, 3)


def test_a_scheduler_writes_its_requests(tmp_path: Path) -> None:
    registry = load_registry(installed=False)
    config = SchedulerConfig(page_size=4, num_pages=40, max_running=2, token_budget=16, max_context=64, vocab_size=50)
    rig = SchedulerRig(config, registry.load(registry.get("scheduling_policy", "fcfs"))(SCHEDULING))
    rig.scheduler.publish_inflight(tmp_path / INFLIGHT)
    rids = [rig.add([5, 6, 7], SamplingParams(max_tokens=3, temperature=0.0)) for _ in range(3)]
    rig.step()
    assert read_inflight(tmp_path / INFLIGHT) == dict.fromkeys(map(hash_request, rids[:2]), 3)
    rig.run()
    assert read_inflight(tmp_path / INFLIGHT) == {}
    rig.scheduler.publish_inflight(tmp_path / "none" / INFLIGHT)  # a missing folder is logged only
