#!/bin/sh
# Install torch for the given Python, in the build that fits the machine. A recent enough torch is kept.
# Usage: install_torch.sh …/python
set -eu
python=$1
install="$python $(dirname "$0")/install.py"

if "$python" - <<'CHECK'
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    have = tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])
except PackageNotFoundError:
    sys.exit(1)
sys.exit(have < (2, 11))
CHECK
then
    exit 0
fi

if [ "$(uname -s)" != Linux ] || { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }; then
    exec $install "torch>=2.11"
fi

echo "No GPU found: installing the CPU build of torch."
# The first command succeeds if pip has a local wheel; otherwise the second downloads one. The last is for
# networks that reach nothing but a mirror of PyPI.
$install --try "torch==2.13.0+cpu" ||
    $install --try "torch>=2.11" --index-url https://download.pytorch.org/whl/cpu || {
    echo "download.pytorch.org has no such build, or cannot be reached: installing torch from pip's index, some gigabytes." >&2
    exec $install "torch>=2.11"
}
