"""`GrammarCompiler`: compiles requests' grammars off the engine's loop; a request waits here until its grammar is ready.

A grammar that does not compile ends its own request and nothing else. Knows no scheduler; masks are filled there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from frame.core.messages import Finish, FinishReason, Generate, Tokens

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import Grammar, GrammarBackend

BAD_GRAMMAR = "invalid grammar"  # prefix of `Finish.error`, so that the HTTP side answers 400


class GrammarCompiler:
    """One thread compiles, in order of arrival. `len` is the number of requests that wait.

    `make` gives the backend; it is called in that thread for the first grammar, because a backend may take seconds to load and most
    servers never need it.
    """

    def __init__(self, make: Callable[[], GrammarBackend]) -> None:
        self._make = make
        self._backend: GrammarBackend | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._waiting: dict[str, tuple[Generate, Future[Grammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, message: Generate) -> bool:
        """Whether the request has a grammar; if so it is compiled, and comes back from `ready`."""
        if message.params.grammar is None:
            return False
        self._waiting[message.rid] = (message, self._pool.submit(self._compile, *message.params.grammar))
        return True

    def _compile(self, kind: str, source: str) -> Grammar:
        if self._backend is None:
            self._backend = self._make()
        return self._backend.compile(kind, source)

    def ready(self) -> list[tuple[Generate, Grammar | Finish]]:
        """Requests whose grammar is there, or why it is not."""
        done = [rid for rid, (_, future) in self._waiting.items() if future.done()]
        found: list[tuple[Generate, Grammar | Finish]] = []
        for rid in done:
            message, future = self._waiting.pop(rid)
            error = future.exception()
            found.append((message, future.result() if error is None else Finish("error", error=f"{BAD_GRAMMAR}: {error}")))
        return found

    def drop(self, rids: Sequence[str], reason: FinishReason) -> Tokens | None:
        """Forget these requests (all, when empty); returns their ends."""
        gone = [rid for rid in (rids or list(self._waiting)) if rid in self._waiting]
        for rid in gone:
            self._waiting.pop(rid)[1].cancel()
        if not gone:
            return None
        return Tokens(rids=gone, token_ids=[[] for _ in gone], finishes={i: Finish(reason) for i in range(len(gone))})

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
