"""Log-probabilities in the shapes of the OpenAI API: chat's list of objects, completion's parallel lists. Knows no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from frame.core.messages import TokenLogprobs
    from frame.core.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no minus infinity


def chat_logprobs(parts: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`."""
    content = []
    for part in parts:
        for token_id, logprob, top in zip(part.token_ids, part.logprobs, part.top, strict=True):
            entry = _entry(token_id, logprob, tokenizer)
            content.append({**entry, "top_logprobs": [_entry(other, value, tokenizer) for other, value in top]})
    return {"content": content}


def completion_logprobs(parts: Iterable[TokenLogprobs], tokenizer: Tokenizer, offset: int = 0) -> dict[str, Any]:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`; `offset` is where the first token's text begins."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for part in parts:
        for token_id, logprob, top in zip(part.token_ids, part.logprobs, part.top, strict=True):
            text = tokenizer.token_text(token_id)
            tokens.append(text)
            values.append(None if logprob is None else max(logprob, LEAST))
            tops.append(None if logprob is None else _alternatives(text, logprob, top, tokenizer))
            offsets.append(offset)
            offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _alternatives(text: str, logprob: float, top: list[tuple[int, float]], tokenizer: Tokenizer) -> dict[str, float]:
    found: dict[str, float] = {}
    for other, value in top:
        found.setdefault(tokenizer.token_text(other), max(value, LEAST))
    found.setdefault(text, max(logprob, LEAST))
    return found


def _entry(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    value = LEAST if logprob is None else max(logprob, LEAST)
    return {"token": tokenizer.token_text(token_id), "logprob": value, "bytes": list(tokenizer.token_bytes(token_id))}
