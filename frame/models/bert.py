"""BERT and models derived from it (MiniLM, BGE, E5, GTE): embeddings, and classification or
relevance with a head."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from frame.models.layers.encoder import Encoder
from frame.models.layers.linear import HeadLinear

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext


class BertModel(Encoder):
    """Positions start at 0. The head is the pooler's dense layer and the classifier."""

    prefix: ClassVar[str] = "bert."

    def build_head(self) -> nn.Module:
        return BertHead(self.context, self.model_config.hidden_size, self.model_config.num_labels)


class BertHead(nn.Module):
    """[n, hidden] -> [n, labels]: dense, tanh, classifier."""

    def __init__(self, context: BuildContext, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.dense = HeadLinear(context, "pooler.dense", hidden_size, hidden_size)
        self.classifier = HeadLinear(context, "classifier", hidden_size, num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.tanh(self.dense(hidden)))
