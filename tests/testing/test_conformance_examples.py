"""Classes state what they do in examples, and the suites compare them: an example that the class
does not keep fails its check, and one that it keeps passes."""

from __future__ import annotations

from typing import Any

import pytest

from frame.interfaces.http import HttpRequest
from frame.testing import conformance
from frame.testing.serving import http_examples
from tests.plugins.http_extension_example import Budget
from tests.testing.generated import find_subject
from tests.testing.measure_held_out import make_subject

OTHER = HttpRequest("POST", "/v1/completions", "none", {"x-max-tokens": "513"}, "id")
DFS = (({"pages": (1,)}, {"pages": (2, 3)}, {"pages": (2,)}), (0, 1, 2))  # the larger group is not first


def find_failed(subject: conformance.Subject, only: str = "") -> dict[str, str]:
    """Checks that fail, and their sentences."""
    return {outcome.check: outcome.message for outcome in conformance.run_suite(subject, only=only) if outcome.result == "failed"}


def test_an_extension_that_keeps_its_examples_passes() -> None:
    assert find_failed(make_subject("http_extension", Budget)) == {}


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"conformance_requests": (OTHER,)}, http_examples.check_accepts_requests),
        ({"conformance_refusals": ((OTHER, 402),)}, http_examples.check_refuses_requests),
        ({"conformance_bodies": {"/budget/limit": 511}}, http_examples.check_states_what_it_recorded),
    ],
)
def test_examples_of_extensions_are_compared(changes: dict[str, Any], check: Any) -> None:
    name = check.__name__.removeprefix("check_")
    assert find_failed(make_subject("http_extension", type("Changed", (Budget,), changes)), only=name).keys() == {name}


@pytest.mark.parametrize(
    ("kind", "member", "changes", "check"),
    [
        ("cli_command", "reference", {"conformance_outputs": (((), "frame: hello\n"),)}, "prints_what_it_states"),
        ("scheduling_policy", "dfs-weight", {"conformance_orders": (DFS,)}, "orders_as_it_states"),
        ("reasoning_parser", "gpt-oss", {"conformance_replies": (("", "one", "one", ""),)}, "reads_as_it_states"),
    ],
)
def test_examples_of_other_kinds_are_compared(kind: str, member: str, changes: dict[str, Any], check: str) -> None:
    subject = find_subject(kind, member)
    assert find_failed(subject, only=check) == {}
    changed = conformance.Subject(subject.record, type("Changed", (subject.target,), changes), subject.options, subject.setting)
    assert find_failed(changed, only=check).keys() == {check}


def test_errors_of_key_stores_are_compared() -> None:
    subject = find_subject("key_store", "file")

    class Changed(subject.target):  # type: ignore[name-defined,misc]
        @staticmethod
        def list_broken_conformance_stores(folder: Any) -> Any:
            for context, options, _ in subject.target.list_broken_conformance_stores(folder):  # type: ignore[attr-defined]
                yield context, options, "line 99"

    changed = conformance.Subject(subject.record, Changed, subject.options, subject.setting)
    assert find_failed(subject, only="broken_places_are_refused") == {}
    assert find_failed(changed, only="broken_places_are_refused").keys() == {"broken_places_are_refused"}
