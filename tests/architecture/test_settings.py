"""Every setting of the schema is read: one that nothing reads promises what nobody does."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from frame.core.config import FrameConfig
from tests.architecture.source import Module, module, package

SECTIONS = {name: str(getattr(field.annotation, "__name__", "")) for name, field in FrameConfig.model_fields.items()}
BY_CLASS = {cls: name for name, cls in SECTIONS.items()}
CONFIGURATIONS = ("config", "user")  # what a whole configuration is called where a section is taken from it
SCHEMA = "frame.core.config"

# A setting whose reading this test does not see -> where it is read.
EXCEPTIONS: dict[str, str] = {
    "execution.cuda_graph_max_bs": "frame/core/resolve_graphs.py reads it by its name, beside the other size of graphs",
}


def settings() -> set[str]:
    return {f"{name}.{key}" for name, section in FrameConfig.model_fields.items() for key in section.annotation.model_fields}  # type: ignore[union-attr]


def settings_read(modules: Iterable[Module]) -> Iterator[str]:
    """The settings that are read as attributes: of `config.SECTION`, of a name that was given such a section, and of a parameter or a field
    with a section's type."""
    for found in modules:
        names = dict(_typed(found.tree))
        for _ in range(3):  # a name may be given what another one was given
            for target, value in _assigned(found.tree):
                if section := _section(value, names):
                    names[ast.unparse(target)] = section
        for node in ast.walk(found.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and (section := _section(node.value, names)):
                yield f"{section}.{node.attr}"


def _typed(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None and (section := BY_CLASS.get(ast.unparse(node.annotation))):
            yield node.arg, section
        elif isinstance(node, ast.AnnAssign) and (section := BY_CLASS.get(ast.unparse(node.annotation))):
            yield ast.unparse(node.target), section
            yield f"self.{ast.unparse(node.target)}", section


def _assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(tree):
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
    assert unread == set(EXCEPTIONS), "settings that nothing reads, or exceptions that are none any more"


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
