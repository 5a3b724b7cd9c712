"""Parallelism: steps of several ranks, pipeline stages and placement of experts."""
