"""The process that compiles grammars, with a backend that does what its source says: a program for
`test_grammar_process.py`."""

from __future__ import annotations

import os
import time
from typing import Any

from frame.entrypoints.processes.grammar_process import main


class Obedient:
    def compile(self, kind: str, source: str) -> Any:
        if source == "hang":
            while True:
                time.sleep(60)
        if source == "die":
            os._exit(1)
        if source == "bad":
            raise ValueError("unbalanced bracket")
        if source == "odd":
            raise KeyError("what")
        if source == "large":
            return bytes(1 << 29)
        if source == "print":
            print("libraries do that", flush=True)
            os.write(1, b"and below Python")
        return f"{kind}:{source}:{os.getpid()}".encode()

    def dump(self, compiled: Any) -> bytes:
        return bytes(compiled)


if __name__ == "__main__":
    main(lambda resolved, registry: Obedient())  # type: ignore[arg-type, return-value]
