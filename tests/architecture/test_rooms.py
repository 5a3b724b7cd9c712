"""The rooms of frame, of its core and of its entry points form an order without cycles.

A room imports only rooms that stand before it in `ORDER`; docs/architecture.md shows the same list.
"""

from __future__ import annotations

import re

import pytest

from tests.architecture.rooms import describe, find_cycles, find_edges, find_rooms
from tests.architecture.source import ROOT, Module, module, package

ORDER: dict[str, tuple[str, ...]] = {
    "frame": (
        "core", "interfaces", "forward", "kv_events", "fair_queue", "latency_budget", "host", "kernels", "checkpoint", "config",
        "text", "parallel",
        "speculation", "structured_output",
        "pooling", "adapters", "media", "kv_tiers", "loading", "diagnostics", "registration", "models", "attention_backends",
        "quantization", "plugins", "entrypoints", "testing", "lang", "rl", "__main__",
    ),
    "frame.core": (
        "errors", "garbage_collection", "interfaces", "messages", "blame", "ipc", "kv_cache", "sampling", "scheduling",
        "execution", "engine",
    ),
    "frame.entrypoints": (
        "version", "keys", "logs", "tls", "origin", "moderation", "relevance", "audio_process", "engine_client", "tracing", "hub",
        "configuration", "processes", "audio", "word_times", "media", "speech", "offline", "handoff", "http", "grpc", "router", "tools",
        "cli",
    ),
}  # fmt: skip


def problems(modules: tuple[Module, ...], folder: str, order: tuple[str, ...]) -> list[str]:
    """Cycles and imports against the order, with the imports that make them."""
    edges = find_edges(modules, folder)
    found = [f"cycle: {describe(cycle, edges)}" for cycle in find_cycles(edges)]
    place = {room: number for number, room in enumerate(order)}
    for (room, other), uses in edges.items():
        if not found and place.get(room, -1) < place.get(other, -1):
            found.append("\n".join([f"{room} stands before {other}, but imports it", *(f"  {use}" for use in uses)]))
    return found


@pytest.mark.parametrize("folder", ORDER)
def test_rooms_form_an_order(folder: str) -> None:
    found = problems(package(), folder, ORDER[folder])
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("folder", ORDER)
def test_every_room_is_listed(folder: str) -> None:
    assert set(ORDER[folder]) == find_rooms(package(), folder)
    assert len(set(ORDER[folder])) == len(ORDER[folder])


def test_the_documents_show_the_order() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    shown = dict(re.findall(r"^(frame[a-z/]*/) +((?:\w+\s+<\s+)+\w+)$", text, re.MULTILINE))
    assert {folder: tuple(re.split(r"\s+<\s+", row)) for folder, row in shown.items()} == {
        folder.replace(".", "/") + "/": order for folder, order in ORDER.items()
    }


def test_the_tree_of_the_documents_names_every_room() -> None:
    tree = (ROOT / "docs/architecture.md").read_text().partition("```text\n")[2].partition("```")[0]
    for folder, order in ORDER.items():
        named = set(re.findall(r"([\w]+)(?:/|\.py)", tree))
        assert set(order) - {"__main__"} <= named, folder


def test_checks_find() -> None:
    low = module("from frame.core.two import thing", "frame.core.one.deep")
    high = module("def f():\n    from frame.core.one import deep", "frame.core.two")
    types = module("if TYPE_CHECKING:\n    from frame.core.two import thing", "frame.core.one.deep")
    order = ("one", "two")
    for each in (low, types):
        (text,) = problems((each, high), "frame.core", order)
        assert text.startswith("cycle: one -> two -> one\n  one -> two  frame/core/one/deep.py:")
        assert "two -> one  frame/core/two.py:2: frame.core.one.deep" in text
    (text,) = problems((low, module("", "frame.core.two")), "frame.core", order)
    assert text.startswith("one stands before two, but imports it\n  frame/core/one/deep.py:1")
    public = module("from frame import hookimpl", "frame.models.llama")
    assert ("models", "registration") in find_edges((public, module("", "frame.registration")), "frame")
