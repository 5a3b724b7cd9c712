"""`Division`: an item that several steps encode, some layers each, so that steps with decodes stay
short.

Used by `MediaScheduler`. Must not know rows, requests or a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from frame.core.interfaces.media import EncodeOrder, MediaItem
from frame.core.scheduling.running import StepPlan
from frame.interfaces.modality import EncoderCost, MediaPlan
from frame.media.row_table import TableItem

TOKENS = 2048  # prompt tokens as which a step beside decodes may encode for as long
_SHARE = 0.25  # of these, which prompts of the same step leave


@dataclass(slots=True, eq=False)
class Division:
    """The item that is divided now; there is one at a time, which bounds what the device keeps."""

    item: MediaItem
    held: TableItem  # its rows, which the last of the steps fills
    cost: EncoderCost
    layer: int = 0  # the first one that no step has been ordered to compute

    def order_layers(self, tokens: float, encode_budget: int) -> tuple[EncodeOrder, float]:
        """What the next step computes: at least a layer. -> the order, and its cost in tokens."""
        cost, num_layers = self.cost.count_tokens(self.item.patches), self.cost.num_layers
        share = min(tokens / cost, encode_budget / self.item.patches)
        first, self.layer = self.layer, min(self.layer + max(1, int(num_layers * share)), num_layers)
        order = EncodeOrder(self.item, self.held.rows[:-1], first_layer=first, stop_layer=0 if self.is_complete else self.layer)
        return order, cost * (self.layer - first) / num_layers

    @property
    def is_complete(self) -> bool:
        """Whether all layers have been ordered."""
        return self.layer >= self.cost.num_layers


def has_decodes(plan: StepPlan) -> bool:
    """Whether streams wait for the step."""
    return plan.decode_slots.size > 0 or plan.drafts is not None


def find_limit(media: MediaPlan, modality: str, plan: StepPlan) -> int:
    """The patches of a modality that a step encodes at most; an item with more is divided where the
    step has decodes and the modality a cost."""
    cost = media.costs.get(modality)
    if cost is None or not has_decodes(plan):
        return media.encode_budget
    return min(media.encode_budget, cost.find_patches(min(TOKENS, plan.limit)))


def count_left(plan: StepPlan, encoded: float) -> float:
    """The tokens as which a step may still encode by layers, beside whole items that cost
    `encoded`."""
    limit = min(TOKENS, plan.limit)
    return max(limit - sum(count for _, _, count in plan.chunks) - encoded, _SHARE * limit)
