"""The names that users import, and the configuration's schema as a user reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

import frame
from frame.config.schema import FrameConfig
from frame.config.section import Section, setting

MAX_FIELDS = 185


def unsorted_or_missing(module: Any) -> list[str]:
    names = list(module.__all__)
    problems = [] if names == sorted(names) else ["__all__ is not sorted"]
    return problems + [name for name in names if not hasattr(module, name)]


def fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    """All leaves of the schema, by dotted key."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields(inner, f"{path}{name}.")
        else:
            yield path + name, field


def undocumented(model: type[BaseModel]) -> list[str]:
    problems = []
    for key, field in fields(model):
        if field.is_required():
            problems.append(f"{key} has no default")
        if not field.description or not field.description.rstrip().endswith("."):
            problems.append(f"{key} has no description (a sentence)")
    return problems


def clashing_flags(model: type[BaseModel]) -> list[str]:
    seen: dict[str, str] = {}
    problems = []
    for key, field in fields(model):
        flag = (field.json_schema_extra or {}).get("flag") or key.replace(".", "-").replace("_", "-")
        if flag in seen:
            problems.append(f"--{flag} is both {seen[flag]} and {key}")
        seen[flag] = key
    return problems


def test_public_names() -> None:
    assert unsorted_or_missing(frame) == []
    assert {"Engine", "SamplingParams", "hookimpl"} <= set(frame.__all__)


def test_dir_lists_public_names_and_unknown_ones_fail() -> None:
    assert set(frame.__all__) <= set(dir(frame))
    assert not hasattr(frame, "no_such_name")


def test_every_field_has_default_and_description() -> None:
    assert undocumented(FrameConfig) == []


def test_schema_stays_small() -> None:
    assert len(list(fields(FrameConfig))) <= MAX_FIELDS


def test_flags_are_unique() -> None:
    assert clashing_flags(FrameConfig) == []


def test_checks_find() -> None:
    class Bad(Section):
        one: int
        two: int = setting(1, "no full stop")

    class Twice(Section):
        one: int = setting(1, "One.", flag="x")
        two: int = setting(1, "Two.", flag="x")

    class Listed:
        __all__ = ("b", "a")
        a = 1

    assert len(undocumented(Bad)) == 3
    assert clashing_flags(Twice)
    assert unsorted_or_missing(Listed) == ["__all__ is not sorted", "b"]
