"""Manifest of the in-tree reasoning parsers: records only. Must not import the plugins."""

from __future__ import annotations

from frame.core.interfaces.parsing import ParserCapabilities
from frame.plugins.reasoning_parsers.options import DeepSeekR1Options, MistralOptions, ThinkTagsOptions
from frame.registration import KindRegistry, hookimpl

_THINK_TAGS = "frame.plugins.reasoning_parsers.think_tags:ThinkTags"
_OTHERS = ("<|im_start|>", "<｜Assistant｜>")


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
