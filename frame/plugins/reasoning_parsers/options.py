"""Options of the in-tree reasoning parsers. Imports no parser."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ThinkTagsOptions(BaseModel):
    """The tags, and who writes the opening one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    open: str = Field(default="<think>", min_length=1, description="The tag that starts the reasoning.")
    close: str = Field(default="</think>", min_length=1, description="The tag that ends the reasoning.")
    starts_open: bool = Field(default=False, description="The chat template writes the opening tag: output starts inside the reasoning.")
    opens_itself: bool = Field(
        default=True, description="The model may write the opening tag if the template does not, also before structured output."
    )


class DeepSeekR1Options(ThinkTagsOptions):
    """think-tags for output that always starts inside the reasoning."""

    starts_open: bool = Field(default=True, description="Text before the closing tag is reasoning, also without an opening tag.")


class MistralOptions(ThinkTagsOptions):
    """think-tags with Mistral's tags."""

    open: str = Field(default="[THINK]", min_length=1, description="The tag that starts the reasoning.")
    close: str = Field(default="[/THINK]", min_length=1, description="The tag that ends the reasoning.")
