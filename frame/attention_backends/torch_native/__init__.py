"""Attention in PyTorch operations: `plan.py` groups rows and locates their KV slots on the host,
`backend.py` computes.

Has no kernel of its own; runs wherever PyTorch runs.
"""
