"""Norm, activation and rotary-embedding kernels. They are memory-bound: one read and one write per
element.

Used by model layers, attention backends, MoE runners and quantization. Must not know a layer.
"""
