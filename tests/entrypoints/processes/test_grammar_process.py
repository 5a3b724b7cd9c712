"""Grammars that take too long or too much end their process and nothing else; the next ones get
another."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from frame import Engine, SamplingParams
from frame.config.hardware import Hardware
from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.grammar_process import GrammarProcess

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what a process holds")
PATIENCE, TIMEOUT = 300.0, 3.0  # seconds of the clock for compilations that succeed, also beside other work; for the others
COMMAND = (sys.executable, str(Path(__file__).with_name("fake_grammar_process.py")))


def make_process(seconds: float) -> GrammarProcess:
    config = FrameConfig.model_validate({"sampling": {"grammar_timeout": seconds, "grammar_memory": 64 << 20}})
    return GrammarProcess(prepare(config, Hardware(cpu_cores=1, memory_bytes=8 << 30)).resolved, COMMAND)


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    with contextlib.closing(make_process(PATIENCE)) as made:
        yield made


@pytest.fixture(scope="module")
def hurried() -> Iterator[GrammarProcess]:
    with contextlib.closing(make_process(TIMEOUT)) as made:
        yield made


def pid_of(process: GrammarProcess) -> int:
    return int(process.compile("regex", "x").rsplit(b":", 1)[1])


def test_one_process_compiles_one_after_another(process: GrammarProcess) -> None:
    pid = pid_of(process)
    assert process.compile("regex", "print") == f"regex:print:{pid}".encode()
    for source, words in (("bad", "^unbalanced bracket$"), ("odd", "regex does not compile with .*: KeyError"), ("large", "memory")):
        with pytest.raises(ValueError, match=words):
            process.compile("regex", source)
    assert pid_of(process) == pid


@pytest.mark.slow
def test_loading_a_library_is_not_limited(process: GrammarProcess, hurried: GrammarProcess) -> None:
    """The compilation that needs it is, before and after."""
    pid = pid_of(process)
    assert process.compile("regex", "load") == f"regex:load:{pid}".encode()
    assert process.cpu_seconds < 0.3
    with pytest.raises(ValueError, match="memory"):
        process.compile("regex", "load, then large")
    assert pid_of(process) == pid
    with pytest.raises(ValueError, match=f"takes longer than {TIMEOUT:g} s"):
        hurried.compile("regex", "load, then hang")


@pytest.mark.slow
@LINUX
def test_a_process_that_keeps_memory_is_replaced(process: GrammarProcess, caplog: pytest.LogCaptureFixture) -> None:
    pid = pid_of(process)
    assert process.compile("regex", "keep") == f"regex:keep:{pid}".encode()
    assert "the grammar process still holds 4" in caplog.text
    assert pid_of(process) != pid


@pytest.mark.slow
@LINUX
def test_the_limit_of_a_process_bounds_compilations() -> None:
    config = FrameConfig.model_validate({"sampling": {"grammar_memory": 2 << 30}, "server": {"max_process_memory": 400 << 20}})
    process = GrammarProcess(prepare(config, Hardware(cpu_cores=1, memory_bytes=8 << 30)).resolved, COMMAND)
    try:
        pid = pid_of(process)
        with pytest.raises(ValueError, match=r"more memory to compile than sampling.grammar_memory or server.max_process_memory allows"):
            process.compile("regex", "large")
        assert pid_of(process) == pid
    finally:
        process.close()


@pytest.mark.slow
@pytest.mark.parametrize(("source", "words"), [("hang", f"takes longer than {TIMEOUT:g} s"), ("die", "crashes the grammar compiler")])
def test_a_process_that_ended_is_followed_by_another(hurried: GrammarProcess, source: str, words: str) -> None:
    pid = pid_of(hurried)
    with pytest.raises(ValueError, match=words):
        hurried.compile("regex", source)
    assert pid_of(hurried) != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_closed_is_closed(process: GrammarProcess) -> None:
    pid = pid_of(process)
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="the engine is stopping"):
        process.compile("regex", "x")


@pytest.mark.slow
def test_the_process_ends_with_its_engine(tmp_path: Path) -> None:
    """Also in the middle of a compilation, which may take far longer than this test."""
    program = f"""
from frame.config.schema import FrameConfig
from frame.config.hardware import Hardware
from frame.entrypoints.processes.grammar_process import GrammarProcess
from frame.entrypoints.configuration.prepare import prepare
config = FrameConfig.model_validate({{"sampling": {{"grammar_timeout": 500.0}}}})
process = GrammarProcess(prepare(config, Hardware(cpu_cores=1, memory_bytes=8 << 30)).resolved, {COMMAND!r})
print(process.compile("regex", "x").rsplit(b":", 1)[1].decode(), flush=True)
process.compile("regex", "hang")
"""
    engine = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    grammars = psutil.Process(int(engine.stdout.readline()))
    engine.kill()
    engine.wait()
    engine.stdout.close()
    try:
        grammars.wait(60)
    except psutil.TimeoutExpired:
        grammars.kill()
        raise


@pytest.mark.slow
def test_a_bomb_is_its_own_requests_error() -> None:
    pytest.importorskip("xgrammar")
    pattern = {"type": "string", "pattern": "^(a|b){1,200}$"}
    bomb = json.dumps({"type": "object", "properties": {f"k{i}": pattern for i in range(600)}})
    with Engine(model="frame-tiny", grammar_backend="xgrammar", sampling_grammar_timeout=1.0, max_running_requests=4) as engine:
        asked = [SamplingParams(json_schema=bomb, max_tokens=4), SamplingParams(regex="(yes|no)!", max_tokens=20)]
        ended, replied, plain = engine.generate(["a", "b", "c"], [*asked, SamplingParams(max_tokens=4)])
        assert ended.finish_reason == "error"
        assert ended.error is not None and ended.error.startswith("invalid grammar: json_schema takes ")
        assert replied.text in ("yes!", "no!")
        assert len(plain.token_ids) == 4 or plain.finish_reason == "stop"
