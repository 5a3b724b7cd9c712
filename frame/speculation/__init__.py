"""Drafting: how many tokens a step drafts, and the models of device drafters."""
