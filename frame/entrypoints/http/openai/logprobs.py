"""Log-probabilities in OpenAI's shapes (chat, completions, Responses) and vLLM's `prompt_logprobs`.
Used by the OpenAI routes. Must not depend on the engine."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from frame.core.messages import TokenLogprobs
from frame.entrypoints.http.paced_json import array_type
from frame.text.tokenizer import Tokenizer

MINIMUM = -9999.0  # written for minus infinity, which JSON does not have; vLLM's value


class TextOffsets:
    """The `text_offset` of the tokens of one sequence, in characters, for tokens in order.

    A token that begins inside a multi-byte character has the offset of that character. Special
    tokens that are left out of the text have no length.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next_offset(self, token_id: int) -> int:
        """The offset of the next token of the sequence."""
        offset = self._offset
        if token_id not in self._hidden:
            self._offset += len(self._decoder.decode(self._tokenizer.get_token_bytes(token_id)))
        return offset


Name = Callable[[int], str]  # token id -> the token as the response shows it


def token_namer(tokenizer: Tokenizer, as_ids: bool | None) -> Name:
    """Names tokens by their text or, with vLLM's `return_tokens_as_token_ids`, as `token_id:ID`."""
    return (lambda token_id: f"token_id:{token_id}") if as_ids else tokenizer.get_token_text


def _unique_namer(tokenizer: Tokenizer, as_ids: bool | None) -> Name:
    """Like `token_namer`, but a token that is a part of a character is named by its bytes
    (`bytes:\\xe9`, OpenAI's form), so that two tokens have two keys in `top_logprobs`."""
    by_text = token_namer(tokenizer, as_ids)

    def name(token_id: int) -> str:
        text = by_text(token_id)
        if "\ufffd" not in text:
            return text
        data = tokenizer.get_token_bytes(token_id)
        return text if data == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    return name


def count_logprobs(parts: list[TokenLogprobs]) -> int:
    """The log-probabilities of the tokens and of their alternatives."""
    return sum(len(part.token_ids) * (1 + len(part.top[-1] if part.top else ())) for part in parts)


def chat_logprobs(parts: list[TokenLogprobs], tokenizer: Tokenizer, name: Name) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`. Large arrays are `Entries`."""
    return {"content": array_type(count_logprobs(parts))(chat_entries(parts, tokenizer, name))}


def chat_entries(parts: Iterable[TokenLogprobs], tokenizer: Tokenizer, name: Name) -> Iterator[dict[str, Any]]:
    """The entries of `chat_logprobs`."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        value = MINIMUM if logprob is None else max(logprob, MINIMUM)
        return {"token": name(token_id), "logprob": value, "bytes": list(tokenizer.get_token_bytes(token_id))}

    for token_id, logprob, top in _tokens_of(parts):
        yield {**entry(token_id, logprob), "top_logprobs": [entry(other, value) for other, value in top]}


class TextLogprobs:
    """Assigns the log-probabilities of tokens to the pieces of text that the output parsers return.
    Tokens that are in no piece, such as the tags of a tool call, are left out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[tuple[str, msgspec.Raw]] = []  # text, and the entry as in `chat_logprobs`, in JSON

    def add(self, parts: Iterable[TokenLogprobs]) -> None:
        """Add the tokens since the last call."""
        entries = chat_entries(parts, self._tokenizer, self._tokenizer.get_token_text)
        self._pending += ((entry["token"], msgspec.Raw(msgspec.json.encode(entry))) for entry in entries)

    def take_logprobs(self, piece: str) -> list[msgspec.Raw]:
        """Remove and return the entries of the tokens that `piece` was made of. All pending entries
        where the piece is not found among them, as inside a multi-byte character."""
        pending, self._pending = self._pending, []
        start, offset = "".join(text for text, _ in pending).find(piece), 0
        if start < 0:
            return [entry for _, entry in pending]
        taken: list[msgspec.Raw] = []
        for text, entry in pending:
            after = offset + len(text)
            if offset >= start + len(piece):
                self._pending.append((text, entry))
            elif after > start:
                taken.append(entry)
            offset = after
        return taken


def completion_logprobs(
    parts: list[TokenLogprobs], tokenizer: Tokenizer, as_ids: bool | None, text_offsets: TextOffsets
) -> dict[str, Any]:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`; `text_offsets` was given the
    sequence's earlier tokens. `as_ids`: see `token_namer`. Large arrays are `Entries`."""
    name, array = _unique_namer(tokenizer, as_ids), array_type(count_logprobs(parts))
    if array is list:  # one pass, for the few tokens of an event
        rows = [(name(i), logprob, top, text_offsets.next_offset(i)) for i, logprob, top in _tokens_of(parts)]
        return {
            "tokens": [text for text, _, _, _ in rows],
            "token_logprobs": [None if logprob is None else max(logprob, MINIMUM) for _, logprob, _, _ in rows],
            "top_logprobs": [None if logprob is None else _alternatives(text, logprob, top, name) for text, logprob, top, _ in rows],
            "text_offset": [offset for _, _, _, offset in rows],
        }
    return {
        "tokens": array(name(token_id) for token_id, _, _ in _tokens_of(parts)),
        "token_logprobs": array(None if logprob is None else max(logprob, MINIMUM) for _, logprob, _ in _tokens_of(parts)),
        "top_logprobs": array(
            None if logprob is None else _alternatives(name(token_id), logprob, top, name) for token_id, logprob, top in _tokens_of(parts)
        ),
        "text_offset": array(text_offsets.next_offset(token_id) for token_id, _, _ in _tokens_of(parts)),
    }


def _tokens_of(parts: Iterable[TokenLogprobs]) -> Iterator[tuple[int, float | None, list[tuple[int, float]]]]:
    """(id, log-probability, alternatives) of each token."""
    for part in parts:
        yield from zip(part.token_ids, part.logprobs, part.top, strict=True)


def prompt_logprobs(found: TokenLogprobs, name: Name) -> Any:
    """vLLM's `prompt_logprobs`: for each prompt token the entries of itself and of the most likely
    tokens. A large array is `Entries`.

    An entry is `{id: {logprob, rank, decoded_token}}`; `rank` counts from 1. The first prompt token
    has None.
    """
    return array_type(count_logprobs([found]))(_prompt_entries(found, name))


def _prompt_entries(found: TokenLogprobs, name: Name) -> Iterator[dict[str, dict[str, Any]] | None]:
    ranks = found.ranks or [None] * len(found.token_ids)
    for token_id, logprob, top, own in zip(found.token_ids, found.logprobs, found.top, ranks, strict=True):
        if logprob is None:
            yield None
            continue
        ranked: list[tuple[int, float, int | None]] = [(other, value, rank) for rank, (other, value) in enumerate(top, 1)]
        if all(other != token_id for other, _ in top):
            ranked.append((token_id, logprob, own))
        yield {str(i): {"logprob": max(p, MINIMUM), "rank": r, "decoded_token": name(i)} for i, p, r in ranked}


def _alternatives(text: str, logprob: float, top: list[tuple[int, float]], name: Name) -> dict[str, float]:
    """OpenAI's `top_logprobs` of one token, which is always among them."""
    found: dict[str, float] = {}
    for other, value in top:
        found.setdefault(name(other), max(value, MINIMUM))
    found.setdefault(text, max(logprob, MINIMUM))
    return found
