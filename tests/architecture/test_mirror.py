"""Every module is tested: a test file of its name, a test that imports it, or a reason in the
table."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tests.architecture.source import EXTENSIONS, ROOT, Module, is_under, module, package, walk
from tests.architecture.test_imports import FAMILIES, LAYERS

PART_OF_SCHEDULER = "a part of Scheduler, which tests/core/scheduling/test_scheduler_property.py drives and checks after each step"
PART_OF_SERVER = "driven over real HTTP, with real processes, by tests/entrypoints/http and tests/examples/test_serving.py"
PART_OF_DIALECTS = "driven by the clients' own libraries, over real HTTP, in tests/clients"
# module -> why no test names it.
UNTESTED: dict[str, str] = {
    "frame.__main__": "run as a program by tests/examples",
    **dict.fromkeys(
        (
            "frame.core.scheduling.admission",
            "frame.core.scheduling.kv_cache_manager",
            "frame.core.scheduling.request_slots",
            "frame.core.scheduling.running",
            "frame.core.scheduling.output_processor",
        ),
        PART_OF_SCHEDULER,
    ),
    **dict.fromkeys(
        (
            "frame.entrypoints.engine_client.response_state",
            "frame.entrypoints.engine_client.client",
            "frame.entrypoints.processes.deployment",
            "frame.entrypoints.engine_client.tokenizing",
            "frame.entrypoints.processes.worker",
            "frame.entrypoints.cli.chat",
            "frame.entrypoints.cli.eval",
            "frame.entrypoints.cli.serve",
            "frame.entrypoints.http.app",
            "frame.entrypoints.http.start",  # and frame config check, by tests/entrypoints/test_refusals.py
            "frame.entrypoints.processes.planned_rank",  # likewise
            "frame.entrypoints.http.request_context",
            "frame.entrypoints.http.errors",
            "frame.entrypoints.http.openai.completion_objects",
            "frame.entrypoints.http.operations.live_types",
            "frame.entrypoints.http.operations.metrics",
            "frame.entrypoints.http.openai.completions_schema",
            "frame.entrypoints.http.chat.output_parser",
            "frame.entrypoints.http.native.pooling",
            "frame.entrypoints.http.server",
            "frame.entrypoints.http.services",
            "frame.entrypoints.version",
            "frame.entrypoints.http.chat.constraints",
        ),
        PART_OF_SERVER,
    ),
    **dict.fromkeys(
        (
            "frame.entrypoints.http.chat.older_tags",
            "frame.entrypoints.http.chat.thinking_fields",
            "frame.entrypoints.http.dialects.anthropic",
            "frame.entrypoints.http.dialects.anthropic_tools",
            "frame.entrypoints.http.openai.response_tools",
            "frame.entrypoints.http.dialects.cohere",
            "frame.entrypoints.http.chat.request_fields",
            "frame.entrypoints.http.openai.responses_schema",
            "frame.entrypoints.http.protocol.list_pages",
            "frame.entrypoints.http.dialects.ollama",
            "frame.entrypoints.http.dialects.ollama_requests",
            "frame.entrypoints.http.dialects.cohere_chat",
            "frame.entrypoints.http.dialects.cohere_chat_v1",
            "frame.entrypoints.http.native.tokenizing",
            "frame.entrypoints.http.native.vector_encoding",
            "frame.entrypoints.http.dialects.sagemaker",
            "frame.entrypoints.http.dialects.sglang",
            "frame.entrypoints.http.dialects.tei",
            "frame.entrypoints.http.dialects.vllm",
            "frame.entrypoints.http.openai.responses",
            "frame.entrypoints.http.openai.response_objects",
            "frame.entrypoints.http.chat.block_response",
            "frame.entrypoints.http.chat.chat_request",
        ),
        PART_OF_DIALECTS,
    ),
    "frame.entrypoints.http.response_types": "http/protocol/test_response_docs.py validates responses against its schemas",
    "frame.core.scheduling.step_features": "two protocols and what holds both; every scheduler under test is built of it",
    **dict.fromkeys(
        (
            f"frame.entrypoints.http.realtime.{name}"
            for name in ("caller", "connection", "conversation", "items", "responses", "session", "transcription")
        ),
        "tests/clients/test_openai_realtime.py and tests/security/test_realtime.py drive it over WebSockets",
    ),
    "frame.entrypoints.http.extensions": "tests/entrypoints/http/test_extensions.py serves requests through them",
    "frame.entrypoints.offline.transcribing": "tests/entrypoints/test_word_times.py and tests/models transcribe by it",
    "frame.testing.kv_tier.cost_checks": "tests/testing runs it in the suite of cache tiers, whose mutants it kills",
    "frame.testing.modality.sounds": "tests/testing runs it in the suite of modalities, whose mutants it kills",
    "frame.testing.sampling.grammar_keywords": "tests/testing runs it in the suite of grammar backends, whose mutants it kills",
    "frame.testing.scheduling.prefix_cache_tree": "tests/testing runs it in the suite of prefix caches, whose mutants it kills",
    "frame.testing.sampling.processor_inputs": "tests/testing runs it in the suite of logits processors, whose mutants it kills",
    "frame.testing.sampling.processor_limits": "tests/testing runs it in the suite of logits processors, whose mutants it kills",
    "frame.testing.ranks.collective_values": "tests/testing runs it in the suite of collectives, whose mutants it kills",
    "frame.testing.sampling.sampler_bench": "tests/testing runs it in the suite of samplers, whose mutants it kills",
    "frame.testing.scheduling.eviction_policy": "tests/testing/test_conformance_policies.py runs it on the in-tree policies",
    "frame.testing.serving.http_extension": "tests/testing/test_mutants.py runs it on the HTTP extensions of tests.testing.mutants",
    "frame.testing.serving.http_middleware": "tests/testing/test_mutants.py runs it on the HTTP extensions of tests.testing.mutants",
    "frame.kernels.moe.expert_kernels": "every product in tests/kernels/moe.py is launched by frame.kernels.moe.grouped_gemm",
    **dict.fromkeys(
        tuple(f"frame.kernels.linear_attention.{name}" for name in ("chunks", "convolution", "gates", "scan")),
        "tests/kernels/recurrence.py runs the layers that launch it",
    ),
    "frame.kernels.gluon_pipeline": "the Gluon kernels that tests/gpu multiplies with are made of it",
    **dict.fromkeys(
        tuple(f"frame.testing.kv_tier.{name}" for name in ("suite", "byte_checks", "place_checks", "use_checks")),
        "tests/testing/test_conformance_kv_tier.py runs it on the in-tree tiers",
    ),
    **dict.fromkeys(
        tuple(f"frame.testing.weight_transfer.{name}" for name in ("suite", "shared_checks", "trainers")),
        "tests/testing/test_conformance_weight_transfer.py runs it on the in-tree transfers",
    ),
    "frame.testing.torch_calls": "tests/testing runs it in the suites of logits processors and poolers, whose mutants it kills",
    "frame.testing.drafter.device": "tests/testing/test_conformance_drafter.py runs it",
    "frame.speculation.draft_passes": "tests/speculation compares the drafts of its passes with a plain loop",
    "frame.entrypoints.processes.components": "builds what tests/core/execution/test_model_runner.py runs",
    "frame.parallel.stage_runner": "tests/parallel/test_parallel.py compares its tokens with those of one rank",
    "frame.core.execution.drafting": "a protocol; tests/speculation/test_draft_runner.py runs what implements it",
    "frame.pooling.vector_head": "every vector in tests/pooling/test_pooling.py comes out of it",
    "frame.checkpoint.sentence_transformers": "tests/pooling/test_pooling.py reads checkpoints with each of its files",
    "frame.pooling.pooling_runner": "runs every prompt in tests/pooling/test_pooling.py",
    "frame.entrypoints.http.chat.constraints": "tests/clients/test_openai_chat.py asks for all that it allows and refuses",
    "frame.text.tool_prompt": "tests/text/test_chat_template.py renders what it writes",
    "frame.core.sampling.prompt_logprobs": "tests/core/execution/test_model_runner.py compares chunks with whole prompts",
    "frame.core.interfaces.attention_spec": "one data class and a protocol; every test of an attention backend uses both",
    "frame.core.interfaces.rank_context": "data classes and protocols; every backend under test is built from them",
    "frame.core.interfaces.device_operations": "data; tests/core/sampling and tests/kernels/sampling.py draw with both",
    "frame.core.interfaces.row_operations": "data and a protocol; tests of frame-x86 and of the Triton kernels use them",
    "frame.interfaces.parsing": "two abstract classes and plain data; the parsers' tests use them",
    "frame.testing.parsing.reading": "both suites of parsers check with it, and tests/testing runs them on mutants",
    "frame.testing.pytest_plugin": "run as a pytest plugin by tests/examples and tests/testing",
    "frame.entrypoints.tools.bench.offline": "the Python API's engine runs the workloads that tests/entrypoints/cli/test_bench.py asks for",
}


def suite() -> list[Module]:
    found = []
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *EXTENSIONS.glob("*/tests/**/*.py")]):
        relative = path.relative_to(ROOT)
        found.append(Module(".".join(relative.with_suffix("").parts), relative.as_posix(), path.read_text()))
    return found


def untested(modules: Iterable[Module], tests: Iterable[Module], targets: Iterable[str] = ()) -> list[str]:
    """Modules with code that no test file is named after, none imports or names, and no plugin
    record (`targets`) leads to:
    plugins are tested by name, through the registry."""
    named, used = set(), set(targets)
    for test in tests:
        named.add(test.path.rpartition("/")[2].removeprefix("test_").removesuffix(".py"))
        for use in test.imports:
            used.update({use.target, use.target.rpartition(".")[0]})
        used.update(node.value for node in walk(test.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [
        each.name
        for each in modules
        if _has_code(each) and each.name not in used and not _has_file(each, named) and each.name not in UNTESTED
    ]


def with_parts(targets: Iterable[str], modules: Iterable[Module]) -> set[str]:
    """Plugins and the modules that they are built from: what they import, directly or not, from
    their family and from the layers."""
    known = {each.name: each for each in modules}
    open_, found = set(targets) & set(known), set()
    while open_:
        name = open_.pop()
        found.add(name)
        rooms = [family for family in FAMILIES if is_under(name, family)]
        parts = {part for use in known[name].imports for part in (use.target, use.target.rpartition(".")[0])}
        open_ |= {part for part in parts if part in known and is_under(part, *rooms, LAYERS)} - found
    return found


def _has_file(each: Module, named: set[str]) -> bool:
    stem = each.name.rpartition(".")[2]
    return any(name == stem or name.startswith(stem + "_") or name.endswith("_" + stem) for name in named)


def _has_code(each: Module) -> bool:
    return any(not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom) for node in each.tree.body)


def test_every_module_is_tested() -> None:
    from frame.plugins.loader import load_registry

    targets = {r.target.partition(":")[0] for records in load_registry(installed=False).all_records().values() for r in records}
    manifests = {each.name for each in package() if each.path.endswith("__init__.py")}
    assert untested(package(), suite(), manifests | with_parts(targets, package())) == []


def test_table_is_needed() -> None:
    names = {each.name for each in package()}
    assert set(UNTESTED) <= names
    assert all(len(reason) > 20 for reason in UNTESTED.values())
    assert all(is_under(name, "frame") for name in UNTESTED)


def test_check_finds() -> None:
    plugin = module("from frame.quantization.packing import pack", "frame.quantization.int4")
    part = module("from frame.core.scheduling.request import Request", "frame.quantization.packing")
    assert with_parts({"frame.quantization.int4"}, [plugin, part]) == {"frame.quantization.int4", "frame.quantization.packing"}
    code = module("x = 1", "frame.core.example")
    assert untested([code], []) == ["frame.core.example"]
    assert untested([code], [module("", "tests.core.test_example", "tests/core/test_example.py")]) == []
    assert untested([code], [module("from frame.core.example import x", "tests.core.test_other")]) == []
    assert untested([code], [module("from frame.core import example", "tests.core.test_other")]) == []
    assert untested([module('"""Nothing."""', "frame.core.empty")], []) == []
