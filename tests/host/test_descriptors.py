"""Waits for descriptors above those that `select` takes."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from frame.entrypoints.processes.grammar_process import read_message, write_message
from frame.host.descriptors import wait_readable, wait_writable

HIGH = 1500


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= HIGH + 10:
        pytest.skip("this process may not open so many files")
    low = os.pipe()
    high = tuple(fcntl.fcntl(each, fcntl.F_DUPFD, HIGH) for each in low)
    for each in low:
        os.close(each)
    yield high[0], high[1]
    for each in high:
        os.close(each)


def test_a_high_descriptor_is_waited_for(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    assert reader >= HIGH
    assert not wait_readable(reader, 0.01) and wait_writable(writer, 0.01)
    write_message(writer, b"one")
    assert wait_readable(reader) and read_message(reader, 1.0) == b"one"
    assert read_message(reader, 0.01) is None
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    assert not wait_writable(writer, 0.01)


def test_a_closed_end_is_readable() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    assert wait_readable(reader, 0.01)
    os.close(reader)
