"""Drafting: how many tokens a step drafts."""
