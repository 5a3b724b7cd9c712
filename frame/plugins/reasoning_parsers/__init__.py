"""Manifest of the in-tree reasoning parsers: records only. Must not import the plugins."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from frame.interfaces.parsing import ParserCapabilities
from frame.registration import KindRegistry, hookimpl

_THINK_TAGS = "frame.plugins.reasoning_parsers.think_tags:ThinkTags"
_OTHERS = ("<|im_start|>", "<｜Assistant｜>")


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


@hookimpl
def register_reasoning_parsers(registry: KindRegistry) -> None:
    """Add the in-tree reasoning parsers."""
    registry.add(
        "think-tags",
        _THINK_TAGS,
        options=ThinkTagsOptions,
        summary="Reasoning between <think> and </think> at the start of the output.",
        capabilities=ParserCapabilities(("</think>",), never=_OTHERS),
    )
    registry.add(
        "qwen3",
        _THINK_TAGS,
        options=ThinkTagsOptions,
        summary="Qwen3, QwQ and others of ChatML: <think> and </think>.",
        capabilities=ParserCapabilities(("</think>", "<|im_start|>")),
    )
    registry.add(
        "deepseek_r1",
        _THINK_TAGS,
        options=DeepSeekR1Options,
        summary="DeepSeek-R1 and V3.1: reasoning up to </think>; the opening tag may be missing.",
        capabilities=ParserCapabilities(("</think>", "<｜Assistant｜>")),
    )
    registry.add(
        "mistral",
        "frame.plugins.reasoning_parsers.mistral:Mistral",
        options=MistralOptions,
        summary="Magistral: [THINK] and [/THINK], which are special tokens.",
        capabilities=ParserCapabilities(("[THINK]",)),
    )
    registry.add(
        "gpt-oss",
        "frame.plugins.reasoning_parsers.gpt_oss:GptOss",
        summary="gpt-oss (harmony): the analysis channel is reasoning.",
        capabilities=ParserCapabilities(("<|channel|>", "analysis")),
    )
