"""Mutants that a generator makes: small changes of the source of correct members, of which the
suite of their kind must find each one that changes what a user gets.

    python -m tests.testing.generated eviction_policy gemm_kernel --sample 20 --seed 1

prints the kill rate and the survivors by kind, and writes them to `generated.json`, which the
documents show. A survivor keeps the sentence about its harm that stands in the file; a new one is
"not classified". CI runs it once a week with another seed. Each mutant runs in a forked process
with a time limit, which counts as killed.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import json
import multiprocessing
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from frame.plugins.loader import load_registry
from frame.testing import conformance
from tests.testing.mutants import load_mutants

RESULTS = Path(__file__).with_name("generated.json")
MEMBERS = {  # the in-tree member that is changed; "": the reference of the kind's mutants
    "adapter": "lora", "collective": "gloo", "eviction_policy": "slru", "gemm_kernel": "torch", "key_store": "file", "launcher": "local",
    "moe_dispatcher": "all_to_all", "moe_runner": "torch_native", "pooler": "", "prefix_cache": "radix", "reasoning_parser": "think-tags",
    "routing_policy": "prefix_load", "scheduling_policy": "lpm", "stat_logger": "log", "tool_call_parser": "hermes", "tracer": "json_lines",
    "weight_format": "gptq", "weight_source": "safetensors",
}  # fmt: skip
LIMIT, FACTOR = 30.0, 6.0  # seconds of a mutant; and as a multiple of the time of the correct member
UNKNOWN = "not classified"
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
    text: str  # the expression or line, as it was
    apply: Callable[[Any], Any]  # changes the node of a fresh tree, or returns the statement in its place

    def __str__(self) -> str:
        return f"{self.operator}: `{self.text}`"


def find_sites(tree: ast.Module, target: type) -> list[Site]:
    """All changes that the operators make of a class, its bases in the same module, and the
    module's functions."""
    sites = []
    classes = {each.__name__ for each in target.__mro__ if each.__module__ == target.__module__}
    parts = [node for node in tree.body if not isinstance(node, ast.ClassDef) or node.name in classes]
    numbers = {id(node): place for place, node in enumerate(ast.walk(tree))}
    for function in (node for part in parts for node in ast.walk(part) if isinstance(node, ast.FunctionDef)):
        for statement in function.body:
            for node in ast.walk(statement):
                sites += [Site(name, numbers[id(node)], shorten(node), apply) for name, apply in list_changes(node)]
        if len(function.args.args) > 1 and any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function)):
            sites.append(Site("stale cache", numbers[id(function)], function.name, keep_first))
    return list({(site.operator, site.place): site for site in sites}.values())


def list_changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPS:
        yield "comparison", lambda found: found.ops.__setitem__(0, FLIPS[type(found.ops[0])]())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", lambda found: setattr(found, "value", found.value + 1)
    if isinstance(node, ast.Call) and node.keywords:
        yield "dropped argument", lambda found: found.keywords.pop()
    if (
        isinstance(node, ast.Call)
        and len(node.args) > 1
        and not isinstance(node.args[0], ast.Starred)
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


def make_class(target: type, tree: ast.Module, site: Site | None) -> type:
    """The class of a module whose source is changed at a site."""
    changed = tree if site is None else change(tree, site)
    original = sys.modules[target.__module__]
    module = types.ModuleType(f"{target.__module__}_changed")
    module.__dict__.update(__file__=original.__file__, __package__=original.__package__, keep_first_result=keep_first_result)
    sys.modules[module.__name__] = module
    exec(compile(changed, str(original.__file__), "exec"), module.__dict__)
    made: type = getattr(module, target.__name__)
    return made


def find_subject(kind: str) -> conformance.Subject:
    """The correct member of a kind."""
    name = MEMBERS.get(kind, "")
    if not name:
        return load_mutants(kind).reference.subject()
    return conformance.find(load_registry(installed=False), f"{kind}:{name}", conformance.Setting())


def find_failure(subject: conformance.Subject, make: Callable[[], type], limit: float) -> str:
    """The first check that fails on a class, in a process of its own; "": none does. "time" and
    "import" stand for a run beyond the limit, and a module that cannot be made."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def work() -> None:
        sys.stdout = sys.stderr = Path("/dev/null").open("w")  # noqa: SIM115 - of a process that ends
        try:
            changed = replace(subject, target=make())
        except BaseException:
            send.send("import")
            return
        outcomes = conformance.run_suite(changed, first_failure=True)
        send.send(next((outcome.check for outcome in outcomes if outcome.result == "failed"), ""))

    process = context.Process(target=work, daemon=False)
    process.start()
    send.close()
    try:
        return str(receive.recv()) if receive.poll(limit) else "time"
    except EOFError:
        return "end of the process"
    finally:
        process.kill()
        process.join()


def run_kind(kind: str, sample: int, seed: int) -> dict[str, Any]:
    """The results of a kind, as the documents show them."""
    subject = find_subject(kind)
    tree = ast.parse(inspect.getsource(importlib.import_module(subject.target.__module__)))
    sites = find_sites(tree, subject.target)
    began = time.monotonic()
    failure = find_failure(subject, lambda: make_class(subject.target, tree, None), 600.0)
    assert not failure, f"{kind}: the unchanged source of {subject.target.__name__} fails {failure}"
    limit = max(LIMIT, FACTOR * (time.monotonic() - began))
    chosen = random.Random(seed).sample(sites, min(sample, len(sites)))
    killed = {str(site): find_failure(subject, functools.partial(make_class, subject.target, tree, site), limit) for site in chosen}
    survivors = dict.fromkeys((site for site, check in killed.items() if not check), UNKNOWN)
    return {"member": subject.target.__name__, "sites": len(sites), "made": len(killed), "seed": seed, "survivors": survivors}


@click.command()
@click.argument("kinds", nargs=-1)
@click.option("--sample", default=20, help="Mutants of a kind.")
@click.option("--seed", default=1, help="Of the choice among all changes.")
def main(kinds: tuple[str, ...], sample: int, seed: int) -> None:
    """Make mutants of KINDS (default: all of the table), and record which survive."""
    for kind in kinds or MEMBERS:
        found = run_kind(kind, sample, seed)
        recorded = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        known = recorded.get(kind, {}).get("survivors", {})
        found["survivors"] = {site: known.get(site, harm) for site, harm in found["survivors"].items()}
        RESULTS.write_text(json.dumps(dict(sorted({**recorded, kind: found}.items())), indent=2, ensure_ascii=False) + "\n")
        num_killed = found["made"] - len(found["survivors"])
        click.echo(f"{kind} ({found['member']}): {num_killed} of {found['made']} killed, of {found['sites']} changes")
        for site, harm in found["survivors"].items():
            click.echo(f"  {site}: {harm}")


if __name__ == "__main__":
    main()
