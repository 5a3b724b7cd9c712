"""Poolers: the suite."""
