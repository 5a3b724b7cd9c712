"""Checks the fields of a checkpoint's `quantization_config`. Used by the weight formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from frame.core.errors import CheckpointError
from frame.quantization.patterns import find_expression


def read_object(value: Any, where: str) -> Mapping[str, Any]:
    """A JSON object; {} for null. Raises CheckpointError for another type."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where} is {value!r}; a JSON object is expected: correct config.json.")
    return value


def read_patterns(value: Any, where: str) -> tuple[str, ...]:
    """Patterns of layer names, see `patterns.matches`; () for null. Raises CheckpointError for
    another type than a list of strings, and for a wrong regular expression."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(pattern, str) for pattern in value):
        raise CheckpointError(f"{where} is {value!r}; a list of strings is expected: correct config.json.")
    for pattern in value:
        if (expression := find_expression(pattern)) is not None:
            check_expression(expression, where)
    return tuple(value)


def check_expression(expression: str, where: str) -> None:
    """Raises CheckpointError for a wrong regular expression."""
    try:
        re.compile(expression)
    except re.error as error:
        raise CheckpointError(f"{where} has the wrong regular expression {expression!r} ({error}): correct config.json.") from None
