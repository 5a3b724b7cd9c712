"""Mutants that a generator makes: small changes of the source of correct members, of which the
suite of their kind must find each one that changes what a user gets.

    python -m tests.testing.generated eviction_policy gemm_kernel --sample 20 --seed 1

prints the kill rate and the survivors by kind, and writes them to `generated.json`, which the
documents show. A survivor keeps the sentence about its harm that stands in the file; a new one is
"not classified". Two sorts are counted apart, by the first word of their sentence: "equivalent",
which no user can see, and "elsewhere", in a line or a branch that needs other hardware than this
machine has. CI runs it once a week with another seed.

With `--fresh` the changes are those that the recorded sample of the kind has not, or of another
`--member`. The run is recorded beside the sample, as `fresh`. No check was written for them.

The correct member runs first, with a mark before each statement: it says which checks reach which
line, and how long each check takes. A mutant runs those that reach its line, the fastest first, up
to the first that fails, in a forked process with a time limit, which counts as killed. The
operators leave texts of errors and of the log alone, arguments `device`, which a CPU ignores, and
`strict` of `zip`, which asserts what holds.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import copy
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from frame.core.interfaces.plugin import Anything, PluginRecord
from frame.entrypoints.tools.scaffold import write_plugin
from frame.interfaces.kinds import KINDS
from frame.plugins.loader import load_registry
from frame.testing import conformance
from tests.testing.mutants import load_mutants

RESULTS = Path(__file__).with_name("generated.json")
# The in-tree members that are changed; "reference": of the kind's mutants, "held-out": the right
# held-out plugin, "scaffold": what `frame plugins new` writes, FILE.py:CLASS: another. Members of
# one class, with options of their own, share its changes: the suite of any of them may kill.
MEMBERS = {
    "adapter": "lora", "attention_backend": "torch_native", "collective": "held-out", "drafter": "suffix",
    "cli_command": "reference tests/plugins/cli_command_example.py:Greet tests/examples/packages/frame-hello/frame_hello.py:Hello",
    "eviction_policy": "slru", "gemm_kernel": "cpu_int8", "grammar_backend": "llguidance",
    "http_extension": "reference scaffold tests/plugins/http_extension_example.py:Budget", "key_store": "file held-out",
    "kv_allocator": "contiguous", "kv_tier": "host", "launcher": "local", "logits_processor": "penalties", "modality": "image",
    "model": "gemma3 llama qwen3_moe deepseek_v2", "moe_dispatcher": "all_to_all", "moe_runner": "torch_native",
    "platform": "cpu reference held-out", "pooler": "reference",
    "prefix_cache": "radix", "reasoning_parser": "deepseek_r1 think-tags gpt-oss", "routing_policy": "prefix_load",
    "sampler": "reference", "scheduling_policy": "dfs-weight lpm lof priority random", "stat_logger": "prometheus",
    "tool_call_parser": "hermes", "tracer": "json_lines held-out", "weight_format": "gptq", "weight_source": "safetensors",
    "weight_transfer": "ipc",
}  # fmt: skip
LIMIT, FACTOR = 10.0, 5.0  # seconds of CPU time of a mutant; and as a multiple of that of the correct member
UNKNOWN, APART = "not classified", ("equivalent", "elsewhere")
FLIPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
DTYPES = {"float32": "float16", "float64": "float32", "int64": "int32", "int32": "int16", "float": "half", "double": "float", "long": "int"}


@dataclass(frozen=True)
class Site:
    """A place of a source and what is changed there."""

    operator: str
    place: int  # of the node in `ast.walk` order
    line: int  # of its statement
    function: str  # that has it
    text: str  # the expression or line, as it was
    apply: Callable[[Any], Any]  # changes the node of a fresh tree, or returns the statement in its place

    def __str__(self) -> str:
        return f"{self.operator} in {self.function}: `{self.text}`"


def find_sites(tree: ast.Module, target: type) -> list[Site]:
    """All changes that the operators make of a class, its bases in the same module, and the
    module's functions."""
    sites = []
    classes = {each.__name__ for each in target.__mro__ if each.__module__ == target.__module__}
    parts = [node for node in tree.body if not isinstance(node, ast.ClassDef) or node.name in classes]
    numbers = {id(node): place for place, node in enumerate(ast.walk(tree))}
    lines = {id(node): part.lineno for part in ast.walk(tree) if isinstance(part, ast.stmt) for node in ast.walk(part)}  # the innermost's
    for function in (node for part in parts for node in ast.walk(part) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        for statement in function.body:
            texts = {id(node) for part in ast.walk(statement) if is_text(part) for node in ast.walk(part)}
            for node in (node for node in ast.walk(statement) if id(node) not in texts):
                for name, apply in list_changes(node):
                    sites.append(Site(name, numbers[id(node)], lines[id(node)], function.name, shorten(node), apply))
        is_plain = isinstance(function, ast.FunctionDef) and len(function.args.args) > 1
        if is_plain and any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function)):
            sites.append(Site("stale cache", numbers[id(function)], function.body[0].lineno, function.name, function.name, keep_first))
    return list({(site.operator, site.place): site for site in sites}.values())


