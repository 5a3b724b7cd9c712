"""The suites fail plugins that were written without knowledge of them; the recorded results, which
the documents show, are current.

`python -m tests.testing.test_third_party [KIND ...]` records the results again. `make soak` runs
all of them; the others run bugs of other projects that users have met.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from frame.testing.conformance import run_suite
from tests.testing.mutants import Mutant, kill_table
from tests.testing.small_sizes import use_small_sizes
from tests.testing.third_party import find_third_party, load_third_party

RESULTS = Path(__file__).with_name("third_party") / "results.json"
KNOWN = (  # repeats of real bugs
    ("adapter", "CachesByConfiguration"), ("collective", "SumsFourMillion"), ("eviction_policy", "LosesHits"),
    ("gemm_kernel", "CachesResults"), ("logits_processor", "ClearsItsNeighbour"), ("model", "WrongOnTwoRanks"),
    ("moe_runner", "TakesEightChoices"), ("prefix_cache", "CutsNamespaces"), ("tool_call_parser", "SplitsTheCallAgain"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some of them leave files there


def recorded() -> dict[str, dict[str, dict[str, str]]]:
    """The results that the documents show, by kind."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(RESULTS.read_text())
    return found


def require_killed(mutant: Mutant) -> None:
    check = recorded()[mutant.kind][mutant.name]["killed_by"]
    assert check, f"{mutant.name} survives"
    outcomes = run_suite(mutant.subject(), only=check)
    assert [outcome.result for outcome in outcomes] == ["failed"], f"record again: {outcomes}"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), KNOWN)
def test_a_bug_of_another_project_is_found(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_sizes(monkeypatch)
    require_killed(find_third_party(kind, name))


@pytest.mark.soak
@pytest.mark.parametrize("kind", sorted(recorded()))
def test_recorded_checks_fail(kind: str) -> None:
    for mutant in load_third_party()[kind]:
        if not mutant.survives:
            require_killed(mutant)


def test_results_are_those_of_the_mutants() -> None:
    lists, found = load_third_party(), recorded()
    for kind, results in found.items():
        mutants = list(lists[kind])
        assert list(results) == [mutant.name for mutant in mutants], f"run `python -m tests.testing.test_third_party {kind}`"
        assert [result["sentence"] for result in results.values()] == [mutant.sentence for mutant in mutants]
        assert all(len(mutant.sentence) > 20 for mutant in mutants)
        left = [mutant.name for mutant in mutants if not results[mutant.name]["killed_by"]]
        assert left == [mutant.name for mutant in mutants if mutant.survives], (
            f"{kind}: say what harm is done by those that survive: {left}"
        )


if __name__ == "__main__":
    lists = load_third_party()
    os.chdir(tempfile.mkdtemp(prefix="frame-third-party-"))  # where some of them leave files
    for name in sys.argv[1:] or sorted(lists):
        started = time.perf_counter()
        table = kill_table(lists[name])
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        RESULTS.write_text(json.dumps(dict(sorted({**known, name: table}.items())), indent=2) + "\n")
        survivors = [mutant for mutant, result in table.items() if not result["killed_by"]]
        seconds = time.perf_counter() - started
        print(
            f"{name}: {len(table) - len(survivors)} of {len(table)} killed, in {seconds:.0f} s; survive: {', '.join(survivors)}", flush=True
        )
