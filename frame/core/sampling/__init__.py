"""Sampling: turns logits into tokens."""
