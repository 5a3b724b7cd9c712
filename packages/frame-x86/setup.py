"""Builds the libraries `frame_x86/_<level>`, one for each level of instructions, which
`frame_x86.library` opens by ctypes. FRAME_X86_LEVELS names those to build, separated by commas."""

import os

from setuptools import Extension, setup

AVX512 = ["-march=x86-64-v4", "-mavx512vnni"]
# The AMX instructions of the first level run only where the CPU has tiles.
LEVELS = {
    "avx512_bf16": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    "avx512": AVX512,
    "avx2": ["-march=x86-64-v3"],
}
SOURCES = ["frame_x86/plain_rows.cpp", "frame_x86/panels.cpp", "frame_x86/operations.cpp"]
TILE_SOURCE = "frame_x86/products.cpp"
HEADERS = ["common", "few_rows", "panels_avx2", "panels_avx512", "plain_rows", "recording", "simd", "streams"]

setup(
    ext_modules=[
        Extension(
            f"frame_x86._{level}",
            [*SOURCES, *([TILE_SOURCE] if level == "avx512_bf16" else [])],
            depends=[f"frame_x86/{name}.h" for name in HEADERS],
            extra_compile_args=["-O3", "-std=c++17", "-fopenmp", *flags],
            extra_link_args=["-fopenmp"],
        )
        for level, flags in LEVELS.items()
        if level in os.environ.get("FRAME_X86_LEVELS", ",".join(LEVELS)).split(",")
    ]
)
