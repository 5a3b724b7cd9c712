"""The process that calls grammars: it shares masks with the engine, and ends with it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.processes.grammar_process import GrammarCallProcess, MaskMemory
from frame.structured_output.call_messages import Filled, FillMasks, Loaded, LoadGrammar, StartRequest, pack

COMMAND = [sys.executable, "-m", "tests.entrypoints.processes.fake_call_process"]
VOCAB = 40
FILL = [
    StartRequest(0, 5, SamplingParams(regex="x"), b"", 40, (), 5.0, 0.0),
    FillMasks(pack([0]), pack([1]), 0, 2),
]


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def start(memory: MaskMemory, *arguments: str) -> GrammarCallProcess:
    return GrammarCallProcess("", VOCAB, memory, 1, None, [*COMMAND, *arguments])


def test_masks_are_shared_and_the_process_ends() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    memory = MaskMemory((2, 4, 2))
    process = start(memory)
    reply = process.load(msgspec.msgpack.encode(LoadGrammar(5, "regex", "script", b"")), 30)
    assert reply is not None and msgspec.msgpack.decode(reply, type=Loaded).num_bytes == 1000
    process.send(msgspec.msgpack.encode(FILL))
    assert (reply := process.receive(30)) is not None and msgspec.msgpack.decode(reply, type=Filled) == Filled({}, [])
    assert memory.masks[0, 1].tolist() == [1 << 3, 0]
    handles = [str(each.readlink()) for each in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert not any(handle.startswith("socket:") for handle in handles)  # it gets none of the engine's connections
    pid = process.pid
    process.close()
    del memory
    gc.collect()
    assert not Path(f"/proc/{pid}").exists() and len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_ended_or_stopped_process_has_no_reply(number: signal.Signals) -> None:
    process = start(MaskMemory((2, 4, 2)))
    os.kill(process.pid, number)
    began = time.monotonic()
    process.send(msgspec.msgpack.encode(FILL))
    assert process.receive(0.3) is None
    assert process.load(msgspec.msgpack.encode(LoadGrammar(5, "regex", "script", b"")), 0.3) is None
    assert time.monotonic() - began < 5
    process.close()
    assert process.receive(0.3) is None and process.load(b"", 0.3) is None  # it is closed
    process.send(b"")


def test_a_process_that_fails_to_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="failed to start; the cause is in the log"):
        GrammarCallProcess("", VOCAB, MaskMemory((2, 4, 2)), 1, None, [sys.executable, "-c", "raise SystemExit(3)"])


def test_one_that_no_parent_needs_ends() -> None:
    """The engine was killed: the kernel ends the process."""
    program = (
        "import os; from tests.entrypoints.processes.test_call_process import start, MaskMemory\n"
        "process = start(MaskMemory((2, 4, 2))); print(process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
