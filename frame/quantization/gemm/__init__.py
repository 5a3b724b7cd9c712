"""GEMM kernels, one a file."""
