"""`Vectors`: embedding, classification and scoring of the offline API. Must not know a session:
`run` computes the sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from frame.config.resolved import Resolved
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.offline.adapters import Lora
from frame.entrypoints.relevance import (
    TEMPLATE_ARGUMENTS,
    conversation,
    filled,
    finished,
    form_of,
    paired,
    read_score_prompt,
    relevance,
    similarity,
)
from frame.text.tokenizer import Encoded, Tokenizer

# (token ids, start of the second text) of sequences, their adapter, whether each token has a vector
# -> float32 [width] of each sequence, or [tokens, hidden_size]
Run = Callable[[list["Encoded"], Lora | None, bool], list[np.ndarray]]
METHODS = {"generate": "generate", "embed": "embed or score", "classify": "classify or score"}


def need_task(resolved: Resolved, *tasks: str) -> None:
    """Raise InvalidRequestError unless the engine runs its model for one of these tasks."""
    if resolved.task not in tasks:
        allowed, instead = " or ".join(tasks), METHODS[resolved.task]
        sentence = f"model.task of this engine is {resolved.task!r}, not {allowed!r}; use {instead}"
        raise InvalidRequestError(sentence, "model")


class Vectors:
    """`run` computes encoded sequences; `tokenizer` returns the tokenizer."""

    def __init__(self, resolved: Resolved, tokenizer: Callable[[], Tokenizer], max_length: int, run: Run) -> None:
        self._resolved = resolved
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._run = run
        self._score_prompt = read_score_prompt(resolved.user.text.score_prompt)

    def embed(
        self, texts: Sequence[Any], dimensions: int | None, prompt_name: str | None, truncate: bool, lora: Lora | None, per_token: bool
    ) -> np.ndarray | list[np.ndarray]:
        """Embeddings, float32 [texts, width]; with `per_token` [tokens, width] of each text. A text
        may be a list of token ids."""
        need_task(self._resolved, "embed")
        width, pooling = self._resolved.model.hidden_size, self._resolved.pooling
        if dimensions is not None and not 1 <= dimensions <= width:
            raise InvalidRequestError(f"dimensions is {dimensions}; it must be from 1 to {width}", "dimensions")
        lead = self._resolved.model.sentence.lead(prompt_name) if self._resolved.model.sentence is not None else ""
        vectors = [each[..., :dimensions] for each in self._run(self._encode(texts, truncate, lead), lora, per_token)]
        return vectors if per_token else finished(np.stack(vectors), pooling)

    def classify(self, texts: Sequence[Any], truncate: bool, lora: Lora | None) -> list[dict[str, float]]:
        """The probability of each class, by its label; labels of the same name are numbered."""
        need_task(self._resolved, "classify")
        pooling = self._resolved.pooling
        names = pooling.label_tokens if pooling and pooling.label_tokens else self._resolved.model.labels
        if len(set(names)) < len(names):
            names = tuple(f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names))
        return [dict(zip(names, row, strict=True)) for row in self._compute(self._encode(texts, truncate), lora).tolist()]

    def score(self, first: Sequence[str], second: Sequence[str], instruction: str | None, truncate: bool, lora: Lora | None) -> np.ndarray:
        """Relevance of pairs, float32 [pairs]; the cosine for an embedding model."""
        need_task(self._resolved, "embed", "classify")
        tokenizer, max_length = self._tokenizer(), self._max_length if truncate else None
        try:
            pairs = paired(first, second)
            form = form_of(self._resolved, self._score_prompt, tokenizer.has_chat_template)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from None
        if form == "vectors":
            unique = list(dict.fromkeys(text for pair in pairs for text in pair))
            places, vectors = {text: place for place, text in enumerate(unique)}, self._compute(self._encode(unique, truncate), lora)
            return similarity(*(vectors[[places[pair[side]] for pair in pairs]] for side in (0, 1)))
        if form == "chat":
            encoded = [(tokenizer.encode_chat(conversation(*pair, instruction), None, dict(TEMPLATE_ARGUMENTS)), 0) for pair in pairs]
        elif form == "text" and self._score_prompt is not None:
            encoded = tokenizer.encode_inputs([[filled(self._score_prompt, *pair, instruction)] for pair in pairs], max_length)
        else:
            encoded = tokenizer.encode_inputs(pairs, max_length)
        return relevance(self._compute(encoded, lora))

    def _compute(self, encoded: list[Encoded], lora: Lora | None) -> np.ndarray:
        return finished(np.stack(self._run(encoded, lora, False)), self._resolved.pooling)

    def _encode(self, texts: Sequence[Any], truncate: bool, lead: str = "") -> list[Encoded]:
        if not all(isinstance(text, str) for text in texts):
            return [(list(text), 0) for text in texts]
        return self._tokenizer().encode_inputs([[lead + text] for text in texts], self._max_length if truncate else None)
