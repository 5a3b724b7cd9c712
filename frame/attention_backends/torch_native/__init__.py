"""Attention in PyTorch operations: `plan.py` groups rows and finds their cache slots on the host, `backend.py` computes.

Knows no kernel of its own; runs wherever PyTorch does.
"""
