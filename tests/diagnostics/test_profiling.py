"""Profiles: bounded, refused in a sentence, and one trace of each rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.platform import HOST
from frame.core.interfaces.runner import ModelRunner, ProfileError, ProfileRequest
from frame.diagnostics.profiling import ProfiledRunner
from frame.entrypoints.offline.engine import Engine, EngineError
from frame.testing.checkpoints import make_checkpoint

BATCH = ScheduledBatch(
    step=7, num_decodes=1, slots=np.arange(2), num_computed=np.array([5, 0]), num_scheduled=np.array([1, 4]), token_ids=np.arange(4),
    samples=np.ones(2, bool), new_pages=np.empty((0, 3), np.int32),
)  # fmt: skip


class Nothing(ModelRunner):
    def launch(self, batch: Any) -> Any:
        return batch

    def close(self) -> None:
        return


def test_recording_ends_by_itself(tmp_path: Path) -> None:
    runner: Any = ProfiledRunner(Nothing(), tmp_path / "new", 3, HOST.profiler_activities)
    path = Path(runner.profile(ProfileRequest(num_steps=2, name="a")))
    assert path.name == "a-rank3.json.gz"
    for _ in range(2):
        runner.launch(BATCH)
    assert not path.exists()
    runner.launch(BATCH)
    assert path.exists()
    assert runner.profile(None) == str(path)
    runner.profile(ProfileRequest(name="b"))
    runner.close()
    assert (tmp_path / "new" / "b-rank3.json.gz").exists()


def test_refusals_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="--profile-dir"):
        Nothing().profile(ProfileRequest())
    runner = ProfiledRunner(Nothing(), tmp_path, 0, HOST.profiler_activities)
    with pytest.raises(ProfileError, match="nothing was recorded"):
        runner.profile(None)
    for request in (ProfileRequest(name="../x"), ProfileRequest(num_steps=0), ProfileRequest(num_steps=10**6)):
        with pytest.raises(ProfileError):
            runner.profile(request)
    runner.profile(ProfileRequest())
    with pytest.raises(ProfileError, match="stop it first"):
        runner.profile(ProfileRequest())
    runner.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be made"):
        ProfiledRunner(Nothing(), tmp_path / "file" / "x", 0, HOST.profiler_activities).profile(ProfileRequest())


@pytest.mark.slow
def test_every_rank_writes_a_trace(tmp_path: Path) -> None:
    model = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    with Engine(model=str(model), tp=2, max_total_tokens=256, profile_dir=str(tmp_path / "traces")) as engine:
        path = Path(engine.control("start_profile", name="run", num_steps=50)["path"])
        engine.generate([5, 6, 7], {"max_tokens": 4, "ignore_eos": True})
        with pytest.raises(EngineError, match="stop it first"):
            engine.control("start_profile", name="other")
        assert engine.control("stop_profile")["path"] == str(path)
        engine.generate([5, 6, 7], {"max_tokens": 4})
    traces = sorted((tmp_path / "traces").iterdir())
    assert [trace.name for trace in traces] == ["run-rank0.json.gz", "run-rank1.json.gz"]
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert any(event.get("name") == "aten::embedding" for event in events)
