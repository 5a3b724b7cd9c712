"""Says what to do about a JSON schema that llguidance rejects. Used by the backend `llguidance`;
imports no library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable


class WorkLimitError(ValueError):
    """A grammar takes llguidance more work than its limits allow. Another library would take
    long."""


_WORK_LIMITS = re.compile(r"lexer precomputation failed|initial lexer configuration|too many expressions")
_LEAVE_OUT = "leave it out of the schema, and check the output"
_WITH_XGRAMMAR = "use the grammar backend combined, which needs the extra xgrammar"
# Keywords that xgrammar enforces; `combined` passes such schemas on to it.
_XGRAMMAR_KEYS = frozenset({"propertyNames", "unevaluatedItems", "unevaluatedProperties"})


def _explain_keys(match: re.Match[str]) -> str:
    try:
        keys = [str(key) for key in json.loads(match[1])]
    except ValueError:
        keys = [match[1]]
    remedy = _WITH_XGRAMMAR if set(keys) <= _XGRAMMAR_KEYS else _LEAVE_OUT
    return f"llguidance does not enforce {', '.join(keys)}; {remedy}"


_EXPLAINED: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"Unimplemented keys: (\[.*?\])", re.DOTALL), _explain_keys),
    (
        re.compile(r"oneOf constraints are not supported"),
        lambda match: (
            "llguidance does not enforce a oneOf whose branches overlap; use anyOf, or give each branch a property with its own const"
        ),
    ),
    (re.compile(r"Unknown format: (.*)"), lambda match: f"the format {match[1][:50]!r} is unknown; leave it out, or use pattern"),
    (
        re.compile(r"min/maxProperties only supported"),
        lambda match: (
            "llguidance does not count optional properties for minProperties and maxProperties; list all properties in required, "
            f"or {_WITH_XGRAMMAR}"
        ),
    ),
    (
        re.compile(r"Failed to generate regex for (integer|float) range"),
        lambda match: "minimum or maximum is too large; keep it within 64 bits (9223372036854775807), or leave it out",
    ),
)


def is_work_limit(message: str) -> bool:
    """Whether the library rejects a grammar for the work that it takes."""
    return _WORK_LIMITS.search(message) is not None


def explain_rejection(message: str) -> str:
    """The library's message; of a schema that it does not support, a sentence with a remedy."""
    for pattern, explain in _EXPLAINED:
        if (match := pattern.search(message)) is not None:
            return explain(match)
    return message
