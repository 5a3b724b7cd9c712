"""Damaged and hostile checkpoints end the start in one sentence that names the file and the field:
no hang, no exhausted memory, no traceback, and nothing of them is executed.

One child process loads all cases, with a limit of address space; one that takes too long is killed,
and the next begins after that case.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from frame.host.descriptors import wait_readable
from frame.testing.checkpoints import make_checkpoint
from tests.fuzz.checkpoint_cases import CONFIGS, FILES, FLIPPED, SAFETENSORS, TOKENIZERS, Case
from tests.fuzz.quantized_cases import BITSANDBYTES, FLIPPED_GGUF, FLIPPED_NF4, GGUF, TORCHAO, write_gguf, write_nf4

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [ROOT / "packages" / name for name in ("frame-bitsandbytes", "frame-gguf")]
MAX_START_LENGTH = 120.0  # seconds for the child's imports on a busy machine
MAX_CASE_LENGTH = 60.0  # seconds; most take less than one
MAX_SENTENCE_LENGTH = 1000  # characters


class Loader:
    """The child process that loads checkpoints."""

    def __init__(self, whole: Path) -> None:
        self._whole = whole
        self._child: subprocess.Popen[bytes] | None = None

    def load(self, folder: Path) -> dict[str, Any]:
        """What the checkpoint gave; the error "hang" or "died" where the child gave nothing."""
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.fuzz.load_checkpoints"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join((*map(str, (ROOT, *PACKAGES)), os.environ.get("PYTHONPATH", ""))),
                    "OMP_NUM_THREADS": "1",
                },
            )
            assert self._ask(self._whole, MAX_START_LENGTH)["error"] == ""
        return self._ask(folder, MAX_CASE_LENGTH)

    def _ask(self, folder: Path, seconds: float) -> dict[str, Any]:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{folder}\n".encode())
        child.stdin.flush()
        if wait_readable(child.stdout.fileno(), seconds) and (line := child.stdout.readline()):
            found: dict[str, Any] = json.loads(line)
            return found
        error = "hang" if child.poll() is None else "died"
        self.close()
        return {"error": error, "message": "", "events": []}

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    plain = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("plain"), **sizes)
    stored = tmp_path_factory.mktemp("stored")
    return {"plain": plain, "bitsandbytes": write_nf4(plain, stored / "bitsandbytes"), "gguf": write_gguf(plain, stored / "gguf")}


@pytest.fixture(scope="module")
def loader(bases: dict[str, Path]) -> Iterator[Loader]:
    made = Loader(bases["plain"])
    yield made
    made.close()


def judge(case: Case, found: dict[str, Any]) -> str:
    """What is wrong with the outcome of a case; empty: nothing."""
    message = found["message"]
    if found["events"]:
        return f"it caused {found['events']}"
    if " failed in " in message:  # an exception that blames the plugin
        return f"unexpected: {message:.400}"
    if not case.says or (case.may_load and not found["error"]):
        return found["error"] and f"{found['error']}: {message:.300}"
    if found["error"] != "ConfigurationError":
        return f"{found['error'] or 'it loads'}: {message:.300}"
    first = message.partition("\n")[0]  # a conflict of the configuration lists candidates after its sentence
    if ("\n" in message and "rejected" not in message) or len(first) > MAX_SENTENCE_LENGTH:
        return f"not one short sentence: {message:.1000}"
    missing = [each for each in case.says if not re.search(each, message)]
    return f"{message:.300} lacks {missing}" if missing else ""


def run(cases: Sequence[Case], loader: Loader, bases: dict[str, Path], scratch: Path) -> list[str]:
    faults = []
    for number, case in enumerate(cases):
        folder = scratch / str(number)
        shutil.copytree(bases[case.base], folder)
        case.change(folder)
        if fault := judge(case, loader.load(folder)):
            faults.append(f"{case.name}: {fault.replace(str(folder), '')}")
        shutil.rmtree(folder)
    return faults


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        *(FILES, SAFETENSORS, CONFIGS, TOKENIZERS, TORCHAO, BITSANDBYTES, FLIPPED[::3], FLIPPED_NF4[::3]),
        pytest.param([*FLIPPED, *FLIPPED_NF4], marks=pytest.mark.exhaustive),
    ],
)
def test_each_ends_in_one_sentence(cases: list[Case], loader: Loader, bases: dict[str, Path], tmp_path: Path) -> None:
    assert run(cases, loader, bases, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("flipped", [FLIPPED_GGUF[::3], pytest.param(FLIPPED_GGUF, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_gguf_files(flipped: list[Case], loader: Loader, bases: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    assert run([Case("whole", lambda folder: None, (), "gguf"), *GGUF, *flipped], loader, bases, tmp_path) == []
