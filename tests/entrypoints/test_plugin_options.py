"""Options reach the constructor of every kind of plugin: a fake one of each kind says what it was
constructed with."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from frame.config.schema import FrameConfig
from frame.core.interfaces.platform import PlatformCapabilities
from frame.entrypoints.configuration import prepare as preparing
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.http.server import load_parsers, load_stat_loggers
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.entrypoints.processes.grammar_process import load_backend
from frame.interfaces.kinds import KINDS
from frame.interfaces.launcher import LauncherContext
from frame.plugins.loader import load_registry
from frame.plugins.registry import Registry
from frame.testing.checkpoints import make_checkpoint
from tests.plugins.faulty import OUR_PLUGINS as BASES

MODULE = "frame_test_options_module"
CONFIG: dict[str, Any] = {
    "log": {"stat_loggers": ["fake"]},
    "model": {"dtype": "float32", "implementation": "fake", "quantization": "fake", "load_format": "fake"},
    "attention": {"backend": "fake"},
    "moe": {"runner": "fake", "dispatcher": "fake"},
    "parallel": {"collective": "fake", "launcher": "fake"},
    "scheduler": {"policy": "fake", "max_running_requests": 4, "chunked_prefill_size": 64},
    "cache": {"prefix": "fake", "eviction": "fake", "allocator": "fake", "max_total_tokens": 256},
    "sampling": {"processors": ["fake"], "sampler": "fake", "grammar": "fake"},
    "text": {"reasoning_parser": "fake", "tool_call_parser": "fake"},
    "execution": {"device": "fake", "threads": 1},
    "speculative": {"algorithm": "fake"},
    "adapters": {"enabled": True, "format": "fake", "max_rank": 8, "max_active": 1},
}


class Options(BaseModel):
    """The fakes' own settings."""

    value: int = 0


def fake_of(base: type, kind: str, seen: dict[str, int]) -> type:
    class Fake(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            *others, options = arguments
            assert isinstance(options, Options), f"the last argument of a {kind} is {options!r}"
            seen[kind] = options.value
            super().__init__(*others)

    return Fake


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """By kind, what its fake was constructed with. The fakes are plugins like any other."""
    found: dict[str, int] = {}
    module = types.ModuleType(MODULE)

    def read(config: FrameConfig, classes: Sequence[type] = (), assumed: frozenset[str] = frozenset()) -> Registry:
        registry = load_registry(installed=False)
        for kind, base in BASES.items():
            record = registry.get(kind, base)
            setattr(module, kind, fake_of(registry.load(record), kind, found))
            part = registry.kind(kind, "fakes", "1.0")
            can = PlatformCapabilities(compatible=("cpu",)) if kind == "platform" else record.capabilities
            part.add("fake", f"{MODULE}:{kind}", capabilities=can, options=Options)
            registry.commit(part)
        return registry

    monkeypatch.setattr(preparing, "load_configured", read)
    monkeypatch.setitem(sys.modules, MODULE, module)
    yield found


def test_options_reach_the_constructor_of_every_kind(seen: dict[str, int], tmp_path: Path) -> None:
    others = {"http_extension", "cli_command", "key_store", "kv_tier", "modality", "pooler", "routing_policy"}
    others |= {"tracer", "weight_transfer"}  # which others construct
    assert set(BASES) == set(KINDS) - others
    values = {kind: number for number, kind in enumerate(BASES, 1)}
    options = {f"{kind}/fake": {"value": value} for kind, value in values.items()}
    folder = make_checkpoint("MixtralForCausalLM", tmp_path)
    config = {**CONFIG, "model": {**CONFIG["model"], "path": str(folder)}, "plugins": {"options": options}}
    prepared = prepare(FrameConfig.model_validate(config))
    resolved, registry = prepared.resolved, prepared.registry
    build_rank(resolved, registry).close()
    registry.create(resolved.choice("launcher"), LauncherContext(1, tmp_path)).close()
    build_scheduler(resolved, registry, 17).close()
    load_backend(resolved, registry)
    for parser in load_parsers(resolved, registry).values():
        parser()
    load_stat_loggers(resolved, registry, SimpleNamespace(client=None, metrics=None, history=None))
    assert seen == values
