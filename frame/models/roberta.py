"""RoBERTa and XLM-RoBERTa (BGE-M3's dense vectors, BGE rerankers): BERT's layers, with positions
after the padding id and a two-layer head."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from frame.models.layers.encoder import Encoder

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.model import ModelContext


class RobertaModel(Encoder):
    """Positions start at the padding id + 1. A padding id within a text has its own as position
    and is not counted, as in transformers."""

    prefix: ClassVar[str] = "roberta."
    head_names: ClassVar[tuple[str, str]] = ("classifier.dense", "classifier.out_proj")

    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.padding_id = int(context.model_config.config.get("pad_token_id", 1))

    def find_positions(self, batch: ForwardBatch) -> torch.Tensor:
        counts = (batch.token_ids != self.padding_id).long()
        sums = counts.cumsum(0)
        ends, places = batch.query_starts[1:-1].contiguous(), torch.arange(len(sums), device=sums.device, dtype=batch.query_starts.dtype)
        starts = batch.query_starts[torch.searchsorted(ends, places, right=True)].long()
        before = batch.positions[starts] - (sums - counts)[starts]
        return (sums + before) * counts + self.padding_id
