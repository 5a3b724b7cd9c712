"""Settings of the in-tree reasoning parsers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ThinkTagsOptions(BaseModel):
    """The tags, and whether the prompt already holds the opening one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    open: str = Field(default="<think>", min_length=1, description="What starts the thinking.")
    close: str = Field(default="</think>", min_length=1, description="What ends it.")
    starts_open: bool = Field(default=False, description="The chat template opens the thinking, so answers start inside of it.")
