"""Checks whether a text has too many tokens without tokenizing all of it. Used by `Tokenizer`; must
not know requests or HTTP.

A text of up to `WHOLE` characters always passes. A longer one is refused by its size if a token
covers a bounded number of characters, else by counting the tokens of its slices, which releases the
GIL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

WHOLE = 128 * 1024  # characters that are tokenized in one call
SLICE = 64 * 1024
SLACK = 256  # tokens that a cut between two slices may add
COMPOSED = 4  # maximum number of characters that NFC composes to one
_CHARACTERS_KEPT = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})  # pre-tokenizers that drop no characters
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class TextTooLongError(ValueError):
    """A text has more than `maximum` tokens."""

    def __init__(self, maximum: int) -> None:
        super().__init__(f"the text has more than {maximum} tokens; shorten it")
        self.maximum = maximum


class TextBounds:
    """The bounds of one tokenizer. `max_length`: the maximum number of characters that a token
    covers; None: unbounded."""

    def __init__(self, backend: Backend, max_length: int | None) -> None:
        self._backend = backend
        self._max_length = max_length

    def check_size(self, num_characters: int, maximum: int) -> None:
        """Raise TextTooLongError if any text of so many characters has more than `maximum`
        tokens."""
        if num_characters > WHOLE and self._max_length is not None and num_characters > maximum * self._max_length:
            raise TextTooLongError(maximum)

    def check_text(self, text: str, maximum: int) -> None:
        """Raise TextTooLongError for a text of more than `maximum` tokens. Short texts, and those
        near the limit, pass."""
        self.check_size(len(text), maximum)
        if self.cut_text(text, maximum) is not text:
            raise TextTooLongError(maximum)

    def cut_text(self, text: str, maximum: int) -> str:
        """Return a prefix of the text with more than `maximum` tokens, or the text itself if it has
        fewer."""
        if len(text) <= WHOLE:
            return text
        count = 0
        for start in range(0, len(text), SLICE):
            piece = text[start : start + SLICE]
            count += len(self._backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids) - SLACK
            if count > maximum and start + SLICE < len(text):
                return text[: start + SLICE]
        return text


def split_groups(inputs: Iterable[Any]) -> Iterator[list[Any]]:
    """Split texts, or pairs of texts, into groups of about `WHOLE` characters, each for one
    call."""
    group: list[Any] = []
    size = 0
    for one in inputs:
        group.append(one)
        size += len(one) if isinstance(one, str) else sum(map(len, one))
        if size >= WHOLE:
            yield group
            group, size = [], 0
    if group:
        yield group


def find_max_token_length(spec: dict[str, Any]) -> int | None:
    """The maximum number of characters that one token of a tokenizer.json covers. None: unbounded,
    since a step of the tokenizer drops characters or joins any number of them."""
    model = spec.get("model") or {}
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocab, dict):
        return None  # other models turn a word of any length into one unknown token
    steps = [*_steps(spec.get("pre_tokenizer"), "pretokenizers")]
    is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    if not (is_byte_level and all(character in vocab for character in _alphabet())) and not (
        model.get("byte_fallback") and vocab.keys() >= _BYTES
    ):
        return None
    if not all(_keeps(step) for step in steps):
        return None
    factor = 1
    for step in _steps(spec.get("normalizer"), "normalizers"):
        if step.get("type") == "NFC":
            factor = COMPOSED
        elif not (step.get("type") == "Prepend" or _lengthens(step)):
            return None
    added = spec.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # these cover any number of spaces
    return factor * max(len(text) for text in (*vocab, *(token["content"] for token in added)))


def _steps(pipeline: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences flattened."""
    if pipeline is None:
        return
    if pipeline.get("type") == "Sequence":
        for step in pipeline.get(name) or ():
            yield from _steps(step, name)
    else:
        yield pipeline


def _keeps(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    return kind in _CHARACTERS_KEPT or (kind in ("Split", "Punctuation") and step.get("behavior") != "Removed")


def _lengthens(step: dict[str, Any]) -> bool:
    """Whether a normalizer step never shortens a text."""
    pattern = (step.get("pattern") or {}).get("String")
    return step.get("type") == "Replace" and isinstance(pattern, str) and len(step.get("content") or "") >= len(pattern)


def _alphabet() -> Iterable[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet: list[str] = ByteLevel.alphabet()
    return alphabet
