"""Who may import whom. Imports inside functions count; imports for the type checker alone count for
cycles only."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.architecture.source import EXTENSIONS, ROOT, Module, is_under, module, package

CORE_DATA = (
    *("frame.core.errors", "frame.host.installation", "frame.core.interfaces", "frame.core.messages"),
    "frame.core.interfaces.sampling_params",
)
INTERFACES = "frame.interfaces"
DATA = (*CORE_DATA, INTERFACES)
CONFIGURATION = (
    "frame.config.schema",
    "frame.config.section",
    "frame.config.server_sections",
    "frame.config.hardware",
    "frame.checkpoint",
    "frame.config.resolve",
    "frame.config.resolution.drafter",
    "frame.config.resolution.machine",
    "frame.config.resolution.attention",
    "frame.config.resolution.media",
    "frame.config.resolution.tiers",
    "frame.config.resolution.parallel",
    "frame.config.resolution.platform",
    "frame.config.resolution.plugins",
    "frame.config.resolution.task",
    "frame.config.resolved",
    "frame.config.selection",
)
SMALL_FAMILIES = (
    "frame.plugins.collectives",
    "frame.plugins.eviction_policies",
    "frame.plugins.grammar_backends",
    "frame.plugins.http_extensions",
    "frame.plugins.key_stores",
    "frame.plugins.kv_allocators",
    "frame.plugins.kv_tiers",
    "frame.plugins.launchers",
    "frame.plugins.logits_processors",
    "frame.plugins.modalities",
    "frame.plugins.moe_dispatchers",
    "frame.plugins.moe_runners",
    "frame.plugins.platforms",
    "frame.plugins.poolers",
    "frame.plugins.prefix_caches",
    "frame.plugins.reasoning_parsers",
    "frame.plugins.samplers",
    "frame.plugins.scheduling_policies",
    "frame.plugins.drafters",
    "frame.plugins.stat_loggers",
    "frame.plugins.tool_call_parsers",
    "frame.plugins.tracers",
    "frame.plugins.weight_sources",
    "frame.plugins.weight_transfers",
)
FAMILIES = ("frame.attention_backends", "frame.models", "frame.quantization", *SMALL_FAMILIES)
LAYERS = "frame.models.layers"
KERNELS = "frame.kernels"
MARKER = "frame.registration"
# What grammar backends in packages of their own may use of the in-tree family.
SHARED = (
    "frame.plugins.grammar_backends.closed_schema",
    "frame.plugins.grammar_backends.ebnf",
    "frame.plugins.grammar_backends.options",
    "frame.plugins.grammar_backends.sources",
    "frame.plugins.grammar_backends.states",
)
# The source that others add to: of files whose tensors are stored in another form.
STORED = "frame.plugins.weight_sources.safetensors"
# What launchers in packages of their own may use of the in-tree family.
RENDEZVOUS = ("frame.plugins.launchers.rendezvous", "frame.plugins.launchers.rendezvous_node")

# What a server is made of beside the core. Each may use the core and the small rooms alone.
SMALL_ROOMS = ("frame.checkpoint", "frame.fair_queue", "frame.host")
ROOMS = (
    *("frame.adapters", "frame.config", "frame.diagnostics", "frame.loading", "frame.parallel", "frame.pooling", "frame.speculation"),
    *("frame.forward", "frame.kv_events", "frame.kv_tiers", "frame.latency_budget", "frame.media", "frame.structured_output", "frame.text"),
    *SMALL_ROOMS,
)

# Which rooms of the package each room may use besides itself; the first prefix that fits counts.
MAY_USE: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((name, CORE_DATA) for name in CORE_DATA),
    (INTERFACES, DATA),
    *((name, (*DATA, *CONFIGURATION)) for name in CONFIGURATION),
    *((f"frame.core.{room}", ("frame.core",)) for room in ("execution", "kv_cache", "sampling")),
    ("frame.core", ("frame.core",)),
    *((room, ("frame.core", INTERFACES, KERNELS, *SMALL_ROOMS)) for room in ROOMS),
    (KERNELS, DATA),
    (LAYERS, (*DATA, KERNELS)),
    ("frame.plugins.kv_tiers", (*DATA, KERNELS, "frame.host.authenticated_link", "frame.host.host_memory", MARKER)),
    (
        "frame.plugins.launchers",
        (*DATA, "frame.host.authenticated_link", "frame.host.child_process", "frame.host.socket_directory", MARKER),
    ),
    ("frame.plugins.modalities", (*DATA, "frame.media.sound", MARKER)),
    ("frame.plugins.platforms", (*DATA, "frame.host.host_memory", MARKER)),
    *((f"frame.plugins.{kind}", (*DATA, KERNELS, LAYERS, "frame.host.gloo_group", MARKER)) for kind in ("collectives", "weight_transfers")),
    *((family, (*DATA, KERNELS, LAYERS, MARKER)) for family in FAMILIES),
    (MARKER, DATA),
    ("frame.plugins", ("frame.core", INTERFACES, "frame.host", "frame.config", "frame.plugins", MARKER)),
    # a suite loads weights through the layers
    ("frame.testing", ("frame.core", INTERFACES, *ROOMS, "frame.plugins", "frame.entrypoints", LAYERS)),
    ("frame.entrypoints.tools.bench", ("frame.core", INTERFACES, *ROOMS, "frame.plugins", "frame.entrypoints", LAYERS)),
    ("frame.entrypoints", ("frame.core", INTERFACES, *ROOMS, "frame.plugins", KERNELS)),
    ("frame.lang", ("frame.core", INTERFACES, "frame.entrypoints", "frame.host.progress")),
    ("frame.rl", ("frame.entrypoints", "frame.host.gloo_group")),
    ("frame", ("frame",)),
    ("frame_quantize", (*DATA, "frame.host.progress")),
    ("frame_x86", (*DATA, MARKER)),
    ("frame_bitsandbytes", (*DATA, MARKER, STORED)),
    ("frame_gguf", (*DATA, MARKER)),
    ("frame_ray", (*DATA, MARKER, "frame.host.child_process", "frame.host.interpreter", "frame.entrypoints.router", *RENDEZVOUS)),
    ("frame_automata", (*DATA, MARKER, "frame.plugins.loader", *SHARED)),
)

# Import cycles that remain; this list only shrinks.
REMAINING_CYCLES: tuple[tuple[str, ...], ...] = ()

# What core must not know, and what the parts that touch no tensor must not load when they are
# imported.
DISTRIBUTIONS = {  # where the import has another name
    "yaml": "pyyaml", "PIL": "pillow", "zmq": "pyzmq", "pydantic_core": "pydantic-core", "typing_extensions": "typing-extensions",
    "prometheus_client": "prometheus-client",
    "opentelemetry": "opentelemetry-sdk", "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking", "grpc_reflection": "grpcio-reflection", "google": "protobuf",
    "flashinfer": "flashinfer-python", "deep_gemm": "sgl-deep-gemm", "flash_mla": "sgl-flash-mla", "humming": "humming-kernels",
}  # fmt: skip
NOT_IN_CORE = ("click", "fastapi", "httpx", "pluggy", "prometheus_client", "starlette", "typer", "uvicorn")
NO_TORCH = (
    *DATA,
    *CONFIGURATION,
    "frame.core.kv_cache.page_allocator",
    "frame.core.scheduling.request",
    "frame.core.scheduling.scheduler",
    "frame.entrypoints.cli",
    "frame.entrypoints.http",
    "frame.plugins.eviction_policies",
    "frame.plugins.hookspecs",
    "frame.registration",
    "frame.plugins.launchers",
    "frame.plugins.loader",
    "frame.plugins.prefix_caches",
    "frame.plugins.reasoning_parsers",
    "frame.plugins.registry",
    "frame.plugins.scheduling_policies",
    "frame.plugins.tool_call_parsers",
)


def wrong_directions(modules: Iterable[Module]) -> list[str]:
    """Imports that go upwards, or that name a plugin family from outside of it."""
    return [
        f"{found.at(use.line)}: {found.name} must not import {use.target}"
        for found in modules
        for use in found.imports
        if use.when != "types" and is_under(use.target, "frame", "frame_automata") and not _allowed(found.name, use.target)
    ]


def _allowed(name: str, target: str) -> bool:
    home, rooms = next((prefix, rooms) for prefix, rooms in MAY_USE if is_under(name, prefix))
    family = next((family for family in FAMILIES if is_under(target, family)), None)
    if family is not None and not is_under(name, family):
        return is_under(target, *(room for room in (LAYERS, STORED, *SHARED, *RENDEZVOUS) if room in rooms))
    own = home if home != "frame" else name
    return target in ("frame", "frame.hookimpl") or is_under(target, own, *rooms)


def forbidden_libraries(modules: Iterable[Module]) -> list[str]:
    found = []
    for each in modules:
        for use in each.imports:
            if is_under(each.name, "frame.core") and use.when != "types" and is_under(use.target, *NOT_IN_CORE):
                found.append(f"{each.at(use.line)}: core must not import {use.target}")
            if is_under(each.name, *NO_TORCH) and use.when == "start" and is_under(use.target, "torch", "transformers"):
                found.append(f"{each.at(use.line)}: importing {each.name} must not load {use.target}")
    return found


def undeclared(modules: Iterable[Module], declared: set[str]) -> list[str]:
    """Third-party libraries that are imported and are no dependency, not even an extra one."""
    found = set()
    for each in modules:
        for use in each.imports:
            top = use.target.partition(".")[0]
            own = each.name.partition(".")[0]
            if top in sys.stdlib_module_names or top in ("frame", own):
                continue
            if DISTRIBUTIONS.get(top, top.replace("_", "-")) not in declared:
                found.add(f"{each.at(use.line)}: {top} is imported, but pyproject.toml does not declare it")
    return sorted(found)


def declared_dependencies(folder: Path = ROOT) -> set[str]:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for texts in project["optional-dependencies"].values() for text in texts)]
    return {Requirement(text).name.lower() for text in texts}


def cycles(modules: Iterable[Module]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others: at import, inside a
    function or for the type checker."""
    known = {found.name: found for found in modules}
    graph = {
        name: {target for use in found.imports if (target := _nearest(use.target, known)) not in (None, name)}
        for name, found in known.items()
    }
    reach = {name: _reachable(name, graph) for name in graph}
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph}
    return [list(group) for group in sorted(groups) if group]


