"""Norm, activation and rotary-embedding kernels. They are memory-bound: one read and one write per
element."""
