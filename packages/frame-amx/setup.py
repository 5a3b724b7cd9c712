"""Builds `frame_amx/_products`, a shared library that `frame_amx.kernel` opens by ctypes."""

from setuptools import Extension, setup

FLAGS = ["-O3", "-std=c++17", "-march=sapphirerapids", "-fopenmp"]

SOURCES = ["frame_amx/products.cpp", "frame_amx/operations.cpp"]
HEADERS = ["frame_amx/one_row.h", "frame_amx/recording.h"]

setup(
    ext_modules=[
        Extension("frame_amx._products", SOURCES, depends=HEADERS, extra_compile_args=FLAGS, extra_link_args=["-fopenmp"])
    ]
)
