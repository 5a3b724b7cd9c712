"""A process that hangs says where, whatever holds its interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

from frame.entrypoints.processes.hang_dump import DUMP_SIGNAL

HANG = """
import re, sys
from frame.entrypoints.processes.hang_dump import LoopWatchdog, enable_stack_dumps
def a_plugin_that_hangs():
    re.match("(a+)+$", "a" * 64 + "b")  # in C, without letting go of the interpreter
if sys.argv[1] == "asked":
    enable_stack_dumps()
else:
    alarm = LoopWatchdog(60)
    alarm.reset()
    alarm = LoopWatchdog(0.2)
    alarm.reset()
print("ready", flush=True)
a_plugin_that_hangs()
"""


@pytest.mark.skipif(not sys.platform.startswith(("linux", "darwin")), reason="no such signal there")
@pytest.mark.parametrize("how", ["asked", "alarm"])
def test_the_stack_is_written(how: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", HANG, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        said = b""
        while b"a_plugin_that_hangs" not in said:
            if how == "asked":
                process.send_signal(DUMP_SIGNAL)
            line = process.stderr.readline()
            assert line, said
            said += line
    finally:
        process.kill()
        process.communicate()


def test_an_alarm_that_is_closed_is_silent() -> None:
    imports = "import time\nfrom frame.entrypoints.processes.hang_dump import LoopWatchdog\n"
    code = f"{imports}a = LoopWatchdog(0.1)\na.reset()\na.close()\ntime.sleep(0.3)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stderr == b""
