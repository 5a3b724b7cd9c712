"""RoBERTa and XLM-RoBERTa (BGE-M3's dense vectors, BGE rerankers): BERT's layers, with positions
after the padding id and a two-layer head."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from frame.models.layers.encoder import Encoder
from frame.models.layers.linear import HeadLinear

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.model import ModelContext


class RobertaModel(Encoder):
    """Positions start at the padding id + 1."""

    prefix: ClassVar[str] = "roberta."

    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        model_config = context.model_config
        self.first_position = int(model_config.config.get("pad_token_id", 1)) + 1

    def build_head(self) -> nn.Module:
        return RobertaHead(self.context, self.model_config.hidden_size, self.model_config.num_labels)


class RobertaHead(nn.Module):
    """[n, hidden] -> [n, labels]: dense, tanh, projection."""

    def __init__(self, context: BuildContext, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.dense = HeadLinear(context, "classifier.dense", hidden_size, hidden_size)
        self.out_proj = HeadLinear(context, "classifier.out_proj", hidden_size, num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out_proj(torch.tanh(self.dense(hidden)))
