#!/bin/sh
# Install packages/frame-x86, the CPU kernels, for the given Python, where they can be compiled and run:
# Linux, AVX2, a C++ compiler, no NVIDIA GPU. Never fails: without them frame serves with PyTorch's products.
# Usage: install_x86.sh …/python
set -u
python=$1
root=$(dirname "$0")/..

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] && grep -qw avx2 /proc/cpuinfo || exit 0
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    exit 0
fi
if ! command -v c++ >/dev/null 2>&1; then
    echo "There is no C++ compiler (c++), so the CPU kernels of packages/frame-x86 are left out: products take 1.6 to 10 times as long. Install g++, then: make clean serve" >&2
    exit 0
fi
echo "Building the CPU kernels of packages/frame-x86: this takes about 20 seconds."
"$python" "$root/scripts/install.py" --no-deps --editable "$root/packages/frame-x86" ||
    echo "The CPU kernels of packages/frame-x86 could not be built, so products take 1.6 to 10 times as long." >&2
exit 0
