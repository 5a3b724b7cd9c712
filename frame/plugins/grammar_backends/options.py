"""Options of the grammar backends. Imports no backend."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GrammarOptions(BaseModel):
    """Limits of a source, and the whitespace of JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_source_chars: int = Field(default=64 * 1024, ge=1, description="Longest schema, expression or grammar.")
    max_depth: int = Field(default=64, ge=1, le=512, description="Deepest nesting of a JSON schema, and of groups of an expression.")
    any_whitespace: bool = Field(default=False, description="Allow whitespace between the parts of JSON, if the request does not say.")
    max_whitespace: int = Field(
        default=32, ge=1, le=1024, description="Maximum whitespace characters in one place; some models repeat them without end."
    )


class XGrammarOptions(GrammarOptions):
    """Options of backends that use xgrammar."""

    threads: int = Field(default=1, ge=1, le=64, description="Threads of one compilation.")
