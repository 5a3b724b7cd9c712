"""Routing, token alignment and grouped GEMM of mixture-of-experts layers.

Used by model layers, MoE runners and quantization. Must not know a dispatcher or a plugin.
"""
