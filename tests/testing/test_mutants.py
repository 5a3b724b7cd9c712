"""Each suite passes the reference of its kind and fails its mutants; the recorded results, which
the documents show, are current. The check that killed a mutant is the one that runs here.

`python -m tests.testing.test_mutants [KIND ...]` records the results again.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frame.testing.conformance import run_suite
from frame.testing.ranks import launcher as conformance_launcher
from frame.testing.torch_calls import SETTINGS
from tests.testing.mutants import Mutant, kill_table, kinds, load_mutants
from tests.testing.small_sizes import use_small_sizes

RESULTS = Path(__file__).with_name("mutants")
MINIMUM = 10  # mutants of a kind
RATE = 0.95  # of them killed

COSTLY = {  # over two seconds each; in `make test`, a cheaper mutant is killed by the same check
    "cli_command-ImportsTorch",  # CountsAtTheStart
    "drafter-CountsPositionsFromTheChunk",  # MixesRows
    "kv_allocator-SetsVariables",  # KeepsARecord
    "modality-ShiftsFrames",  # ReversesFrames
    "routing_policy-CountsAnyBlock",  # a survivor, whose reason docs/reference/conformance.md has
    "routing_policy-RemembersAll",  # RemembersSessions
    "routing_policy-SortsAll",  # AsksAReplica
}


def mark_costly(mutant: Mutant) -> Any:
    name = f"{mutant.kind}-{mutant.name}"
    return pytest.param(mutant, marks=pytest.mark.exhaustive if name in COSTLY else (), id=name)


ALL = [mark_costly(mutant) for kind in kinds() for mutant in load_mutants(kind)]


def recorded(kind: str) -> dict[str, dict[str, str]]:
    """The results that the documents show."""
    path = RESULTS / f"{kind}.json"
    assert path.is_file(), f"run `python -m tests.testing.test_mutants {kind}`"
    found: dict[str, dict[str, str]] = json.loads(path.read_text())
    return found


@pytest.fixture
def process() -> Iterator[None]:
    """Sets back what mutants change in this process, which is what the suites find them by."""
    root, handlers = logging.getLogger(), {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    level, targets, folder, environment = root.level, list(root.handlers), Path.cwd(), dict(os.environ)
    of_torch = [(write, read()) for _, read, write, _ in SETTINGS[:-1]]  # all but the seed
    yield
    for write, value in of_torch:
        write(value)
    root.setLevel(level)
    root.handlers[:] = targets
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("process")
@pytest.mark.parametrize("mutant", ALL)
def test_mutant_is_killed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_launcher, "_PATIENCE", 3.0)  # a mutant that does not answer is waited for to the end
    use_small_sizes(monkeypatch)
    record = f"`python -m tests.testing.test_mutants {mutant.kind}`, then `make docs`"
    result = recorded(mutant.kind)[mutant.name]
    failed = [outcome for outcome in run_suite(mutant.subject(), only=result["killed_by"]) if outcome.result == "failed"]
    assert bool(failed) == bool(result["killed_by"]), f"the recorded check does not fail; run {record}: {failed}"
    assert bool(failed) != bool(mutant.survives), f"give the reason why no check fails, or none: {mutant.sentence}"
    assert (result["sentence"], result["survives"]) == (mutant.sentence, mutant.survives), f"run {record}"


@pytest.mark.slow
@pytest.mark.parametrize("is_small", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["small", "whole"])
@pytest.mark.parametrize("kind", kinds())
def test_reference_passes(kind: str, is_small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_small:
        use_small_sizes(monkeypatch)
    outcomes = run_suite(load_mutants(kind).reference.subject())
    assert outcomes
    assert [outcome for outcome in outcomes if outcome.result == "failed"] == []


@pytest.mark.parametrize("kind", kinds())
def test_kind_has_enough_mutants(kind: str) -> None:
    mutants = list(load_mutants(kind))
    assert list(recorded(kind)) == [mutant.name for mutant in mutants]
    assert all(mutant.kind == kind for mutant in mutants)
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= MINIMUM
    assert all(len(mutant.sentence) > 20 for mutant in mutants), "each docstring says what is wrong"
    assert sum(not mutant.survives for mutant in mutants) >= RATE * len(mutants)


if __name__ == "__main__":
    for name in sys.argv[1:] or kinds():
        (RESULTS / f"{name}.json").write_text(json.dumps(kill_table(load_mutants(name)), indent=2) + "\n")
