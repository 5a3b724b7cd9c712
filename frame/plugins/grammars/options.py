"""Settings of the in-tree grammar backends; imports no backend."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GrammarOptions(BaseModel):
    """What bounds a source, and how free JSON's whitespace is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_source_chars: int = Field(default=64 * 1024, ge=1, description="Longest schema, expression or grammar.")
    max_depth: int = Field(default=64, ge=1, le=512, description="Deepest nesting of a JSON schema.")
    any_whitespace: bool = Field(
        default=False, description="Whether JSON may hold whitespace between its parts where the request does not say."
    )
    max_whitespace: int = Field(
        default=32, ge=1, le=1024, description="Most whitespace characters in one place; without a bound some models never go on."
    )


class XGrammarOptions(GrammarOptions):
    """xgrammar's own."""

    threads: int = Field(default=1, ge=1, le=64, description="Threads of one compilation.")