def is_text(node: ast.AST) -> bool:
    """An error that is raised, a line of the log, or a formatted text: words for people."""
    if isinstance(node, ast.Expr):
        return is_text(node.value)
    is_log = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0].lstrip("_") in ("log", "logger", "logging", "warnings")
    return is_log or isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert)


def list_changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPS:
        yield "comparison", lambda found: found.ops.__setitem__(0, FLIPS[type(found.ops[0])]())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", lambda found: setattr(found, "value", found.value + 1)
    if isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg not in ("device", "strict"):
        yield "dropped argument", lambda found: found.keywords.pop()
    if (
        isinstance(node, ast.Call)
        and len(node.args) > 1
        and not isinstance(node.args[0], ast.Starred)
        and ast.unparse(node.func) not in ("max", "min", "super().__init__")  # the same in any order; a base class that reads neither
        and ast.dump(node.args[0]) != ast.dump(node.args[1])
    ):
        yield "swapped arguments", lambda found: found.args.__setitem__(slice(0, 2), found.args[1::-1])
    if isinstance(node, ast.Attribute) and node.attr in DTYPES:
        yield "wrong dtype", lambda found: setattr(found, "attr", DTYPES[found.attr])
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield "dropped statement", lambda found: ast.copy_location(ast.Pass(), found)


def shorten(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) < 70 else f"{text[:70]}…"


def keep_first(function: Any) -> None:
    function.decorator_list.append(ast.Name("keep_first_result", ast.Load()))


def keep_first_result(function: Any) -> Any:
    """A stale cache: the first result of an object for arguments of these types and lengths."""
    results: dict[Any, Any] = {}

    @functools.wraps(function)
    def cached(*arguments: Any, **named: Any) -> Any:
        key = (
            id(arguments[0]),
            *(getattr(each, "shape", None) or (type(each), len(each) if hasattr(each, "__len__") else 0) for each in arguments[1:]),
        )
        if key not in results:
            results[key] = arguments[0], function(*arguments, **named)  # the object too: its id must not be used again
        return results[key][1]

    return cached


class Replace(ast.NodeTransformer):
    """Puts another node in the place of one."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else super().visit(node)


def change(tree: ast.Module, site: Site) -> ast.Module:
    """A copy of a source that is changed at a site."""
    changed = copy.deepcopy(tree)
    node = next(node for place, node in enumerate(ast.walk(changed)) if place == site.place)
    result = site.apply(node)
    if site.operator == "dropped statement":
        changed = Replace(node, result).visit(changed)
    return ast.fix_missing_locations(changed)


def mark(tree: ast.Module) -> ast.Module:
    """A copy of a source that adds each line to `reached_lines` before it runs it."""
    marked = copy.deepcopy(tree)
    functions = (node for node in ast.walk(marked) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for node in {id(node): node for function in functions for node in ast.walk(function)}.values():
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, field, None), list):
                pairs = ((ast.parse(f"reached_lines.add({each.lineno})").body[0], each) for each in statements)
                setattr(node, field, [each for pair in pairs for each in pair])
    return ast.fix_missing_locations(marked)


def make_class(target: type, tree: ast.Module, reached: set[int] | None = None) -> type:
    """The class of a module with another source."""
    original = sys.modules[target.__module__]
    module = types.ModuleType(f"{target.__module__}_changed")
    module.__dict__.update(__file__=original.__file__, __package__=original.__package__, keep_first_result=keep_first_result)
    module.__dict__["reached_lines"] = reached
    sys.modules[module.__name__] = module
    exec(compile(tree, str(original.__file__), "exec"), module.__dict__)
    made: type = getattr(module, target.__name__)
    return made


def find_subject(kind: str, name: str) -> conformance.Subject:
    """A correct member of a kind."""
    from tests.testing.measure_held_out import make_subject

    if name == "reference":
        return load_mutants(kind).reference.subject()
    if name == "held-out":
        return make_subject(kind, importlib.import_module(f"tests.testing.held_out.{kind}").TWIN)
    if name == "scaffold":
        return write_scaffold(kind)
    file, _, target = name.partition(".py:")
    if target:
        return make_subject(kind, getattr(importlib.import_module(file.replace("/", ".")), target))
    return conformance.find(load_registry(installed=False), f"{kind}:{name}", conformance.Setting())


def write_scaffold(kind: str) -> conformance.Subject:
    """The plugin that `frame plugins new` writes, in a folder that stays as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="frame-scaffold-")
    atexit.register(folder.cleanup)
    written = write_plugin(kind, f"scaffold-{kind.replace('_', '-')}", Path(folder.name))
    sys.path.insert(0, str(written.folder))
    package: Any = importlib.import_module(written.distribution.replace("-", "_"))
    plugin = importlib.import_module(f"{package.__name__}.plugin")
    target = next(each for each in vars(plugin).values() if isinstance(each, type) and each.__name__.startswith("Scaffold"))
    options = package.Options() if hasattr(package, "Options") else None
    capabilities = getattr(package, "CAPABILITIES", Anything())
    record = PluginRecord(kind, "scaffold", f"{plugin.__name__}:{target.__name__}", KINDS[kind].api, capabilities)
    return conformance.Subject(record, target, options, conformance.Setting())


