"""Kept responses: by tenant, and never more than the bounds."""

from __future__ import annotations

import pytest

from frame.entrypoints.http import response_store
from frame.entrypoints.http.response_store import OVERHEAD, ResponseStore


def test_another_tenant_sees_nothing() -> None:
    store = ResponseStore(4, 10_000, 60.0)
    store.put("a", "one", b"{}", b"[]")
    assert store.get("a", "two") is None
    assert not store.delete("a", "two")
    assert store.get("a", "one") is not None
    assert store.delete("a", "one")
    assert (len(store), store.num_bytes) == (0, 0)


def test_bounds_of_number_and_bytes() -> None:
    store = ResponseStore(3, 3 * (OVERHEAD + 100), 60.0)
    for number in range(20):
        store.put(str(number), "", b"x" * 98, b"[]")
    assert [name for name in map(str, range(20)) if store.get(name, "")] == ["17", "18", "19"]
    store.put("large", "", b"x" * 250, b"[]")
    assert (len(store), store.get("18", ""), store.get("large", "") is None) == (2, None, False)
    store.put("too large", "", b"x" * 10_000, b"[]")
    assert store.get("too large", "") is None
    store.put("large", "", b"x", b"[]")  # in its own place
    assert store.num_bytes == 2 * OVERHEAD + 100 + 3


def test_age(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(response_store.time, "monotonic", lambda: now[0])
    store = ResponseStore(4, 10_000, 60.0)
    store.put("a", "", b"{}", b"[]")
    now[0] = 30.0
    store.put("b", "", b"{}", b"[]")
    now[0] = 61.0
    assert store.get("a", "") is None
    assert store.get("b", "") is not None
    assert len(store) == 1


def test_off() -> None:
    store = ResponseStore()
    store.put("a", "", b"{}", b"[]")
    assert (store.is_on, len(store)) == (False, 0)
