"""A byte-level tokenizer of any size, made of what is at hand, for benchmarks that need a large
vocabulary and no checkpoint."""

from __future__ import annotations

import random
import re
import sysconfig
from collections import Counter
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
        self.backend = Backend(models.BPE({token: i for i, token in enumerate(list(vocabulary)[:size])}, []))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        self.backend.add_special_tokens(["<eos>"])
        self.eos_token_ids = (0,)