class Reach(NamedTuple):
    """A check of the correct member."""

    check: str
    seconds: float  # of CPU time
    lines: frozenset[int]  # of the member's module
    failure: str = ""


def trace(subject: conformance.Subject, tree: ast.Module) -> list[Reach]:
    """The checks of a member, and the lines that they reach."""
    lines: set[int] = set()
    marked = replace(subject, target=make_class(subject.target, mark(tree), lines))
    found, checks = [], conformance.checks(subject.record.kind, marked)
    every = frozenset(lines)  # of the suite itself, where it asks for its cases
    for check in checks:
        lines.clear()
        began = time.process_time()
        outcome = conformance.run_check(check)
        if outcome.result == "failed":  # a bound of time, on a busy machine
            outcome = conformance.run_check(check)
        message = outcome.message if outcome.result == "failed" else ""
        found.append(Reach(check.name, time.process_time() - began, every | lines, message))
    return found


def find_failure(subject: conformance.Subject, tree: ast.Module, site: Site, names: Sequence[str]) -> str:
    """The first of some checks that fails on a member with a change; "": none does."""
    try:
        changed = replace(subject, target=make_class(subject.target, change(tree, site)))
    except Exception:
        return "import"
    try:
        checks = {check.name: check for check in conformance.checks(subject.record.kind, changed)}
    except Exception:
        return "suite"
    if not set(names) <= set(checks):
        return "suite"  # it has other checks
    return next((name for name in names if conformance.run_check(checks[name]).result == "failed"), "")


