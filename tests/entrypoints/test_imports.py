"""What a start imports: nothing that takes seconds and is not used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

START = """
import sys
from frame import Engine
head = {"quantization": "int4", "load_format": "dummy", "plugins_options": {"weight_format/int4": {"head": True}}}
for path, keys in zip(sys.argv[1:], ({}, head), strict=True):
    Engine(model=path, max_model_len=64, max_total_tokens=256, threads=1, skip_tokenizer_init=True, **keys).close()
print(*sorted({"transformers", "sympy", "torch._dynamo", "torch._inductor", "fastapi", "scipy"} & set(sys.modules)))
"""


def test_an_engine_starts_without_compilers_and_algebra(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    command = [sys.executable, "-c", START, str(checkpoint), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
