"""Texts with too many tokens are refused before they are tokenized whole; others never are."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from frame.checkpoint.model_config import find_model
from frame.text.text_bounds import SLICE, WHOLE, TextTooLongError, find_max_token_length, split_groups
from frame.text.tokenizer import Tokenizer

LONG = 2 * WHOLE


class Counting:
    """A backend that counts the characters that it tokenizes."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.characters = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.backend.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def tiny() -> tuple[Tokenizer, Counting]:
    backend = Counting(Tokenizer.load(Path(find_model("frame-tiny"))).backend)
    return Tokenizer(backend), backend  # type: ignore[arg-type]


def word_piece() -> Tokenizer:
    """Drops spaces, and makes one unknown token of a long word: its tokens cover any number of
    characters."""
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return Tokenizer(backend)


def test_a_text_too_long_for_any_tokens_is_refused_unread() -> None:
    tokenizer, backend = tiny()
    with pytest.raises(TextTooLongError, match="more than 512 tokens"):
        tokenizer.encode("a" * 33_000_000, maximum=512)
    assert backend.characters == 0


def test_a_text_with_too_many_tokens_is_refused_when_they_are_counted() -> None:
    tokenizer, backend = tiny()
    with pytest.raises(TextTooLongError):
        tokenizer.encode("hello world " * 500_000, maximum=800_000)
    assert backend.characters <= 4_000_000  # of six million


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x" * LONG, " " * LONG, "hello\n" * (LONG // 6), "é🙂" * (LONG // 2)], ids=["x", "space", "hello", "é"])
def test_a_text_that_fits_is_never_refused(text: str) -> None:
    for tokenizer in (tiny()[0], word_piece()):
        ids = tokenizer.encode(text)
        assert tokenizer.encode(text, maximum=len(ids)) == ids
        assert tokenizer.encode_inputs([[text]], maximum=len(ids)) == [(ids, 0)]


def test_an_input_that_is_cut_is_not_tokenized_whole() -> None:
    tokenizer, backend = tiny()
    text = "hello world " * (LONG // 4)
    expected = tokenizer.encode(text)[:100]
    backend.characters = 0
    assert tokenizer.encode_inputs([[text]], max_length=100) == [(expected, 0)]
    assert backend.characters <= 2 * SLICE


def test_many_texts_are_tokenized_in_groups() -> None:
    texts = ["x" * 1000] * 500
    groups = [*split_groups(texts)]
    assert [text for group in groups for text in group] == texts
    assert max(sum(map(len, group)) for group in groups) < WHOLE + 1000
    assert [*split_groups([("a", "b")])] == [[("a", "b")]]


def made(**fields: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": dict.fromkeys([*pre_tokenizers.ByteLevel.alphabet(), "Ġhello"], 0)}
    return {"model": model, "pre_tokenizer": {"type": "ByteLevel"}, "normalizer": None, "added_tokens": [], **fields}


UNBOUNDED: dict[str, dict[str, Any]] = {
    "unknown characters are joined": made(model={"type": "BPE", "vocab": {"a": 0}}),
    "long words are one token": made(model={"type": "WordPiece", "vocab": {"a": 0}}),
    "spaces are dropped": made(pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "WhitespaceSplit"}]}),
    "separators are dropped": made(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"}]}
    ),
    "text is shortened": made(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
    "ends are stripped": made(normalizer={"type": "Strip"}),
    "a token takes the spaces before it": made(added_tokens=[{"content": "<mask>", "lstrip": True, "rstrip": False}]),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizers_without_a_bound(name: str) -> None:
    assert find_max_token_length(UNBOUNDED[name]) is None


def test_bounds() -> None:
    assert find_max_token_length(made()) == 6
    assert find_max_token_length(made(normalizer={"type": "NFC"})) == 24
    assert find_max_token_length(made(added_tokens=[{"content": "<|end of text|>", "lstrip": False, "rstrip": False}])) == 15
    marks = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    spaces = {"type": "Sequence", "normalizers": marks}
    vocab = {"▁hello": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    model = {"type": "BPE", "vocab": vocab, "byte_fallback": True}
    assert find_max_token_length(made(model=model, normalizer=spaces, pre_tokenizer=None)) == 6
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.ByteFallback()
    backend.add_tokens([AddedToken("<a longer one>")])
    assert Tokenizer(backend)._description == ("ByteFallback", 14)


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer, _ = tiny()
    text = "hello world how are you? " * 20_000
    before = sys.getswitchinterval()
    gaps: list[float] = []
    done = threading.Event()

    def look() -> None:
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=look)
    try:
        sys.setswitchinterval(1e-4)
        thread.start()
        started = time.perf_counter()
        tokenizer.encode(text)
        took = time.perf_counter() - started
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
    assert max(gaps) < max(0.5 * took, 0.05)
