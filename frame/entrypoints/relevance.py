"""How a query and a document become one input of a model that judges their relevance, and what is made of vectors. Knows no HTTP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from frame.core.config.resolved import Resolved
from frame.core.errors import ConfigurationError
from frame.core.text.named_file import read_named

Form = Literal["vectors", "pair", "text", "chat"]

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# What Qwen3-Reranker was trained with; other language models follow it too.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".'
)
TEMPLATE_ARGUMENTS = {"enable_thinking": False}
_PLACE = re.compile(r"{(instruction|query|document)}")


def form_of(resolved: Resolved, score_prompt: str | None, has_chat_template: bool) -> Form:
    """What the served model is given: two texts to embed apart, a pair, a text made of `score_prompt`, or a conversation.

    Raises ValueError, a sentence, for a model that cannot judge relevance.
    """
    if resolved.task == "embed":
        return "vectors"
    model_config = resolved.model
    if not (resolved.pooling and resolved.pooling.label_tokens) and model_config.num_labels != 1:
        raise ValueError(
            f"{resolved.served_name!r} tells {model_config.num_labels} classes apart, and relevance is one number; use /v1/classify"
        )
    if score_prompt is not None:
        return "text"
    return "pair" if model_config.encoder or not has_chat_template else "chat"


def conversation(query: str, document: str, instruction: str | None) -> list[dict[str, Any]]:
    """A pair as a question to a language model that answers yes or no."""
    asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]


def filled(score_prompt: str, query: str, document: str, instruction: str | None) -> str:
    """The prompt with its places filled, once: what stands in a text is not looked at again."""
    values = {"instruction": instruction or INSTRUCTION, "query": query, "document": document}
    return _PLACE.sub(lambda place: values[place[1]], score_prompt)


def relevance(vectors: np.ndarray) -> np.ndarray:
    """A judge's results, float32 [pairs, 1 or labels] -> float32 [pairs]: the probability of its last label."""
    return vectors[:, -1]


def similarity(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosines of the rows of two float32 [pairs, width] -> [pairs]."""
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.asarray((first * second).sum(axis=1) / np.maximum(lengths, 1e-12), np.float32)


def paired(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """One text against all of the others, or two lists of one length, place by place. Raises ValueError, a sentence."""
    if len(first) == 1:
        return [(first[0], text) for text in second]
    if len(first) != len(second):
        raise ValueError(f"there are {len(first)} first texts and {len(second)} second ones; send one first text, or as many of each")
    return list(zip(first, second, strict=True))


def shortened(vectors: np.ndarray, dimensions: int | None, normalize: bool) -> np.ndarray:
    """The first `dimensions` of each row, of length 1 again where the whole ones were."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dimensions]
    if normalize:
        kept = kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), np.float32(1e-12))
    return np.ascontiguousarray(kept)


def read_score_prompt(path: str | None) -> str | None:
    """The file that `text.score_prompt` names. Raises ConfigurationError when it cannot be used."""
    if path is None:
        return None
    text = read_named("text.score_prompt", path, "name a text file")
    missing = [name for name in ("query", "document") if f"{{{name}}}" not in text]
    if missing:
        raise ConfigurationError(f"text.score_prompt {path!r} has no {{{missing[0]}}}; put it where that text belongs")
    return text
