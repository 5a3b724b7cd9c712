"""Prometheus' own parser reads `/metrics`."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.clients.conftest import KEY, MODEL


def test_metrics_are_read(url: str) -> None:
    head = {"Authorization": f"Bearer {KEY}"}
    ask = {"model": MODEL, "prompt": "import", "max_tokens": 4}
    httpx.post(url + "/v1/completions", json=ask, headers=head, trust_env=False, timeout=60).raise_for_status()
    text = httpx.get(url + "/metrics", headers=head, trust_env=False).raise_for_status().text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families
    assert all(family.documentation and family.type != "unknown" for family in families.values())
    samples = [sample for family in families.values() for sample in family.samples]
    assert max(sample.value for sample in samples if sample.name.endswith("generation_tokens_total")) >= 4
