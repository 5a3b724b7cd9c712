"""Every setting of the schema is read, and what messages name as a setting is one."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator

from frame.config.resolution.plugins import KEYS
from frame.config.schema import FrameConfig
from frame.core.interfaces.attention import AttentionRequirements
from frame.core.interfaces.gemm_kernel import GemmRequirements
from frame.core.interfaces.model import ModelRequirements
from frame.core.interfaces.moe import MoERequirements
from frame.core.interfaces.weight_format import FormatRequirements
from frame.entrypoints.configuration.yaml_file import parse_yaml
from frame.plugins.loader import load_registry
from tests.architecture.source import Module, module, package, walk

SECTIONS = {name: str(getattr(field.annotation, "__name__", "")) for name, field in FrameConfig.model_fields.items()}
BY_CLASS = {cls: name for name, cls in SECTIONS.items()}
CONFIGURATIONS = ("config", "user")  # what a whole configuration is called where a section is taken from it
SCHEMA = "frame.config.schema"

# What looks like a setting in a string and is none -> what it is.
OTHER_NAMES: dict[str, str] = {
    "model.safetensors": "a file of a checkpoint",
    "model.embed_tokens": "a tensor of a checkpoint",
    "model.embed_tokens_per_layer": "a tensor of a checkpoint",
    "model.per_layer_model_projection": "a tensor of a checkpoint",
    "model.per_layer_projection_norm": "a tensor of a checkpoint",
    "model.norm": "a tensor of a checkpoint",
    "text.format": "a field of /v1/responses",
    "text.verbosity": "a field of /v1/responses",
}
NAME = re.compile(rf"(?<![\w./*`'-])(?:{'|'.join(SECTIONS)})\.[a-z_]+(?![\w(/.])")


def settings() -> set[str]:
    return {f"{name}.{key}" for name, section in FrameConfig.model_fields.items() for key in section.annotation.model_fields}  # type: ignore[union-attr]


def settings_read(modules: Iterable[Module]) -> Iterator[str]:
    """The settings that are read as attributes: of `config.SECTION`, of a name that was given such
    a section, and of a parameter or a field with a section's type."""
    for found in modules:
        names = dict(_typed(found.tree))
        for _ in range(3):  # a name may be given what another one was given
            for target, value in _assigned(found.tree):
                if section := _section(value, names):
                    names[ast.unparse(target)] = section
        for node in walk(found.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and (section := _section(node.value, names)):
                yield f"{section}.{node.attr}"


def _typed(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None and (section := BY_CLASS.get(ast.unparse(node.annotation))):
            yield node.arg, section
        elif isinstance(node, ast.AnnAssign) and (section := BY_CLASS.get(ast.unparse(node.annotation))):
            yield ast.unparse(node.target), section
            yield f"self.{ast.unparse(node.target)}", section


def _assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value


def _section(node: ast.expr, names: dict[str, str]) -> str | None:
    """Which section an expression is, if any."""
    if isinstance(node, ast.Attribute) and node.attr in SECTIONS:
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id if isinstance(node.value, ast.Name) else ""
        if owner.lstrip("_") in CONFIGURATIONS:
            return node.attr
    return names.get(ast.unparse(node)) if isinstance(node, ast.Name | ast.Attribute) else None


def test_every_setting_is_read() -> None:
    unread = settings() - set(settings_read(found for found in package() if found.name != SCHEMA))
    assert unread == set(), "nothing reads these settings: remove them, or read them as attributes of their section"


def test_the_checker_sees_reading_and_nothing_else() -> None:
    source = """
def build(resolved, text: TextSection):
    scheduler, other = resolved.user.scheduler, 3
    kept = scheduler
    print(kept.policy, text.chat_template, resolved.user.cache.prefix)
    kept.overlap = other.preemption
    config.preemption
"""
    assert set(settings_read([module(source)])) == {"scheduler.policy", "text.chat_template", "cache.prefix"}


def settings_named(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """(what a string names as a setting, where)."""
    for found in modules:
        for node in walk(found.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from ((name, found.at(node)) for name in NAME.findall(node.value))


def remedies(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """(the beginning of a `change` that a refusal proposes, where): what is written before the
    first value."""
    for found in modules:
        for node in walk(found.tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                changes = [keyword.value for keyword in node.keywords if keyword.arg == "change"]
                changes += node.args[1:2] if name == "Reason" else []
                yield from ((_beginning(change), found.at(change)) for change in changes if not isinstance(change, ast.Name))


def _beginning(node: ast.expr) -> str:
    if isinstance(node, ast.IfExp):
        return _beginning(node.body)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return str(parts[0].value) if isinstance(parts[0], ast.Constant) else ast.unparse(parts[0])


def test_what_messages_name_as_a_setting_is_one() -> None:
    known = settings() | set(OTHER_NAMES)
    assert [(name, where) for name, where in settings_named(package()) if name not in known] == []


def test_every_remedy_begins_with_a_setting() -> None:
    keys = {f"{key}:" for key in settings()} | {"{key}", "key", "model."}  # the settings of `KEYS`, and of a task's own
    wrong = [(text, where) for text, where in remedies(package()) if text.split(" ")[0] not in keys]
    assert wrong == []
    assert set(KEYS.values()) <= settings()


def test_remedies_of_our_plugins_can_be_configured() -> None:
    registry, found = load_registry(installed=False), set()
    cards = (("cpu", None), ("cuda", (7, 5)), ("cuda", (9, 0)), ("cuda", (10, 0)))
    types, tps = ("float32", "bfloat16", "float16"), (1, 4)
    asked = {
        "model": [ModelRequirements("LlamaForCausalLM", tp, task) for tp in tps for task in ("generate", "embed", "classify")],
        "weight_format": [FormatRequirements(stored) for stored in (None, "fp8", "awq")],
        "gemm_kernel": [GemmRequirements(*card, kind) for card in cards for kind in types],
        "moe_runner": [MoERequirements(*card, kind) for card in cards for kind in types],
        "moe_dispatcher": [MoERequirements(*card, kind) for card in cards for kind in types],
        "attention_backend": [
            AttentionRequirements(*card, kind, 128, 128, (512, 64) if kind == "mla" else None, dtype, kv_dtype, page)
            for card, kind, dtype, kv_dtype, page in itertools.product(
                cards, ("mha", "mla"), types, (*types, "fp8_e4m3"), (None, 1, 16, 64)
            )
        ],
    }
    for kind, requirements in asked.items():
        for record, need in itertools.product(registry.records(kind), requirements):
            found |= {reason.change for reason in record.capabilities.unsupported(need) if reason.change}
    assert len(found) > 5
    for change in found:
        key, value = change.split(": ", 1)
        section, name = key.split(".")
        FrameConfig.model_validate({section: {name: parse_yaml(value, change).value}})
