"""What a start imports: nothing that takes seconds and is not used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import sys
from frame import Engine
head = {"quantization": "int4", "load_format": "dummy", "plugins_options": {"weight_format/int4": {"head": True}}}
for path, keys in zip(sys.argv[1:], ({}, head), strict=True):
    Engine(model=path, max_model_len=64, max_total_tokens=256, threads=1, skip_tokenizer_init=True, **keys).close()
print(*sorted({"transformers", "sympy", "torch._dynamo", "torch._inductor", "fastapi", "scipy"} & set(sys.modules)))
"""

SERVE = """
import sys
from frame.entrypoints.cli.serve import run
from frame.entrypoints.configuration.sources import load_config
from frame.entrypoints.http import start

def start_children(*arguments):
    print(*sorted({"fastapi", "uvloop", "torch", "tokenizers", "prometheus_client"} & set(sys.modules)), "|")
    raise RuntimeError("the processes are started")

start.Deployment = start_children
sys.exit(run(load_config(None, {"port": 0})))
"""


@pytest.mark.slow
def test_an_engine_starts_without_compilers_and_algebra(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    command = [sys.executable, "-c", START, str(checkpoint), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.split() == []


def test_a_server_starts_its_processes_before_it_imports_http() -> None:
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, timeout=500, check=False)
    assert done.stdout.split() == ["|"], done.stderr
    assert (done.returncode, "the processes are started" in done.stderr) == (1, True)
