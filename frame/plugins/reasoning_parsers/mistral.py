"""Thinking as Magistral writes it: as think-tags, where the tags are special tokens."""

from __future__ import annotations

from frame.plugins.reasoning_parsers.think_tags import ThinkTags


class Mistral(ThinkTags):
    """The tags themselves are options."""

    keeps_special_tokens = True
