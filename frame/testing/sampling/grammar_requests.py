"""Checks of many requests of one grammar at a time, for the conformance suite of grammar backends.

A backend may share work between the requests of a grammar; each request gets the masks that it has
alone. Must not know a backend by name.
"""

from __future__ import annotations

import gc
import json
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from frame.testing.conformance import SkipCheck
from frame.testing.generators import require_bounded, taking_turns
from frame.testing.sampling.grammar_cases import FINITE, JSON_CASES, LOOSE, OPEN, Language

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import Grammar
    from frame.interfaces.known_masks import KnownMask
    from frame.testing.sampling.grammar_run import Run

REQUESTS = 64  # of one grammar at a time: backends share work between dozens
COMPARED, STEPS = 8, 24  # of the last requests, and the tokens of each
THREADS, FILLS = 4, 600  # threads of one grammar, and the masks of each
NUM_STATES, MEMORY_TOKENS = 15, 9_000  # letters that an expression remembers, and the tokens of a text of it
NUM_TEXTS, TEXT_SIZE = 200, 60  # of a large grammar, and the characters of each
MIN_GROWN, MEMORY_FACTOR = 6 << 20, 12  # bytes of the process; by how much `num_bytes` may be less


def _write_texts(count: int, seed: int = 0) -> list[str]:
    dice = random.Random(seed)
    return ["".join(dice.choices("abcdefgh", k=TEXT_SIZE)) for _ in range(count)]


SOURCES: dict[str, Callable[..., str]] = {  # of so many texts
    "choice": lambda count, seed=0: json.dumps(_write_texts(count, seed)),
    "regex": lambda count, seed=0: "|".join(_write_texts(count, seed)),
}


