"""BERT and models derived from it (MiniLM, BGE, E5, GTE): embeddings, and classification or
relevance with a head."""

from __future__ import annotations

from typing import ClassVar

from frame.models.layers.encoder import Encoder


class BertModel(Encoder):
    """Positions start at 0. The head is the pooler's dense layer and the classifier."""

    prefix: ClassVar[str] = "bert."
    head_names: ClassVar[tuple[str, str]] = ("pooler.dense", "classifier")
