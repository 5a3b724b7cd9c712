"""RoBERTa and XLM-RoBERTa (BGE-M3's dense vectors, BGE rerankers): BERT's layers, with positions
after the padding id and a two-layer head."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from frame.models.layers.encoder import Encoder

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.model import ModelContext


class RobertaModel(Encoder):
    """Positions start at the padding id + 1."""

    prefix: ClassVar[str] = "roberta."
    head_names: ClassVar[tuple[str, str]] = ("classifier.dense", "classifier.out_proj")

    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.first_position = int(context.model_config.config.get("pad_token_id", 1)) + 1
