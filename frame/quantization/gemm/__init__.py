"""GEMM kernels, one a file, and their products."""
