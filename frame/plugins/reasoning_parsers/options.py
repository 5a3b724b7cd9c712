"""Settings of the in-tree reasoning parsers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ThinkTagsOptions(BaseModel):
    """The tags, and whether the prompt already holds the opening one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    open: str = Field(default="<think>", min_length=1, description="What starts the thinking.")
    close: str = Field(default="</think>", min_length=1, description="What ends it.")
    starts_open: bool = Field(default=False, description="The chat template opens the thinking, so answers start inside of it.")
    opens_itself: bool = Field(
        default=True, description="The model may open the thinking where the template does not, also before an answer of a prescribed form."
    )


class DeepSeekR1Options(ThinkTagsOptions):
    """As think-tags, for answers that start inside of the thinking whatever the prompt's end."""

    starts_open: bool = Field(default=True, description="Text before the closing tag is thinking, also where nothing opened it.")


class MistralOptions(ThinkTagsOptions):
    """As think-tags, with Mistral's marks."""

    open: str = Field(default="[THINK]", min_length=1, description="What starts the thinking.")
    close: str = Field(default="[/THINK]", min_length=1, description="What ends it.")
