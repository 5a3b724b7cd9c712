"""The page `docs/reference/conformance.md`, from the records of the kinds and the recorded results
of their suites. Used by `scripts/generate_docs.py`. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.markdown import NOTE, code, table


def conformance_page(root: Path) -> str:
    """Each kind's interface, scaffold, suite, killed mutants and example, and what each mutant does
    wrong."""
    from frame.interfaces.kinds import KINDS

    results = {name: json.loads(file.read_text()) for name in KINDS if (file := root / f"tests/testing/mutants/{name}.json").is_file()}
    third_party = json.loads((root / "tests/testing/third_party/results.json").read_text())
    generated = json.loads((root / "tests/testing/generated.json").read_text())
    held_out = json.loads((root / "tests/testing/held_out/results.json").read_text())
    parts = [
        "# Conformance",
        NOTE,
        ("This page is for plugin authors: what the kit has for each kind of plugin, and what its suites find. A mutant is a correct "
        "plugin with one deliberate bug, in `tests/testing/mutants/`. It is killed if a check of the suite fails. "
        "`python -m tests.testing.test_mutants KIND` runs the suites and records the results."),
        ("Three further sets measure the suites. Third-party mutants, in `tests/testing/third_party/`, were written from the interfaces "
        "alone, before the checks that kill them; `python -m tests.testing.test_third_party KIND` records them. Generated mutants are "
        "small changes of the source of an in-tree member, a sample by a seed. Two sorts are counted apart: equivalent ones, which no "
        "user can see, and those in code that runs elsewhere alone, on other hardware than the machine that made the table has. "
        "`python -m tests.testing.generated --seed N` makes others. Fresh ones are of another seed, and not of the former sample: "
        "none of them was seen when the checks were written, and `--fresh` makes them. The number after the arrow is of today, after "
        "checks were written for those that survived. Held-out plugins, in "
        "`tests/testing/held_out/`, were written by an author who had not seen the suites: the first number is of the suites as they "
        "were then, the second of those of today where they have run again. `python -m tests.testing.measure_held_out KIND` "
        "records them. `none`: nothing was written, or no run is recorded. "
        "[Those that survive](#survivors) are listed with the harm that they do."),
        table(
            ["kind", "interface", "scaffold", "suite", "mutants killed / written", "third-party", "generated", "fresh", "held-out",
             "example"],
            [[code(kind.name), *_kit(kind, results.get(kind.name), (third_party, generated, held_out), root)] for kind in KINDS.values()],
        ),
        "## Survivors",
        table(["kind", "mutant", "what is wrong", "harm"], [*_survivors(third_party, generated, held_out)]),
    ]  # fmt: skip
    for name, found in results.items():
        rows = [[code(mutant), result["sentence"], _verdict(result)] for mutant, result in found.items()]
        parts += [f"## {name}", table(["mutant", "what is wrong", "killed by"], rows)]
    return "\n\n".join(parts) + "\n"


def _survivors(third_party: Mapping[str, Any], generated: Mapping[str, Any], held_out: Mapping[str, Any]) -> Iterator[list[str]]:
    """The rows of mutants that no check kills."""
    for kind, mutants in third_party.items():
        for name, result in mutants.items():
            if not result["killed_by"]:
                yield [code(kind), code(name), result["sentence"], result["survives"]]
    for kind, found in generated.items():
        for what, made in (("generated", found), ("fresh,", found.get("fresh"))):
            for site, harm in (made or {"survivors": {}})["survivors"].items():
                yield [code(kind), f"{what} from {code(made['member'])}", site.replace("|", "\\|"), harm]
    for kind, columns in held_out.items():
        for name, check in columns.get("after", columns["before"])["killed_by"].items():
            if not check or columns["harm"][name].startswith("equivalent"):
                yield [code(kind), code(name), "a held-out plugin", columns["harm"][name]]


def _count_killed(kind: str, sets: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of third-party, generated and fresh mutants, and of held-out plugins."""
    mutants, made, columns = (each.get(kind) for each in sets)
    cells = ["none" if mutants is None else f"{sum(bool(each['killed_by']) for each in mutants.values())} / {len(mutants)}"]
    fresh = made.get("fresh") if made else None
    cells.append(_count_generated(made) if made else "none")
    cells.append(_write_first(fresh) + _count_generated(fresh) if fresh else "none")
    cells.append(_count_held_out(columns) if columns else "none")
    return cells


def _count_generated(made: Mapping[str, Any]) -> str:
    """Killed of those that are not counted apart, and the others."""
    counts = {word: sum(harm.startswith(word) for harm in made["survivors"].values()) for word in ("equivalent", "elsewhere")}
    apart = "".join(f", {number} {word}" for word, number in counts.items() if number)
    return f"{made['made'] - len(made['survivors'])} / {made['made'] - sum(counts.values())}{apart}"


def _write_first(fresh: Mapping[str, Any]) -> str:
    """Killed when the sample was made, where that is another number than today."""
    now = fresh["made"] - len(fresh["survivors"])
    return f"{fresh['first']} → " if fresh.get("first", now) != now else ""


def _count_held_out(columns: Mapping[str, Any]) -> str:
    """Killed of those that are not equivalent, before and after."""
    equivalent = {name for name, harm in columns["harm"].items() if harm.startswith("equivalent")}
    counts = []
    for column in ("before", "after"):
        if column in columns:
            checks = [check for name, check in columns[column]["killed_by"].items() if name not in equivalent]
            counts.append(f"{sum(map(bool, checks))} / {len(checks)}")
    return ", ".join(counts) + (f", {len(equivalent)} equivalent" if equivalent else "")


def _kit(kind: Any, found: Mapping[str, Any] | None, sets: Sequence[Mapping[str, Any]], root: Path) -> list[str]:
    """The cells of a kind, after its name. `sets`: results of further sets, by kind."""
    template = root / f"frame/entrypoints/tools/scaffold/templates/{kind.name}.py.tmpl"
    killed = "none written" if found is None else f"{sum(bool(each['killed_by']) for each in found.values())} / {len(found)}"
    suite = "none" if kind.suite_path is None else code(kind.suite_path.replace(":", "."))
    scaffold = code(f"frame plugins new {kind.name}") if template.is_file() else "none"
    interface = code(kind.interface_path.replace(":", "."))
    return [interface, scaffold, suite, killed, *_count_killed(kind.name, sets), _example(kind, root)]


def _example(kind: Any, root: Path) -> str:
    """A plugin of the kind outside of the package."""
    folders = [folder for place in ("examples", "packages") for folder in sorted((root / place).glob("*/"))]
    # not those of build folders, which other processes make and delete
    packages = [folder for folder in folders if any(f"def {kind.hook}(" in file.read_text() for file in folder.glob("*/*.py"))]
    files = [file for file in (root / f"tests/plugins/{kind.name}_example.py",) if file.is_file()]
    return ", ".join(code(path.relative_to(root).as_posix()) for path in [*packages, *files]) or "none"


def _verdict(result: Mapping[str, str]) -> str:
    return code(result["killed_by"]) if result["killed_by"] else f"none: {result['survives']}"
