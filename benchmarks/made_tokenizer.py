"""Byte-level tokenizers without merges, for benchmarks that need a large vocabulary and no
checkpoint: one of any size, made of what is at hand, and one of a file of tokens."""

from __future__ import annotations

import base64
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers


class MadeTokenizer:
    """Byte-level, with the commonest pieces of the standard library's text as its tokens, and words
    made of two of them."""

    def __init__(self, size: int) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces: Counter[str] = Counter()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*/*.py"))[:600]:
            pieces.update(re.findall(r" ?[^\W\d_]+| ?\d{1,3}| ?[^\s\w]+|\s+|_+", path.read_text(errors="ignore")))
        words = [piece for piece, _ in pieces.most_common() if 1 < len(piece) <= 24 and piece.isascii()]
        spelt = [word.replace(" ", "Ġ").replace("\n", "Ċ").replace("\t", "ĉ") for word in words]
        stems = [word for word in spelt if word.strip("Ġ").isalpha() and len(word) <= 8]
        numbers = random.Random(0)
        made = (numbers.choice(stems) + numbers.choice(stems).strip("Ġ")[:5].lower() for _ in iter(int, 1))  # iter(int, 1) never ends
        vocabulary = dict.fromkeys(["<eos>", *letters, *spelt])
        while len(vocabulary) < size:
            vocabulary[next(made)] = None
        self.backend = _build(list(vocabulary)[:size])
        self.eos_token_ids = (0,)


class RankedTokenizer:
    """The tokens of a file in tiktoken's format (base64 and rank in each line), as Llama 3 has
    them, and end tokens up to `size`."""

    def __init__(self, path: Path, size: int) -> None:
        ranked = [base64.b64decode(line.split()[0]) for line in path.read_bytes().splitlines()]
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}  # as GPT-2 writes bytes
        words = ["".join(letters[byte] for byte in token) for token in ranked]
        ends = [f"<end {i}>" for i in range(size - len(words))]
        self.backend = _build([*words, *ends], ends)
        self.eos_token_ids = (len(words),)


def _build(tokens: Sequence[str], ends: Sequence[str] = ("<eos>",)) -> Backend:
    """A tokenizer of these tokens, of which `ends` are special."""
    made = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(ends))
    return made