def check_many_requests_have_the_masks_of_one(run: Run) -> None:
    """With many requests of one grammar, each has at each step the masks and results of a request
    that is alone, and takes the same tokens. `rollback_tokens` among them changes nothing."""
    backend = run.make()
    for case in run.of((*FINITE, *OPEN, *JSON_CASES, *LOOSE)):
        compiled, lone = run.compile(case), backend.compile(case.kind, case.source)
        crowd = [compiled.start() for _ in range(REQUESTS)]
        for number in range(COMPARED):
            one = lone.start()
            _walk_beside(run, case, crowd[-1 - number], one, random.Random(number // 2))
            del one  # alone: the next one starts after its end


def _walk_beside(run: Run, case: Language, among: Grammar, alone: Grammar, dice: random.Random) -> None:
    closing = {token for token, text in run.vocabulary.tokens.items() if text in (b'"', b"}", b"]", b":")}
    tokens: list[int] = []
    for _ in range(STEPS):
        where = f"{case.name} after {b''.join(run.vocabulary.tokens[token] for token in tokens)!r}"
        here, there = run.allowed(among), run.allowed(alone)
        _compare_masks(run, here, there, f"{where}, with {REQUESTS} requests of the grammar")
        assert among.is_finished() == alone.is_finished(), f"{where}: is_finished() is another with {REQUESTS} requests of the grammar"
        choices = run.continuations(here & there)
        for token in dice.sample(np.flatnonzero(~there).tolist(), 2):
            if not here[token]:
                assert not among.accept_token(token), f"{where}: with {REQUESTS} requests it takes token {token}, which no mask has"
        if not choices:
            return
        near = [token for token in choices if token in closing]
        token = dice.choice(near if near and dice.random() < 0.5 else choices)
        for grammar, which in ((among, f"one of {REQUESTS} requests"), (alone, "a request that is alone")):
            assert grammar.accept_token(token), f"{where}: {which} refuses token {token}, which its mask has"
        tokens.append(token)
        if dice.random() < 0.2:
            count = dice.randint(1, min(3, len(tokens)))
            among.rollback_tokens(count)
            alone.rollback_tokens(count)
            del tokens[-count:]


def _compare_masks(run: Run, mask: np.ndarray, expected: np.ndarray, where: str) -> None:
    """Where all texts continue alike, one token of these bytes suffices."""
    firsts = {run.vocabulary.tokens.get(token, b"")[:1] for token in np.flatnonzero(mask | expected).tolist()}
    if len(firsts) == 1 and mask.any() and b"" not in firsts:
        return
    for token in np.flatnonzero(mask != expected)[:1].tolist():
        verb = "allows" if mask[token] else "does not allow"
        raise AssertionError(f"{where}, the mask {verb} token {token} ({run.vocabulary.show(token)}), unlike that of a request alone")


def check_masks_are_filled_together(run: Run) -> None:
    """A batch writes into each row the mask that `fill_mask` has, for many requests of several
    grammars, and leaves other rows alone."""
    cases = run.of((*FINITE, *OPEN, *LOOSE))
    compiled = [run.compile(case) for case in cases]
    grammars = [each.start() for _ in range(8) for each in compiled]
    if getattr(grammars[0], "batch", None) is None:
        return  # its masks are filled one by one
    plain = [run.compile(case) for case in cases]
    alone = [each.start() for _ in range(8) for each in plain]
    dice = [random.Random(number // (2 * len(cases))) for number in range(len(grammars))]
    for _ in range(6):
        masks = fill_together(run, grammars)
        for number, (mask, one) in enumerate(zip(masks, alone, strict=True)):
            case = cases[number % len(cases)]
            _compare_masks(run, mask, run.allowed(one), f"{case.name} in a batch")
            if choices := run.continuations(mask & run.allowed(one)):
                token = dice[number].choice(choices)
                advance = getattr(grammars[number], "advance_token", None)
                known = advance(token) if advance is not None and number % 2 else None
                is_taken = (known is not None or grammars[number].accept_token(token)) and one.accept_token(token)
                assert is_taken, f"{case.name} in a batch: accept_token() refuses token {token}, which the mask has"
                if known is not None:
                    _compare_known_mask(run, known, grammars[number], one, f"{case.name}, after advance_token()")


def _compare_known_mask(run: Run, known: KnownMask, grammar: Any, alone: Any, where: str) -> None:
    """A mask that `advance_token` returns is that of the next token, and the grammar goes on."""
    words = np.full(-(-run.vocabulary.size // 32), 7, np.int32)
    known.write(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: run.vocabulary.size].astype(np.bool_)
    _compare_masks(run, bits, run.allowed(alone), where)
    only = int(bits.argmax()) if bits.sum() == 1 else None
    assert known.only_token == only, f"{where}, only_token is {known.only_token} for a mask whose only token is {only}"
    assert not grammar.is_finished(), f"{where}, the grammar is finished"


def fill_together(run: Run, grammars: Sequence[Any]) -> list[np.ndarray]:
    """bool [vocab] of each, as the engine fills them."""
    words = -(-run.vocabulary.size // 32)
    masks = np.full((len(grammars) + 1, words), 7, np.int32)
    started = [(row, grammar, grammar.start_mask(masks[row])) for row, grammar in enumerate(grammars)]
    waiting = [(row, grammar, handle) for row, grammar, handle in started if handle is not None]
    if waiting:
        grammars[0].batch.fill_masks([handle for _, _, handle in waiting], [row for row, _, _ in waiting], masks)
    for row, grammar, _ in waiting:
        if not grammar.finish_mask(masks[row], 1e-5):
            masks[row] = -1
    assert (masks[-1] == 7).all(), "fill_masks() writes a row that no handle has"
    bits = np.unpackbits(masks[:-1].view(np.uint8), axis=1, bitorder="little")
    return list(bits[:, : run.vocabulary.size].astype(np.bool_))


def check_size_of_grammars_is_counted(run: Run) -> None:
    """`num_bytes` grows with a grammar."""
    for kind, write in SOURCES.items():
        if kind in run.kinds:
            few, many = (run.backend.compile(kind, write(count)).num_bytes for count in (1, NUM_TEXTS))
            assert many >= few + TEXT_SIZE * NUM_TEXTS // 4, (
                f"num_bytes of a {kind} of {NUM_TEXTS} texts of {TEXT_SIZE} characters is {many}, and {few} of one text"
            )


def check_grammars_are_not_kept(run: Run) -> None:
    """The engine keeps the compiled grammars that are used again; a backend keeps none of them."""
    kind = next((kind for kind in SOURCES if kind in run.kinds), None)
    if kind is None:
        raise SkipCheck("the backend compiles neither choices nor expressions")
    backend = run.make()

    def work(number: int) -> None:
        grammar = backend.compile(kind, SOURCES[kind](2, number)).start()
        token = run.continuations(run.allowed(grammar))[0]
        assert grammar.accept_token(token), "accept_token() refuses a token of the mask"
        run.allowed(grammar)

    require_bounded(backend, work, 200, "grammars that are not used any more", slack=40)


def check_memory_of_masks_is_counted(run: Run) -> None:
    """`num_bytes` has what masks add to a grammar: the cache of grammars evicts by it."""
    compiled = run.backend.compile("regex", f"(a|b)*a(a|b|é){{{NUM_STATES}}}c")
    letters = [token for token, text in run.vocabulary.tokens.items() if text and set(text) <= set(b"ab")]
    gc.collect()
    process, dice = psutil.Process(), random.Random(0)
    before = process.memory_info().rss
    grammar = compiled.start()
    for _ in range(MEMORY_TOKENS):
        allowed = run.allowed(grammar)
        token = dice.choice([token for token in letters if allowed[token]])
        assert grammar.accept_token(token), "accept_token() refuses a token of the mask"
    del grammar
    grown, counted = process.memory_info().rss - before, compiled.num_bytes
    is_counted = grown < MIN_GROWN or counted > grown / MEMORY_FACTOR
    assert is_counted, f"{grown >> 20} MB of memory are added by masks of a grammar, and num_bytes is {counted / 2**20:.1f} MB"


def check_threads_share_a_grammar(run: Run) -> None:
    """Threads fill masks of requests of one grammar at once, each of which is at another place."""
    for case in run.of((*FINITE, *OPEN)):
        compiled = run.compile(case)
        places: dict[bytes, Grammar] = {}
        for token in run.continuations(run.allowed(compiled.start())):
            grammar = compiled.start()
            assert grammar.accept_token(token), f"{case.name}: accept_token() refuses token {token}, which the mask has"
            places.setdefault(run.allowed(grammar).tobytes(), grammar)
        if len(places) >= THREADS:
            break
    else:
        raise SkipCheck(f"no grammar of the suite has {THREADS} texts that go on in different ways")

    together = threading.Barrier(THREADS)  # on a busy machine, one thread could end before the next begins

    def fill(mask: bytes) -> bool:
        together.wait(60)
        return all(run.allowed(places[mask]).tobytes() == mask for _ in range(FILLS))

    with taking_turns(), ThreadPoolExecutor(THREADS) as pool:
        are_right = list(pool.map(fill, [*places][:THREADS]))
    assert all(are_right), f"{case.name}: a mask is that of another request while threads fill several: keep no buffer in the grammar"
