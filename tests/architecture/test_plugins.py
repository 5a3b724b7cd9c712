"""Hooks, records and where plugins' names may stand."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

from frame.core.interfaces.plugin import PluginRecord
from frame.interfaces.kinds import KINDS
from frame.plugins import hookspecs
from frame.plugins.loader import FRAME_DISTRIBUTION, load_registry
from frame.registration import PROJECT
from tests.architecture.source import EXTENSIONS, ROOT, Module, classes, module, package, walk

HOOK_NAME = re.compile(r"register_[a-z_]+s$|on_[a-z_]+$")
ONE_SCREEN = 120  # lines of hookspecs.py

# Folder of each kind; its plugins' names stand there, in the docs and in the tests, and nowhere
# else.
FOLDERS = {
    "attention_backend": "frame/attention_backends/",
    "model": "frame/models/",
    "weight_format": "frame/quantization/",
    "gemm_kernel": "frame/quantization/",
    "cli_command": "frame/entrypoints/cli/",
    **{kind: f"frame/plugins/{KINDS[kind].plural}/" for kind in KINDS if (ROOT / "frame/plugins" / KINDS[kind].plural).is_dir()},
    "http_extension": "frame/entrypoints/http/",
}
# Words that mean something else too, in a kind's vocabulary.
APIS = {"openai", "anthropic", "native", "vllm", "sglang", "cohere", "tei", "ollama", "sagemaker", "realtime"}
ORDINARY = APIS | {"none", "random", "priority", "plain", "standard", "transformers", "default", "torch", "json", "cpu", "cuda"}
ORDINARY |= {"int4", "int8", "fp8", "safetensors", "log"}  # types of numbers, a file format, a function
ORDINARY |= {"single", "local", "suffix", "image", "video", "audio", "host", "disk", "group", "ipc"}
ORDINARY |= {"cls", "last", "mean", "max"}  # a token and reductions
ORDINARY |= {"file", "http", "otlp"}  # of a disk, protocols
# "path: name" -> why it stands outside of its family's folder.
NAMED_ELSEWHERE = {
    "frame/config/section.py: fp8": "the type of a KV cache, which users may write so",
    "frame/checkpoint/config_defaults.py: llama": "the type of a nested configuration in config.json",
    "frame/entrypoints/offline/adapters.py: lora": "the parameter that names a request's adapter",
    "frame/config/schema.py: lru": "the schema's default eviction policy; a default has to name one",
    "packages/frame-automata/frame_automata/backend.py: combined": "the backend that compiles what the automata do not",
    **dict.fromkeys(
        (
            "packages/frame-quantize/frame_quantize/quantize.py: awq",
            "packages/frame-quantize/frame_quantize/quantize.py: gptq",
            "packages/frame-quantize/frame_quantize/schemes.py: awq",
            "packages/frame-quantize/frame_quantize/schemes.py: gptq",
        ),
        "a method to quantize weights, after which a weight format is named",
    ),
    **{
        f"packages/frame-gguf/frame_gguf/names.py: {name}": "an architecture of GGUF, after which model plugins are named too"
        for name in ("llama", "qwen2", "qwen3")
    },
    "frame/kernels/__init__.py: triton": "the library, after which one of the backends is named",
    "frame/kernels/cache.py: triton": "the library, whose cache it is",
    "frame/config/schema.py: fcfs": "the schema's default scheduling policy; a default has to name one",
    **{
        f"frame/checkpoint/model_config.py: {name}": "a model_type of config.json, whose silence on sliding windows has a meaning"
        for name in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
    },
    **{
        f"frame/checkpoint/config_defaults.py: {name}": "a model_type of config.json, after which model plugins are named too"
        for name in (
            "bert",
            "cohere",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "falcon_h1",
            "glm4_moe",
            "gpt_oss",
            "kimi_linear",
            "minimax_m2",
            "mistral",
            "mixtral",
            "nemotron_h",
            "olmo2",
            "phi3",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "qwen3_next",
            "roberta",
        )
    },
}


def records() -> list[PluginRecord]:
    """The records that this distribution registers."""
    registry = load_registry(installed=False)
    assert registry.broken == []
    return [record for kind in KINDS for record in registry.records(kind)]


def hook_problems(names: Iterable[tuple[str, str | None]]) -> Iterator[str]:
    for name, documentation in names:
        if not HOOK_NAME.match(name):
            yield f"{name} is neither register_<plural> nor on_<event>"
        if not (documentation or "").strip():
            yield f"{name} has no docstring"


def crowded_targets(found: Iterable[PluginRecord]) -> list[str]:
    """Modules that hold more than one registered class: a plugin is a file (or a folder)."""
    by_module: dict[str, set[str]] = {}
    for record in found:
        by_module.setdefault(record.target.partition(":")[0], set()).add(record.target)
    return [f"{name} holds {len(targets)} registered classes" for name, targets in by_module.items() if len(targets) > 1]


def missing_targets(found: Iterable[PluginRecord], modules: Iterable[Module]) -> list[str]:
    """Targets whose module or class is not in the source; read without importing them."""
    known = {each.name: {node.name for node in classes(each.tree)} | _assigned(each.tree) for each in modules}
    return [f"{record.kind} {record.name}: {record.target} does not exist" for record in found if not _exists(record.target, known)]


def _assigned(tree: ast.Module) -> set[str]:
    """Names of the module that a call makes, such as the extension of an API's routers."""
    calls = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    return {target.id for node in calls for target in node.targets if isinstance(target, ast.Name)}


