"""Weight formats, weight sources and GEMM kernels: the suites, and random weights."""
