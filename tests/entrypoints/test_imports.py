"""What a start imports: nothing that takes seconds and is not used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

START = """
import sys
from frame import Engine
Engine(model=sys.argv[1], max_model_len=64, max_total_tokens=256, threads=1, skip_tokenizer_init=True).close()
print(*sorted({"transformers", "sympy", "torch._dynamo", "torch._inductor", "fastapi", "scipy"} & set(sys.modules)))
"""


def test_an_engine_starts_without_compilers_and_algebra(checkpoint: Path) -> None:
    done = subprocess.run([sys.executable, "-c", START, str(checkpoint)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
