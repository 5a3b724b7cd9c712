"""Attention in Triton kernels of this package.

`online_softmax.py` has the inner loop, `extend_kernel.py` and `decode_kernel.py` the kernels,
`extend_launch.py` and `decode_launch.py` their launchers, `backend.py` the backend. The kernels
read the page table themselves, so the cache is not copied. They depend on no model and no request.
"""
