"""Settings explained: value, source, reason, hidden secrets; plugins as plain data."""

from __future__ import annotations

import json

from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.explain import as_data, as_yaml, explain, explain_all, value_of
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.configuration.sources import load_config


def test_each_setting_with_its_source_and_reason() -> None:
    loaded = load_config(None, {"page-size": "32", "api-key": "secret"}, environ={})
    resolved = prepare(loaded.config).resolved
    found = {each.key: each for each in explain_all(loaded, resolved)}
    assert (found["cache.page_size"].value, found["cache.page_size"].source) == ("32", "flag --page-size")
    assert found["server.api_key"].value == "***"
    backend = found["attention.backend"]
    assert (backend.value, backend.source) == ("torch_native", "default")
    assert backend.reason
    assert "triton" in backend.rejected
    assert found["plugins.options.grammar_backend/combined.max_depth"].value == "64"


def test_what_the_user_said_alone() -> None:
    loaded = load_config(None, {}, environ={})
    assert explain("cache.page_size", loaded, None).value == "null"
    assert value_of(FrameConfig(), "cache.eviction") == "lru"
    assert as_yaml(("a", "b")) == "[a, b]"


def test_records_are_plain_data() -> None:
    record = prepare(FrameConfig()).registry.get("attention_backend", "torch_native")
    data = json.loads(json.dumps(as_data(record)))
    assert (data["kind"], data["name"], data["problems"]) == ("attention_backend", "torch_native", [])
    assert data["capabilities"]
