"""Attention backends: the suite, its cases and the arithmetic that results are compared with."""
