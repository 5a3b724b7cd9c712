"""GEMMs of token rows with dense weights.

Used by model layers, MoE runners and quantization. Must not know a layer or a checkpoint format.
"""
