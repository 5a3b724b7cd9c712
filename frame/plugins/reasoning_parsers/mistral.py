"""`mistral`: Magistral's reasoning, between tags that are special tokens."""

from __future__ import annotations

from frame.plugins.reasoning_parsers.think_tags import ThinkTags


class Mistral(ThinkTags):
    """think-tags whose tags, set by the options, are special tokens."""

    keeps_special_tokens = True
