"""Rows of figures, from times that are known."""

from __future__ import annotations

from frame.entrypoints.tools.bench.summary import Objective, Timing, percentiles, row


def timing(due: float, events: list[float], tokens: int, error: str = "") -> Timing:
    return Timing(due, prompt_tokens=10, sent=due, events=events, tokens=tokens, error=error)


def test_rates_and_latencies() -> None:
    found = row([timing(0.0, [0.1, 0.2, 0.3], 3), timing(1.0, [1.3, 2.0], 2)])
    assert found["seconds"] == 2.0
    assert found["output_tokens_per_s"] == 2.5
    assert found["prompt_tokens_per_s"] == 10.0
    assert found["first_token_ms"]["mean"] == 200.0
    assert found["between_tokens_ms"]["mean"] == 400.0
    assert found["end_to_end_ms"]["p50"] == 650.0


def test_goodput_counts_what_keeps_to_the_objective() -> None:
    found = row([timing(0.0, [0.1, 0.2], 2), timing(0.0, [0.9, 1.0], 2)], Objective(first_token=500))
    assert (found["good"], found["goodput_per_s"]) == (1, 1.0)


def test_failures_are_counted_and_named() -> None:
    assert row([timing(0.0, [], 0, "503: full")]) == {"requests": 1, "failed": 1, "errors": ["503: full"]}
    assert row([timing(0.0, [], 0, "503: full"), timing(0.0, [1.0], 1)])["failed"] == 1


def test_percentiles_of_nothing() -> None:
    assert percentiles([]) == {}
