"""Serving with a plugin and with a reference: equal tokens, and where wrong ones come from."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frame.core.errors import PluginError
from frame.core.interfaces.plugin import PluginRecord
from frame.entrypoints.configuration import prepare as preparing
from frame.plugins.loader import load_registry
from frame.plugins.registry import Registry
from frame.testing.compare import COMPARED, compare

MODULE = "compared_plugins"
NUM_TOKENS = 12
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
SETTINGS = {"model": {"load_format": "dummy", "dtype": "float32"}, "execution": {"device": "cpu", "threads": 1}}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    found = load_registry(installed=False)
    monkeypatch.setattr(preparing, "registry_of", lambda *_: found)
    monkeypatch.setitem(sys.modules, MODULE, types.ModuleType(MODULE))
    yield found


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return {"llama": tmp_path}


def add(registry: Registry, kind: str, base: str, **members: Any) -> PluginRecord:
    """Register the plugin `base` with other members."""
    right = registry.get(kind, base)
    setattr(sys.modules[MODULE], kind, type("Other", (registry.load(right),), {"__module__": MODULE, **members}))
    part = registry.kind(kind, "theirs", "1")
    part.add("other", f"{MODULE}:{kind}", capabilities=right.capabilities)
    registry.commit(part)
    return registry.get(kind, "other")


def test_equal_plugins_are_equal(registry: Registry, models: dict[str, Path]) -> None:
    other = add(registry, "attention_backend", "torch_native")
    (verdict,) = compare(other, registry.get("attention_backend", "torch_native"), models, SETTINGS, NUM_TOKENS)
    assert verdict.problem == verdict.skipped == ""
    assert min(verdict.milliseconds) > 0
    assert str(verdict).startswith("llama: equal; ")


def test_the_first_wrong_step_and_layer_are_named(registry: Registry, models: dict[str, Path]) -> None:
    reference = registry.get("attention_backend", "torch_native")
    base = registry.load(reference)

    def run(self: Any, spec: Any, q: Any, k: Any, v: Any, batch: Any) -> Any:
        out = base.run(self, spec, q, k, v, batch)  # type: ignore[attr-defined]
        return -out if spec.layer == 1 and batch.num_decodes and int(batch.host.seq_lens.max()) > 75 else out

    (verdict,) = compare(add(registry, "attention_backend", "torch_native", run=run), reference, models, SETTINGS, NUM_TOKENS)
    assert verdict.problem.startswith("differs: token ")
    assert "the first different hidden states are those of step " in verdict.problem
    assert ", layers.1, by " in verdict.problem


def test_a_policy_changes_no_token(registry: Registry, models: dict[str, Path]) -> None:
    policies = [registry.get("scheduling_policy", name) for name in ("lof", "fcfs")]
    (verdict,) = compare(policies[0], policies[1], models, SETTINGS, NUM_TOKENS)
    assert verdict.problem == ""


def test_a_model_that_a_plugin_cannot_serve_is_skipped(registry: Registry, models: dict[str, Path]) -> None:
    part = registry.kind("attention_backend", "theirs", "1")
    capabilities = registry.get("attention_backend", "triton").capabilities
    part.add("other", "nowhere:Backend", capabilities=capabilities)
    registry.commit(part)
    records = [registry.get("attention_backend", name) for name in ("other", "torch_native")]
    (verdict,) = compare(records[0], records[1], models, SETTINGS, NUM_TOKENS)
    assert str(verdict).startswith("llama: skipped: attention.backend: other cannot serve this model")


def test_other_kinds_are_refused(registry: Registry, models: dict[str, Path]) -> None:
    record = registry.get("tool_call_parser", "hermes")
    with pytest.raises(PluginError, match=f"--against compares {', '.join(COMPARED)}; check a tool_call_parser with --conformance"):
        list(compare(record, record, models, SETTINGS))
