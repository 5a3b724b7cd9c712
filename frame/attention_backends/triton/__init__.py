"""Attention in Triton kernels written here: `scan.py` (the inner loop), `extend.py`, `decode.py`, and `backend.py`, which launches them.

The kernels read the page table themselves, so no copy of the cache is made. They know no model and no request.
"""
