"""Builds `frame_x86/_products`, a shared library that `frame_x86.kernel` opens by ctypes."""

from setuptools import Extension, setup

# AVX-512 of every function; the AMX instructions run only where the CPU has tiles.
FLAGS = ["-O3", "-std=c++17", "-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-fopenmp"]

SOURCES = ["frame_x86/products.cpp", "frame_x86/panels.cpp", "frame_x86/operations.cpp"]
HEADERS = ["frame_x86/common.h", "frame_x86/few_rows.h", "frame_x86/recording.h"]

setup(ext_modules=[Extension("frame_x86._products", SOURCES, depends=HEADERS, extra_compile_args=FLAGS, extra_link_args=["-fopenmp"])])
