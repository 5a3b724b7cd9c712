"""Manifest of the in-tree reasoning parsers: records only. Must not import the plugins."""

from __future__ import annotations

from pydantic import Field

from frame.interfaces.parsing import ParserCapabilities
from frame.registration import KindRegistry, PluginOptions, hookimpl

_HERE = "frame.plugins.reasoning_parsers"
_THINK_TAGS = "think_tags:ThinkTags"
_OTHERS = ("<|im_start|>", "<｜Assistant｜>")


class ThinkTagsOptions(PluginOptions):
    """The tags, and who writes the opening one."""

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
    for name, target, options, capabilities, summary in (
        ("think-tags", _THINK_TAGS, ThinkTagsOptions, ParserCapabilities(("</think>",), never=_OTHERS),
         "Reasoning between <think> and </think> at the start of the output."),
        ("qwen3", _THINK_TAGS, ThinkTagsOptions, ParserCapabilities(("</think>", "<|im_start|>")),
         "Qwen3, QwQ and others of ChatML: <think> and </think>."),
        ("deepseek_r1", _THINK_TAGS, DeepSeekR1Options, ParserCapabilities(("</think>", "<｜Assistant｜>")),
         "DeepSeek-R1 and V3.1: reasoning up to </think>; the opening tag may be missing."),
        ("mistral", "mistral:Mistral", MistralOptions, ParserCapabilities(("[THINK]",)),
         "Magistral: [THINK] and [/THINK], which are special tokens."),
        ("gpt-oss", "gpt_oss:GptOss", None, ParserCapabilities(("<|channel|>", "analysis")),
         "gpt-oss (harmony): the analysis channel is reasoning."),
    ):  # fmt: skip
        registry.add(name, f"{_HERE}.{target}", options=options, capabilities=capabilities, summary=summary)
