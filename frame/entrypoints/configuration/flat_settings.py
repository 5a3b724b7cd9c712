"""The settings as a flat table, read from the schema: key, flag, type and description. Must not
know the sources of values."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from frame.config.schema import FrameConfig
from frame.config.section import Auto

OPTIONS_KEY = ("plugins", "options")

# Flags that set a fixed value of another setting: flag -> (setting, value, help).
ALIASES: Mapping[str, tuple[str, Any, str]] = {
    "disable-radix-cache": ("cache.prefix", "none", "Disable the prefix cache (cache.prefix: none)."),
    "language-model-only": ("media.enabled", False, "Serve the text of a model that reads media (media.enabled: false)."),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the schema.

    shape: "switch" (bool), "list", "table" or "value". choices: the allowed words, if the type is a
    Literal. is_optional: None is allowed. is_open: None is written `auto` and resolved.
    """

    key: str
    flag: str
    description: str
    default: Any
    shape: Literal["switch", "list", "table", "value"]
    choices: tuple[str, ...]
    accepts: tuple[type, ...]
    is_optional: bool
    is_open: bool

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of the setting as a keyword argument of `Engine(...)`."""
        return tuple(dict.fromkeys((self.flag.replace("-", "_"), self.key.replace(".", "_"))))


def settings() -> Iterator[Setting]:
    """Every setting, in the order of the schema."""
    for section, outer in FrameConfig.model_fields.items():
        model = outer.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            for name, field in model.model_fields.items():
                yield _setting(section, name, field)


def by_key() -> dict[str, Setting]:
    return {setting.key: setting for setting in settings()}


def by_keyword() -> dict[str, Setting]:
    """Settings by `Engine(...)` keyword; a flag takes precedence over a long name."""
    by_name: dict[str, Setting] = {}
    for position in (0, 1):
        for setting in settings():
            if position < len(setting.keywords):
                by_name.setdefault(setting.keywords[position], setting)
    return by_name


def _setting(section: str, name: str, field: FieldInfo) -> Setting:
    extra = field.json_schema_extra
    flag = extra.get("flag") if isinstance(extra, dict) else None
    leaves = list(_leaves(field.annotation))
    types_ = tuple(leaf for leaf in leaves if isinstance(leaf, type) and leaf is not type(None))
    origins = {get_origin(leaf) or leaf for leaf in leaves}
    shape: Literal["switch", "list", "table", "value"] = "value"
    if bool in origins:
        shape = "switch"
    elif tuple in origins:
        shape = "list"
    elif dict in origins:
        shape = "table"
    return Setting(
        key=f"{section}.{name}",
        flag=str(flag) if flag else f"{section}-{name}".replace("_", "-"),
        description=field.description or "",
        default=field.get_default(call_default_factory=True),
        shape=shape,
        choices=tuple(word for leaf in leaves if get_origin(leaf) is Literal for word in get_args(leaf)),
        accepts=types_,
        is_optional=type(None) in leaves,
        is_open=Auto in field.metadata,
    )


def _leaves(annotation: Any) -> Iterator[Any]:
    """The members of a type, through unions and Annotated."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _leaves(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _leaves(member)
    else:
        yield annotation
