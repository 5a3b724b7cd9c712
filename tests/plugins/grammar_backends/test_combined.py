"""The backend `combined` loads xgrammar, and torch with it, for a grammar that needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from contextlib import contextmanager
from frame.core.interfaces.sampling import GrammarContext
from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.text.tokenizer import Tokenizer
from frame.plugins.grammar_backends.combined import CombinedBackend

@contextmanager
def without_limits():
    print("suspended", "torch" in sys.modules)
    yield
    print("loaded", "torch" in sys.modules)

backend = CombinedBackend(GrammarContext(Tokenizer.load(find_model(EMBEDDED), trust_remote_code=False), 2048, without_limits))
backend.compile("json_schema", '{"type": "object"}')
for _ in range(2):
    backend.compile("json_schema", '{"type": "array", "uniqueItems": true, "items": {"enum": [1, 2]}}')  # llguidance rejects it
"""


@pytest.mark.slow
def test_xgrammar_is_loaded_on_first_use_and_without_limits() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["suspended False", "loaded True", ""]
