"""Reads a YAML configuration file into values with their line numbers. Must not know the schema.

Scalars follow YAML 1.2: only `true` and `false` are booleans; `off`, `yes` and `12:30` are strings.
A duplicate key is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from frame.core.errors import ConfigError

_MAX_DEPTH = 16
_MAX_VALUES = 10_000
_MAX_DIGITS = 400
_MAX_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Located:
    """A value and its place, `file:line`. A mapping is a dict of str -> Located."""

    value: Any
    place: str


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema."""


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """An integer. `010` is 10; YAML 1.1 would read it as octal."""
    text = node.value
    if len(text) > _MAX_DIGITS:
        raise ConfigError(f"the number has {len(text.lower().removeprefix('0x'))} digits; the maximum is {_MAX_DIGITS}.")
    return int(text, 16) if text.lower().startswith("0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+0123456789."),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), [c if c != "\0" else "" for c in _first])


def read_yaml(path: str | Path) -> Located:
    """The mapping of the file. Raises ConfigError that names file and line."""
    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The configuration file {path} is not UTF-8 text.") from None
    located = parse_yaml(text, str(path))
    if located.value is None:
        return Located({}, located.place)
    if not isinstance(located.value, dict):
        raise ConfigError(f"{located.place}: a configuration is a mapping of sections (model: …), not a {type(located.value).__name__}.")
    return located


def parse_yaml(text: str, name: str) -> Located:
    """Parse YAML text. `name` stands for the file in places and errors."""
    loader: _Loader | None = None
    if len(text.encode(errors="replace")) > _MAX_BYTES:
        raise ConfigError(f"{name}: larger than {_MAX_BYTES} bytes, the maximum for a configuration.")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return Located(None, f"{name}:1") if node is None else _Reader(loader, name).read(node, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{name}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:  # raised by the YAML parser
        raise ConfigError(f"{name}: nested more than {_MAX_DEPTH} deep.") from None
    finally:
        if loader is not None:
            loader.dispose()


def plain(located: Located) -> Any:
    """The value without places."""
    if isinstance(located.value, dict):
        return {key: plain(value) for key, value in located.value.items()}
    return located.value


class _Reader:
    """Builds values from the nodes of one file. Values are counted as they are built, because
    aliases make one node part of many values."""

    def __init__(self, loader: _Loader, name: str) -> None:
        self._loader = loader
        self._name = name
        self._count = 0

    def read(self, node: yaml.Node, depth: int) -> Located:
        place = self._place(node)
        self._count += 1
        if self._count > _MAX_VALUES:
            raise ConfigError(f"{place}: more than {_MAX_VALUES} values, including repetitions through aliases (*name).")
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{place}: nested more than {_MAX_DEPTH} deep.")
        if isinstance(node, yaml.MappingNode):
            return Located(self._mapping(node, depth), place)
        if isinstance(node, yaml.SequenceNode):
            return Located([plain(self.read(item, depth + 1)) for item in node.value], place)
        try:
            return Located(self._loader.construct_object(node), place)  # type: ignore[no-untyped-call]
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Located]:
        entries: dict[str, Located] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            here = self._place(key_node)
            if key is None:
                raise ConfigError(f"{here}: a key must be a word.")
            if key == "<<":
                raise ConfigError(f"{here}: merge keys (<<) are not supported; write the settings out.")
            if key in entries:
                raise ConfigError(f"{here}: the key {key!r} is given twice (first at {entries[key].place}); keep one.")
            entries[key] = Located(self.read(value_node, depth + 1).value, here)
        return entries

    def _place(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"
