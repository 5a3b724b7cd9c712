"""The lines of a start: the printed phases add up to the printed total."""

from __future__ import annotations

import re
import time

import pytest

from frame.entrypoints.processes.launch import find_process_start, wait_ready
from tests.entrypoints.serving import RunningServer

PART = re.compile(r"(?:\(|, )(\w+) (-?[\d.]+) s")


def add_up(line: str) -> tuple[float, float]:
    """(the total of a line, the sum of its parts)"""
    total = re.search(r"ready after ([\d.]+) s", line)
    assert total is not None, line
    return float(total[1]), round(sum(float(seconds) for _, seconds in PART.findall(line)), 1)


class FakeDeployment:
    """The engine is ready at once, and says that its phases took so long."""

    def __init__(self, phases: dict[str, float]) -> None:
        from frame.core.messages import Ready

        self.names = ["engine"]
        self.transport = self
        self._ready = Ready(process="engine", pid=1, data={"phases": phases, "max_total_tokens": 5})

    def receive(self, timeout: float) -> list[object]:
        return [self._ready]

    def handle_message(self, message: object) -> None:
        return

    def get_start_error(self) -> None:
        return None


@pytest.mark.parametrize("phases", [{"imports": 1.04, "load": 0.26, "warm_up": 0.349}, {"imports": 2.0}, {f"p{i}": 0.14 for i in range(9)}])
def test_the_printed_parts_add_up(phases: dict[str, float]) -> None:
    lines: list[str] = []
    wait_ready(FakeDeployment(phases), lines.append, started=time.perf_counter() - 4.26)  # type: ignore[arg-type]
    (line,) = lines
    total, parts = add_up(line)
    assert total == parts >= 4.2
    assert [name for name, _ in PART.findall(line)] == [*phases, "other"]


@pytest.mark.slow
def test_the_start_of_a_server_counts_from_its_process(checkpoint) -> None:  # type: ignore[no-untyped-def]
    """The engine's process imports torch while the main process still reads its configuration."""
    assert find_process_start() < time.perf_counter()
    began = time.perf_counter()
    with RunningServer(checkpoint, "--max-model-len", "64", "--max-total-tokens", "512", fake=False, forked=False) as server:
        seconds = time.perf_counter() - began
        lines = [line for line in server.lines if " ready " in line or "ready on" in line]
    engine = next(line for line in lines if "engine ready after" in line)
    total, parts = add_up(engine)
    assert total == parts
    assert min(float(value) for _, value in PART.findall(engine)) >= 0, engine
    last = re.search(r"ready on \S+ after ([\d.]+) s", "".join(lines))
    assert last is not None
    assert total <= float(last[1]) <= seconds + 0.2
