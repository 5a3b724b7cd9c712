"""Rerank and score: builds a model's input from a query and a document, and relevance from its
output. Also reads the token ids of labels. Must not know HTTP."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from frame.config.resolved import Resolved
from frame.core.errors import ConfigurationError
from frame.core.interfaces.model import Pooling
from frame.text.named_file import read_named

Form = Literal["vectors", "pair", "text", "chat"]

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Qwen3-Reranker was trained with this text; other language models follow it too.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided."
    ' Note that the answer can only be "yes" or "no".'
)
TEMPLATE_ARGUMENTS = {"enable_thinking": False}
_PLACEHOLDER = re.compile(r"{(instruction|query|document)}")


def form_of(resolved: Resolved, score_prompt: str | None, has_chat_template: bool) -> Form:
    """The form of the model's input: "vectors" (two texts embedded separately), "pair", "text"
    (from `score_prompt`) or "chat".

    Raises ValueError, with a sentence for the client, for a model that cannot score relevance.
    """
    if resolved.task == "embed":
        return "vectors"
    model_config = resolved.model
    if not (resolved.pooling and resolved.pooling.label_tokens) and model_config.num_labels != 1:
        raise ValueError(f"{resolved.served_name!r} has {model_config.num_labels} classes, but relevance needs one; use /v1/classify")
    if score_prompt is not None:
        return "text"
    return "pair" if model_config.encoder or not has_chat_template else "chat"


def conversation(query: str, document: str, instruction: str | None) -> list[dict[str, Any]]:
    """A pair as a conversation that asks a language model for yes or no."""
    asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]


def filled(score_prompt: str, query: str, document: str, instruction: str | None) -> str:
    """The prompt with its placeholders replaced in one pass, so not inside the texts."""
    values = {"instruction": instruction or INSTRUCTION, "query": query, "document": document}
    return _PLACEHOLDER.sub(lambda match: values[match[1]], score_prompt)


def finished(vectors: np.ndarray, pooling: Pooling | None) -> np.ndarray:
    """A pooling model's outputs, float32 [rows, width]: probabilities of a classifier, vectors of
    length 1 where the checkpoint says so."""
    if pooling is None:
        return vectors
    if pooling.normalize:
        return normalized(vectors)
    if pooling.activation == "sigmoid":
        with np.errstate(over="ignore"):
            return np.float32(1) / (np.float32(1) + np.exp(-vectors))
    if pooling.activation == "softmax":
        powers = np.exp(vectors - vectors.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
    return vectors


def normalized(vectors: np.ndarray) -> np.ndarray:
    """The rows with length 1."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12)), np.float32)


def relevance(vectors: np.ndarray) -> np.ndarray:
    """The probability of the last label: float32 [pairs, 1 or labels] -> float32 [pairs]."""
    return vectors[:, -1]


def log_odds(logits: np.ndarray) -> np.ndarray:
    """The logarithm of the odds of the last label: float32 [pairs, 1 or labels] -> float32 [pairs].
    Of one label it is the logit."""
    others = logits[:, :-1]
    return logits[:, -1] - np.logaddexp.reduce(others, axis=1) if others.shape[1] else logits[:, 0]


def similarity(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosine similarity row by row: two float32 [pairs, width] -> float32 [pairs]."""
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return np.asarray((first * second).sum(axis=1) / np.maximum(lengths, 1e-12), np.float32)


def paired(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of one text with every second one, or of two lists of equal length in order. Raises
    ValueError with a sentence."""
    if len(first) == 1:
        return [(first[0], text) for text in second]
    if len(first) != len(second):
        raise ValueError(f"there are {len(first)} first texts and {len(second)} second ones; send one first text, or as many of each")
    return list(zip(first, second, strict=True))


def read_score_prompt(path: str | None) -> str | None:
    """The file that `text.score_prompt` names. Raises ConfigurationError when it cannot be used."""
    if path is None:
        return None
    text = read_named("text.score_prompt", path, "name a text file")
    missing = [name for name in ("query", "document") if f"{{{name}}}" not in text]
    if missing:
        raise ConfigurationError(f"text.score_prompt {path!r} has no {{{missing[0]}}}; put it where that text belongs")
    return text


def list_label_ids(resolved: Resolved) -> list[int]:
    """The token ids of the labels of a language model that classifies. Raises ConfigurationError
    for a label that is not one token of the tokenizer."""
    labels = () if resolved.pooling is None else resolved.pooling.label_tokens
    if not labels:
        return []
    if resolved.tokenizer_path is None:
        raise ConfigurationError("model.label_tokens needs a tokenizer; remove --skip-tokenizer-init")
    from frame.text.tokenizer import Tokenizer  # imports jinja2, which other engines do not use

    tokenizer = Tokenizer.load(resolved.tokenizer_path, trust_remote_code=resolved.user.model.trust_remote_code)
    ids = [tokenizer.encode(label, add_special_tokens=False) for label in labels]
    for label, tokens in zip(labels, ids, strict=True):
        if len(tokens) != 1:
            raise ConfigurationError(f"model.label_tokens holds {label!r}, which is {len(tokens)} tokens of this model; each must be one")
    return [tokens[0] for tokens in ids]
