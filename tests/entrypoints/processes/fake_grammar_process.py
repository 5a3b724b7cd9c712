"""The process that compiles grammars, with a backend that does what its source says: a program for
`test_grammar_process.py`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from frame.entrypoints.processes.grammar_process import main


class Obedient:
    def __init__(self, without_limits: Callable[[], AbstractContextManager[None]]) -> None:
        self.without_limits = without_limits
        self.kept = bytearray()

    def compile(self, kind: str, source: str) -> Any:
        if source == "hang":
            while True:
                time.sleep(60)
        if source == "keep":
            self.kept += b"x" * (40 << 20)
        if source == "die":
            os._exit(1)
        if source == "bad":
            raise ValueError("unbalanced bracket")
        if source == "odd":
            raise KeyError("what")
        if source == "large":
            return bytes(1 << 29)
        if source.startswith("load"):
            with self.without_limits():  # more memory, CPU time and clock time than a compilation may take
                loaded, end = bytes(1 << 27), time.process_time() + 0.5
                while time.process_time() < end:
                    pass
                del loaded
        if source == "load, then large":
            return bytes(1 << 29)
        if source == "load, then hang":
            time.sleep(60)
        if source == "print":
            print("libraries do that", flush=True)
            os.write(1, b"and below Python")
        return f"{kind}:{source}:{os.getpid()}".encode()

    def dump(self, compiled: Any) -> bytes:
        return bytes(compiled)


if __name__ == "__main__":
    main(lambda resolved, registry, without_limits: Obedient(without_limits))  # type: ignore[arg-type, return-value]