def call_apart(work: Callable[[], Any], limit: float) -> Any:
    """The result of a call in a forked process, or why there is none. `limit`: seconds of CPU time;
    a process that waits may take five times as long, since the machine may be busy."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def run() -> None:
        os.setpgid(0, 0)  # so that what it starts ends with it
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 1))
        sys.stdout = sys.stderr = Path("/dev/null").open("w")  # noqa: SIM115 - of a process that ends
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            send.send(work())

    process = context.Process(target=run, daemon=False)
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(5 * limit) else "time"
    except EOFError:
        return "end of the process"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def run_kind(
    kind: str, sample: int, seed: int, known: Mapping[str, Any] | None = None, tuned: Mapping[str, Any] | None = None, members: str = ""
) -> dict[str, Any]:
    """The results of a kind, as the documents show them: those of its members together. `sample`:
    of each class. `known`: earlier results, of which only the survivors run again. `tuned`: results
    whose sample is left out."""
    classes: dict[type, list[conformance.Subject]] = {}
    for name in (members or MEMBERS.get(kind, "reference")).split():
        subject = find_subject(kind, name)
        classes.setdefault(subject.target, []).append(subject)
    total: dict[str, Any] = {"member": ", ".join(each.__name__ for each in classes), "sites": 0, "made": 0, "seed": seed, "sample": sample}
    total["survivors"] = {}
    for target, subjects in classes.items():
        prefix = f"{target.__name__}: " if len(classes) > 1 else ""
        is_tuned = tuned is not None and target.__name__ in tuned["member"].split(", ")
        num_sites, num_made, survivors = run_class(kind, subjects, sample, seed, prefix, known, tuned if is_tuned else None)
        total["sites"], total["made"] = total["sites"] + num_sites, total["made"] + num_made
        total["survivors"] |= survivors
    return total


def run_class(
    kind: str,
    subjects: Sequence[conformance.Subject],
    sample: int,
    seed: int,
    prefix: str,
    known: Mapping[str, Any] | None,
    tuned: Mapping[str, Any] | None,
) -> tuple[int, int, dict[str, str]]:
    """Number of changes and of mutants of a class, and the survivors. `subjects`: members of the
    class, with options of their own."""
    target = subjects[0].target
    tree = ast.parse(inspect.getsource(importlib.import_module(target.__module__)))
    sites = find_sites(tree, target)
    traced: list[tuple[conformance.Subject, list[Reach]]] = []
    for subject in subjects:
        reaches = call_apart(functools.partial(trace, subject, tree), 600.0)
        assert isinstance(reaches, list), f"{kind}: the unchanged member ends by {reaches}"
        if failed := [reach.check for reach in reaches if reach.failure]:
            click.echo(f"{kind}: left out, because the unchanged {target.__name__} fails them here: {', '.join(failed)}")
        traced.append((subject, sorted((reach for reach in reaches if not reach.failure), key=lambda reach: reach.seconds)))
    survivors, seen = {}, set[str]()
    if tuned is not None:
        left_out = choose(sites, tuned.get("sample", tuned["made"]), tuned["seed"])
        sites = [site for site in sites if site not in left_out]
    chosen = choose(sites, sample, seed)
    for site in sorted(chosen, key=lambda site: site.place):
        name = f"{prefix}{site}" if f"{prefix}{site}" not in seen else f"{prefix}{site} (line {site.line})"
        seen.add(name)
        if known is not None and name not in known["survivors"]:
            continue
        found = [(subject, reached) for subject, reaches in traced if (reached := [each for each in reaches if site.line in each.lines])]
        if not any(is_killed(subject, tree, site, reached) for subject, reached in found):
            survivors[name] = UNKNOWN if found else f"{UNKNOWN}: no check reaches it"
    return len(sites), len(chosen), survivors


def choose(sites: Sequence[Site], sample: int, seed: int) -> list[Site]:
    return random.Random(seed).sample(sites, min(sample, len(sites)))


def is_killed(subject: conformance.Subject, tree: ast.Module, site: Site, reached: Sequence[Reach]) -> bool:
    limit = max(LIMIT, FACTOR * sum(reach.seconds for reach in reached))
    return bool(call_apart(functools.partial(find_failure, subject, tree, site, [reach.check for reach in reached]), limit))


def count(found: Mapping[str, Any]) -> tuple[int, int]:
    """Mutants of a kind that are not counted apart, and those of them that were killed."""
    num_apart = sum(harm.startswith(APART) for harm in found["survivors"].values())
    return found["made"] - num_apart, found["made"] - len(found["survivors"])


@click.command()
@click.argument("kinds", nargs=-1)
@click.option("--sample", default=20, help="Mutants of a class.")
@click.option("--seed", default=1, help="Of the choice among all changes.")
@click.option("--survivors", is_flag=True, help="Run the recorded survivors alone, after a check was added.")
@click.option("--fresh", is_flag=True, help="Changes that the recorded sample has not; recorded beside it.")
@click.option("--member", default="", help="Members in place of those of the table.")
def main(kinds: tuple[str, ...], sample: int, seed: int, survivors: bool, fresh: bool, member: str) -> None:
    """Make mutants of KINDS (default: all of the table), and record which survive."""
    for kind in kinds or MEMBERS:
        recorded = read_results()
        before = recorded[kind].get("fresh", {}) if fresh else recorded.get(kind, {})
        if survivors:
            sample, seed = before.get("sample", before["made"]), before["seed"]
        found = run_kind(kind, sample, seed, before if survivors else None, recorded[kind] if fresh else None, member)
        recorded = read_results()  # another run may have written
        kept = recorded.get(kind, {})
        harms = {**kept.get("fresh", {}).get("survivors", {}), **kept.get("survivors", {})}
        known = {site: harm for site, harm in harms.items() if not harm.startswith(UNKNOWN)}
        found["survivors"] = {site: known.get(site, harm) for site, harm in found["survivors"].items()}
        if fresh:
            found["first"] = before["first"] if survivors else count(found)[1]  # killed, before checks were written
        entry = {**kept, "fresh": found} if fresh else {**found, **({"fresh": kept["fresh"]} if "fresh" in kept else {})}
        RESULTS.write_text(json.dumps(dict(sorted({**recorded, kind: entry}.items())), indent=2, ensure_ascii=False) + "\n")
        made, killed = count(found)
        click.echo(f"{kind} ({found['member']}): {killed} of {made} killed, of {found['sites']} changes")
        for site, harm in found["survivors"].items():
            click.echo(f"  {site}: {harm}")


def read_results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


if __name__ == "__main__":
    main()