def _nearest(target: str, known: dict[str, Module]) -> str | None:
    return target if target in known else (parent if (parent := target.rpartition(".")[0]) in known else None)


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += graph[name]
    return found


def test_direction() -> None:
    assert wrong_directions(package()) == []


def test_core_knows_no_pluggy_and_no_http_and_light_rooms_load_no_torch() -> None:
    assert forbidden_libraries(package()) == []


def test_every_library_is_declared() -> None:
    assert undeclared([each for each in package() if is_under(each.name, "frame")], declared_dependencies()) == []
    for folder in EXTENSIONS.glob("*/"):
        modules = [each for each in package() if each.path.startswith(f"{folder.relative_to(ROOT)}/")]
        assert modules, folder
        assert "frame-serve" in declared_dependencies(folder)
        assert undeclared(modules, declared_dependencies(folder)) == []


def test_no_cycles_but_those_that_remain() -> None:
    found = cycles(package())
    assert [group for group in found if not any(set(group) <= set(known) for known in REMAINING_CYCLES)] == []
    gone = [known for known in REMAINING_CYCLES if not any(set(group) <= set(known) for group in found)]
    assert gone == [], "remove these from REMAINING_CYCLES"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("frame.core.interfaces.example", "from frame.core.scheduling.scheduler import Scheduler"),
        ("frame.config.resolve", "from frame.core import scheduler"),
        ("frame.core.engine", "import frame.plugins.loader"),
        ("frame.core.engine", "def f():\n    from frame.attention_backends.example import Example"),
        ("frame.models.llama", "from frame.quantization.plain import Plain"),
        ("frame.models.llama", "from frame.loading.loader import load"),
        ("frame.models.layers.linear", "from frame.models.llama import Llama"),
        ("frame.quantization.example", "from frame.models.llama import Llama"),
        ("frame.entrypoints.processes.launch", "from frame.models.layers.linear import Linear"),
        ("frame.plugins.loader", "from frame.plugins.grammar_backends import something"),
        ("frame.plugins.loader", "from frame.entrypoints.processes.launch import launch"),
        ("frame", "from frame.models import llama"),
        ("frame.plugins.loader", "import frame_automata"),
        ("frame.core.engine", "def f():\n    from frame_automata.backend import AutomataBackend"),
        ("frame_automata.backend", "from frame.plugins.grammar_backends.combined import CombinedBackend"),
        ("frame_automata.backend", "from frame.core.scheduling.scheduler import Scheduler"),
    ],
)
def test_direction_finds(name: str, text: str) -> None:
    assert wrong_directions([module(text, name)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("frame.core.interfaces.example", "if TYPE_CHECKING:\n    from frame.core.scheduling.request import Request"),
        ("frame.core.interfaces.example", "from frame.core.interfaces.plugin import Reason"),
        ("frame.config.resolve", "from frame.config.schema import FrameConfig"),
        ("frame.core.engine", "from frame.core.scheduling.scheduler import Scheduler"),
        ("frame.models.llama", "from frame.models.layers.linear import Linear"),
        ("frame.quantization.example", "from frame.models.layers.parameter import Parameter"),
        ("frame.quantization", "from frame.registration import hookimpl"),
        ("frame_automata", "from frame import hookimpl"),
        ("frame_automata.backend", "from frame.plugins.grammar_backends.sources import check_source"),
        ("frame.entrypoints.processes.launch", "from frame.plugins.loader import load_registry"),
    ],
)
def test_direction_allows(name: str, text: str) -> None:
    assert wrong_directions([module(text, name)]) == []


def test_library_checks_find() -> None:
    assert undeclared([module("import left_pad.x")], {"torch"})
    assert not undeclared([module("import os, torch.nn, yaml")], {"torch", "pyyaml"})
    assert forbidden_libraries([module("def f():\n    import pluggy", "frame.core.engine")])
    assert forbidden_libraries([module("from fastapi import FastAPI", "frame.core.engine")])
    assert forbidden_libraries([module("import torch.nn", "frame.core.scheduling.scheduler")])
    assert not forbidden_libraries([module("def f():\n    import torch", "frame.config.resolve")])


def test_cycles_finds() -> None:
    one = module("from frame.core.two import b", "frame.core.one")
    two = module("import frame.core.one", "frame.core.two")
    three = module("import frame.core.one", "frame.core.three")
    assert cycles([one, two, three]) == [["frame.core.one", "frame.core.two"]]
    assert cycles([one, three]) == []
    for late in ("def f():\n    import frame.core.one", "if TYPE_CHECKING:\n    from frame.core.one import a"):
        assert cycles([one, module(late, "frame.core.two")]) == [["frame.core.one", "frame.core.two"]]
