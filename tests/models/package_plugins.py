"""Makes the plugins of a package known to the tests of models, whether it is installed or not."""

from __future__ import annotations

from types import ModuleType

import pytest

from frame.plugins.loader import load_registry
from tests.models import harness


def use_package(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *kinds: str) -> None:
    """Register the weight sources and weight formats of a package's manifest for `open_session`."""
    registry = load_registry(installed=False)
    for kind in kinds:
        part = registry.kind(kind, module.__name__)
        getattr(module, f"register_{kind}s")(part)
        registry.commit(part)
    monkeypatch.setattr(harness, "load_own_plugins", lambda: registry)
