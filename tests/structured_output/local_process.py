"""A `CallProcess` in this process: the messages are encoded and decoded, and nothing travels."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from frame.core.interfaces.sampling import CompiledGrammar, Grammar, GrammarBackend
from frame.structured_output.call_processes import NUM_BUFFERS, ProcessPool
from frame.structured_output.served_calls import JumpSettings, ServedCalls


class LocalProcess:
    """`is_alive`: False ends it; `dies_in`: messages after which it ends, -1: none; `is_stopped`:
    there are no replies; `dies_at_load`: the name of a grammar."""

    def __init__(self, calls: ServedCalls) -> None:
        self.calls = calls
        self._replies: deque[bytes] = deque()
        self.is_alive, self.is_stopped, self.is_closed = True, False, False
        self.dies_in, self.dies_at_load, self.num_loads = -1, "", 0

    def load(self, message: bytes, seconds: float) -> bytes | None:
        self.num_loads += 1
        if self.dies_at_load and self.dies_at_load.encode() in message:
            self.is_alive = False
        return self.calls.load_grammar(message) if self.is_alive else None

    def send(self, message: bytes) -> None:
        if self.dies_in == 0:
            self.is_alive = False
        self.dies_in -= 1
        if self.is_alive:
            self.calls.answer(message, self._replies.append)

    def receive(self, seconds: float) -> bytes | None:
        if self.is_stopped:
            time.sleep(seconds)
            return None
        return self._replies.popleft() if self.is_alive else None

    def close(self) -> None:
        self.is_alive, self.is_closed = False, True


class Made:
    """A compiled grammar whose requests get what `make` returns."""

    def __init__(self, make: Callable[[], Grammar]) -> None:
        self.make, self.num_bytes = make, 1000

    def start(self) -> Grammar:
        return self.make()


class ByName(GrammarBackend):
    """Compiles the name of a grammar. ValueError for others."""

    def __init__(self, grammars: dict[str, Callable[[], Grammar]]) -> None:
        self.compiled = {name: Made(make) for name, make in grammars.items()}

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        if source == "odd":
            raise KeyError(source)
        if source not in self.compiled:
            raise ValueError(f"{kind} is not known")
        return self.compiled[source]


def make_pool(
    grammars: dict[str, Callable[[], Grammar]], vocab_size: int, count: int, jumps: JumpSettings | None = None, rows: int = 16
) -> tuple[ProcessPool, list[Any]]:
    """A pool and its processes, which grow as some are replaced."""
    masks, started = np.zeros((NUM_BUFFERS, rows, -(-vocab_size // 32)), np.int32), list[Any]()

    def start() -> LocalProcess:
        started.append(LocalProcess(ServedCalls(ByName(grammars), masks, vocab_size, 1, jumps)))
        return started[-1]

    return ProcessPool(start, count, masks), started
