"""Attention of the batch-invariant mode: `split_kernel.py` computes runs of keys at absolute
positions and merges them, `split_launch.py` launches it.

Used by the `triton` backend under `RankContext.deterministic`.
"""
