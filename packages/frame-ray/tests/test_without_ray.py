"""The launcher `ray` where Ray is not installed."""

from __future__ import annotations

import frame_ray
import pytest

from frame.host.installation import install_command
from frame.plugins.loader import load_registry
from tests.metadata import hide_distribution


def test_the_record_names_the_command_that_installs_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_distribution(monkeypatch, "ray")
    part = load_registry(installed=False).kind("launcher", "frame_ray")
    frame_ray.register_launchers(part)
    (record,) = part.added
    (problem,) = record.problems
    assert str(problem) == f"it needs ray>=2.50, which is not installed ({install_command('ray>=2.50')})"
