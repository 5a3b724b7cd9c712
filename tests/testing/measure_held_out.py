"""How many wrong plugins of the set `held_out` the suites find. Their authors had not seen the
suites, and the suites not their plugins.

    python -m tests.testing.measure_held_out stat_logger tracer --column after

runs the suite of each kind on the right plugins first (`TWIN`, or those of `TWINS`), then on each
wrong one the checks that the right one which it derives from passes, the fastest first, up to the
first that fails. A wrong plugin whose harm begins with "equivalent" breaks nothing that the
interface promises; it is counted apart. It writes the results of a kind to
`held_out/results.json`, which the documents show. `--column before` are the suites at the
commit before the set was looked at; `after` are those of today.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from frame.core.interfaces.plugin import Anything, PluginRecord
from frame.interfaces.kinds import KINDS
from frame.testing import conformance
from tests.testing.generated import call_apart

FOLDER = Path(__file__).with_name("held_out")
RESULTS = FOLDER / "results.json"
LIMIT, FACTOR = 15.0, 4.0  # seconds of CPU time of a plugin; and as a multiple of that of the right one


def make_subject(kind: str, plugin: type) -> conformance.Subject:
    record = PluginRecord(kind, plugin.__name__, f"mutants:{plugin.__name__}", KINDS[kind].api, getattr(plugin, "capabilities", Anything()))
    return conformance.Subject(record, plugin, None, conformance.Setting())


def time_checks(subject: conformance.Subject) -> list[tuple[float, str, str, str]]:
    """(seconds of CPU time, check, result, message) of each check."""
    found = []
    for check in conformance.checks(subject.record.kind, subject):
        began = time.process_time()
        outcome = conformance.run_check(check)
        found.append((time.process_time() - began, *outcome))
    return found


def find_failure(subject: conformance.Subject, names: Sequence[str], all_names: Sequence[str]) -> str:
    """The first of some checks that fails; "": none does. `all_names`: those of the right plugin,
    which may state less than a wrong one does."""
    try:
        checks = {check.name: check for check in conformance.checks(subject.record.kind, subject)}
    except Exception:
        return "suite"
    for name in [*names, *(name for name in checks if name not in all_names)]:
        if name in checks:
            try:
                checks[name].run()
            except conformance.SkipCheck:
                continue
            except Exception:
                return name
    return ""


def run_kind(kind: str, known: Mapping[str, str] | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """The checks that the right plugin fails, with what they say; and the check that kills each
    wrong one. `known`: earlier results, of which only the survivors run again."""
    module: Any = importlib.import_module(f"tests.testing.held_out.{kind}")
    alarms: dict[str, str] = {}
    timings: dict[type, list[tuple[float, str, str, str]]] = {}
    killed: dict[str, str] = {}
    for twin in getattr(module, "TWINS", (module.TWIN,)):
        timed = call_apart(functools.partial(time_checks, make_subject(kind, twin)), 300.0)
        if not isinstance(timed, list):
            return {"all": str(timed)}, dict.fromkeys(module.WRONG, "")
        alarms |= {name: message[:200] for _, name, result, message in timed if result == "failed"}
        timings[twin] = timed
    for name, (plugin, _) in module.WRONG.items():
        if known is not None and known[name]:
            killed[name] = known[name]
            continue
        timed = timings[next((base for base in plugin.__mro__ if base in timings), module.TWIN)]
        passed = sorted((seconds, check) for seconds, check, result, _ in timed if result == "passed")
        limit = max(LIMIT, FACTOR * sum(seconds for seconds, _ in passed))
        work = functools.partial(find_failure, make_subject(kind, plugin), [check for _, check in passed], [each[1] for each in timed])
        killed[name] = str(call_apart(work, limit))
    return alarms, killed


@click.command()
@click.argument("kinds", nargs=-1)
@click.option("--column", type=click.Choice(["before", "after"]), default="after")
@click.option("--survivors", is_flag=True, help="Run the recorded survivors of the column alone, after a check was added.")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS)
def main(kinds: tuple[str, ...], column: str, survivors: bool, results: Path) -> None:
    """Run the suites of KINDS (default: all) on the set."""
    for kind in kinds or sorted(file.stem for file in FOLDER.glob("[a-z]*.py")):
        alarms, killed = run_kind(kind, json.loads(results.read_text())[kind][column]["killed_by"] if survivors else None)
        with results.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            recorded = json.loads(results.read_text()) if results.is_file() else {}
            wrong = importlib.import_module(f"tests.testing.held_out.{kind}").WRONG
            recorded.setdefault(kind, {})[column] = {"alarms": alarms, "killed_by": killed}
            recorded[kind]["harm"] = {name: " ".join(harm.split()) for name, (_, harm) in wrong.items()}
            results.write_text(json.dumps(dict(sorted(recorded.items())), indent=2, ensure_ascii=False) + "\n")
        left = [name for name, check in killed.items() if not check]
        click.echo(f"{kind} {column}: {len(killed) - len(left)} of {len(killed)} killed; survive: {', '.join(left)}; alarms: {alarms}")


if __name__ == "__main__":
    main()
