"""Launchers: the in-tree one, the choice, and one of another package that serves over TCP."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.config.resolve import ResolveError
from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.interfaces.launcher import LauncherCapabilities, LauncherContext, LauncherRequirements
from frame.plugins.loader import load_registry
from frame.testing import conformance
from frame.testing.conformance import run_suite
from frame.testing.ranks.launcher import suite
from tests.plugins import fake_launcher
from tests.plugins.packages import check_package_serves


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "rendezvous"])
def test_the_launcher_passes_the_suite(name: str) -> None:
    subject = conformance.find(load_registry(installed=False), f"launcher:{name}", conformance.Setting())
    found = run_suite(subject)
    assert [each.check for each in found] == [check.name for check in suite(subject)]
    assert [each for each in found if each.result != "passed"] == []


def test_local_ranks_have_the_device_of_their_number_and_meet_in_a_file(tmp_path: Path) -> None:
    registry = load_registry(installed=False)
    launcher = registry.load(registry.get("launcher", "local"))(LauncherContext(3, tmp_path))
    placement = launcher.place()
    assert [(place.rank, place.host, place.local_index) for place in placement.ranks] == [(rank, "127.0.0.1", rank) for rank in range(3)]
    assert placement.rendezvous == f"file://{tmp_path / 'ranks'}"


def test_records_refuse_more_ranks_and_hosts_than_they_can_start() -> None:
    can = LauncherCapabilities(max_size=2)
    assert can.unsupported(LauncherRequirements(2)) == []
    found = [str(reason) for reason in can.unsupported(LauncherRequirements(4, num_hosts=2))]
    assert found == ["starts at most 2 rank(s), not 4 (try parallel.tp: 2)", "starts ranks on this host only, not on 2"]
    with pytest.raises(ResolveError, match="parallel.launcher names an unknown launcher 'slurm'"):
        raise_for("slurm")


def raise_for(name: str) -> None:
    from frame.checkpoint.model_config import EMBEDDED, read_model_config
    from frame.config.hardware import Hardware
    from frame.config.resolve import resolve

    config = FrameConfig.model_validate({"parallel": {"launcher": name}})
    resolve(config, Hardware(2, 8 << 30), read_model_config(EMBEDDED), load_registry(installed=False).all_records())


@pytest.mark.slow
def test_a_launcher_of_another_package_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_package_serves(tmp_path, monkeypatch, "launcher", "reversed", fake_launcher.__name__, "local")


def test_the_choice_is_local() -> None:
    resolved = prepare(FrameConfig.model_validate({"execution": {"device": "cpu"}})).resolved
    assert resolved.choice("launcher").name == "local"
    assert "best-ranked" in resolved.reasons["parallel.launcher"]
