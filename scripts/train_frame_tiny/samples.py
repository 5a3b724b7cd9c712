"""Training rows: chat conversations made from the evaluation's task generators (training split
only), and slices of source code.

A row is `length + 2` token ids with one weight class per token. Conversations never leave the row
they start in unless they are the last, so every answer can be found from what stands before it.
Recall lists grow with the progress of the training. It does not depend on the model.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from frame.entrypoints.tools.eval import tasks
from scripts.train_frame_tiny import tokenizer as tk
from scripts.train_frame_tiny import wording

IGNORED, PROMPT, TEXT, REPLY = 0, 1, 2, 3
CLASS_WEIGHTS = (0.0, 0.1, 1.0, 2.0)

SHORT_TASKS = ("copy", "reverse", "sort", "sum")
SHORT_SHARES = (0.16, 0.14, 0.40, 0.30)
LOOSE_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation: text that is given, or an answer to be learned."""

    text: str
    reply: bool


def _opening(rng: random.Random) -> str:
    bos = tk.BOS * (2 if rng.random() < 0.03 else 1)
    return bos + (tk.SYSTEM + rng.choice(tasks.SYSTEM_PROMPTS) if rng.random() < 0.5 else "")


def _ask(pieces: list[Piece], before: str, question: str, reply: str) -> None:
    pieces.append(Piece(f"{before}{tk.USER}{question}{tk.ASSISTANT}", False))
    pieces.append(Piece(reply + tk.EOS, True))


def _short_turns(rng: random.Random) -> list[tuple[str, str]]:
    """One question with its answer, or the few of a short list, in the evaluation's words or in
    looser ones."""
    kind = rng.random()
    if kind < 0.05:
        return [wording.small_talk(rng)]
    if kind < 0.12:
        return wording.loose_recall(rng)
    task = rng.choices(SHORT_TASKS, SHORT_SHARES)[0]
    if rng.random() < LOOSE_SHARE:
        return [wording.loose_turn(task, rng)]
    turn = tasks.make_turn(task, rng, "train")
    return [(turn.question, turn.answer)]


def short_conversation(rng: random.Random) -> list[Piece]:
    """One to five short questions of any kind, and now and then more."""
    pieces: list[Piece] = []
    before = _opening(rng)
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        for question, reply in _short_turns(rng):
            _ask(pieces, before, question, reply)
            before = ""
    return pieces


def recall_conversation(rng: random.Random, list_tokens: int, questions: int) -> list[Piece]:
    """A list and many questions about it, one per turn; sometimes another question comes first."""
    keys: list[str] = []
    while not keys:
        pairs = tasks.recall_pairs(rng, list_tokens)
        keys = tasks.askable_keys(pairs, "train")
    asked = rng.sample(keys, questions) if questions <= len(keys) else rng.choices(keys, k=questions)
    listing = tasks.recall_list(rng, pairs)
    pieces: list[Piece] = []
    if rng.random() < 0.25:
        before, first = tk.BOS + tk.SYSTEM + listing, ""
    else:
        before, first = _opening(rng), listing + "\n"
    if rng.random() < 0.1:
        turn = tasks.make_turn("sum", rng, "train")
        _ask(pieces, before, turn.question, turn.answer)
        before = ""
    for key in asked:
        _ask(pieces, before, first + tasks.recall_question(rng, key), pairs[key])
        before = first = ""
    return pieces


def _list_length(rng: random.Random, max_length: float) -> int:
    """A list length in tokens: half of them uniform, half spread evenly over the orders of
    magnitude."""
    if rng.random() < 0.5:
        return int(rng.uniform(60, max_length))
    return int(math.exp(rng.uniform(math.log(60), math.log(max_length))))


def _next_conversation(rng: random.Random, room: int, progress: float, recall: bool) -> list[Piece]:
    max_length = min(250 + 12_000 * progress, 0.84 * room)
    if not recall or max_length < 100:
        return short_conversation(rng)
    size = _list_length(rng, max_length)
    questions = max(3, min(size // 8, 70, int((room - 1.1 * size) / 20)))
    return recall_conversation(rng, size, questions)


def task_row(rng: random.Random, encoder: Tokenizer, length: int, progress: float) -> tuple[list[int], list[int]]:
    """One row of conversations: token ids and weight classes, `length` of each."""
    ids: list[int] = []
    classes: list[int] = []
    recall_share = rng.choice((0.0, 0.5, 0.7, 1.0))
    while len(ids) < length:
        pieces = _next_conversation(rng, length - len(ids), progress, rng.random() < recall_share)
        for piece, tokens in zip(pieces, tk.encode_plain(encoder, [piece.text for piece in pieces]), strict=True):
            ids += tokens
            classes += [REPLY if piece.reply else PROMPT] * len(tokens)
    return ids[:length], classes[:length]


def task_batches(seed: int, encoder: Tokenizer, rows: int, length: int, progress: Any) -> Iterator[NDArray[np.int32]]:
    """Endless batches `[2, rows, length]` of ids and classes; `progress.value` (0 to 1) is read
    anew for each."""
    rng = random.Random(seed)
    while True:
        made = [task_row(rng, encoder, length, progress.value) for _ in range(rows)]
        yield np.array([[ids for ids, _ in made], [classes for _, classes in made]], dtype=np.int32)


def pack_texts(texts: list[str], encoder: Tokenizer, seed: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """All texts in random order as one stream of ids, BOS before and EOS after each, and where each
    begins."""
    texts = texts.copy()
    random.Random(seed).shuffle(texts)
    chunks: list[NDArray[np.int32]] = []
    starts: list[int] = []
    position = 0
    for begin in range(0, len(texts), 256):
        for ids in tk.encode_plain(encoder, [tk.BOS + text + tk.EOS for text in texts[begin : begin + 256]]):
            chunks.append(np.array(ids, dtype=np.int32))
            starts.append(position)
            position += len(ids)
    return np.concatenate(chunks), np.array(starts, dtype=np.int64)
