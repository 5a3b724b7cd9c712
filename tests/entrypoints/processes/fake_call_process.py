"""The process that calls grammars, with scripted ones: a program for `test_call_process.py`."""

from __future__ import annotations

import os

from frame.entrypoints.processes.grammar_process import Setup, serve_calls
from tests.core.scheduling.scripted_grammar import Free, Script
from tests.structured_output.local_process import ByName


def load(setup: Setup) -> ByName:
    print("output of a library")
    return ByName({"free": Free, "script": lambda: Script([1, 2, 1], setup.vocab_size)})


if __name__ == "__main__":
    serve_calls(load)
    os._exit(0)
