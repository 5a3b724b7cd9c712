"""The launcher `ray` where Ray is not installed."""

from __future__ import annotations

import importlib.metadata

import frame_ray
import pytest

from frame.host.installation import install_command
from frame.plugins.loader import load_registry


def test_the_record_names_the_command_that_installs_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.version

    def version(name: str) -> str:
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    part = load_registry(installed=False).kind("launcher", "frame_ray")
    frame_ray.register_launchers(part)
    (record,) = part.added
    (problem,) = record.problems
    assert str(problem) == f"it needs ray>=2.50, which is not installed ({install_command('ray>=2.50')})"
