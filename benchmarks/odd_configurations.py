"""Odd configurations beside transformers, in float32 on a CPU.

`python benchmarks/odd_configurations.py` prints the table of
`notes/2026-11-26-odd-configurations.md`.

Each line is a configuration of `tests/core/odd_configurations.py`, with the largest difference of
an output token's log-probability in each run, or by which the token is below the likeliest one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tests.core.odd_configurations import ODD
from tests.core.test_odd_configurations import run_odd


def main() -> None:
    torch.set_num_threads(1)
    print("| architecture | configuration | cold | in chunks | cached | speculated |\n| --- | --- | --- | --- | --- | --- |")
    for odd in ODD:
        with tempfile.TemporaryDirectory() as folder:
            found = run_odd(odd, Path(folder))
        architecture, _, options = str(odd).partition(" ")
        figures = " | ".join(f"{found[run]:.0e}" for run in ("cold", "chunked", "cached", "speculated"))
        print(f"| {architecture.removesuffix('ForCausalLM')} | `{options}` | {figures} |", flush=True)


if __name__ == "__main__":
    main()