def _exists(target: str, known: dict[str, set[str]]) -> bool:
    name, _, attribute = target.partition(":")
    return attribute in known.get(name, set())


def stray_names(modules: Iterable[Module], names: dict[str, str]) -> list[str]:
    """String literals that are (or, for words with an underscore, contain) a plugin's name, outside
    of its folder. `names` maps a name to its family's folder."""
    found = []
    for each in modules:
        docstrings = _docstrings(each.tree)
        for node in walk(each.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found += [
                    f"{each.at(node)}: names the plugin {name!r}"
                    for name, folder in names.items()
                    if not each.path.startswith(folder) and _mentions(node.value, name) and f"{each.path}: {name}" not in NAMED_ELSEWHERE
                ]
    return found


def _mentions(text: str, name: str) -> bool:
    if "_" in name and not text.startswith("frame."):
        return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None
    return text == name


def _docstrings(tree: ast.Module) -> set[int]:
    return {id(node.value) for node in walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}


def test_hooks_are_well_named_and_fit_on_a_screen() -> None:
    hooks = [(name, inspect.getdoc(value)) for name, value in vars(hookspecs).items() if hasattr(value, f"{PROJECT}_spec")]
    assert len(hooks) >= len(KINDS)
    assert list(hook_problems(hooks)) == []
    assert len(Path(hookspecs.__file__).read_text().splitlines()) <= ONE_SCREEN


def test_every_kind_has_a_hook_and_a_folder() -> None:
    assert {kind.hook for kind in KINDS.values()} <= set(vars(hookspecs))
    assert set(FOLDERS) == set(KINDS)


def test_built_in_plugins_register_through_entry_points() -> None:
    assert records(), "the package's own entry points bring no plugin"
    assert {record.distribution for record in records()} == {FRAME_DISTRIBUTION}


def test_a_plugin_is_a_file() -> None:
    assert crowded_targets(records()) == []


def test_targets_exist() -> None:
    assert missing_targets(records(), package()) == []


def test_targets_lie_in_their_familys_folder() -> None:
    wrong = [r.target for r in records() if not r.target.replace(".", "/").startswith(FOLDERS[r.kind])]
    assert wrong == []


def test_every_record_says_what_it_is() -> None:
    assert [f"{r.kind} {r.name}" for r in records() if not r.summary] == []


def test_plugin_names_stay_at_home() -> None:
    names = {record.name: FOLDERS[record.kind] for record in records() if record.name not in ORDINARY}
    elsewhere = (*FOLDERS.values(), "frame/testing/")
    outside = [each for each in package() if not each.path.startswith(elsewhere)]
    assert stray_names(outside, names) == []


def test_named_elsewhere_is_needed() -> None:
    texts = {each.path: each.text for each in package()}
    for entry, reason in NAMED_ELSEWHERE.items():
        path, name = entry.split(": ")
        assert f'"{name}"' in texts[path], f"{entry} can go"
        assert len(reason) > 20


def test_manifests_are_listed_once() -> None:
    projects = [tomllib.loads(path.read_text()) for path in (ROOT / "pyproject.toml", *EXTENSIONS.glob("*/pyproject.toml"))]
    entries = [name for project in projects for name in project["project"]["entry-points"].get("frame", {}).values()]
    manifests = {each.name for each in package() if each.path.endswith("__init__.py") and "@hookimpl" in each.text}
    assert Counter(entries) == Counter(manifests)


def test_checks_find() -> None:
    one = PluginRecord("grammar_backend", "one", "frame.plugins.grammar_backends.one:One", "grammar_backend/1")
    two = PluginRecord("grammar_backend", "two", "frame.plugins.grammar_backends.one:Two", "grammar_backend/1")
    source = module("class One: ...", "frame.plugins.grammar_backends.one")
    assert crowded_targets([one, two])
    assert missing_targets([one, two], [source]) == ["grammar_backend two: frame.plugins.grammar_backends.one:Two does not exist"]
    assert len(list(hook_problems([("register_x", "Adds."), ("on_x", "")]))) == 2
    names = {"my_backend": "frame/attention_backends/", "lru": "frame/plugins/eviction_policies/"}
    assert stray_names([module("if name == 'lru': ...")], names)
    assert stray_names([module("error = 'use my_backend instead'")], names)
    assert not stray_names([module("'lru'", path="frame/plugins/eviction_policies/lru.py")], names)
    assert not stray_names([module('"""my_backend."""\nx = "lrud"')], names)


def bounds() -> dict[str, set[str]]:
    """The versions that the project file allows, by distribution: dependencies and extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for extra in project["optional-dependencies"].values() for line in extra] + project["dependencies"]
    found: dict[str, set[str]] = {}
    for requirement in map(Requirement, lines):
        found.setdefault(requirement.name, set()).add(str(requirement.specifier))
    return found


def test_records_require_the_versions_of_the_project_file() -> None:
    allowed = bounds()
    wrong = [
        f"{record.kind} {record.name} requires {text}, the project file says {sorted(allowed.get(requirement.name, ()))}"
        for record in records()
        for text in record.requires
        for requirement in [Requirement(text)]
        if allowed.get(requirement.name) != {str(requirement.specifier)}
    ]
    assert wrong == []
