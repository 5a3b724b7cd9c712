"""`ExpertBalancer`: counts of tokens -> a new placement of experts -> moves of their weights in
stages between steps.

Each rank calls `begin_step` before each step. All ranks of a group run the same steps and compute
the same placement from the same counts, so no message says when a layer's experts move. Must not
know a model, a request or the scheduler.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from frame.core.interfaces.collective import Collective
from frame.core.interfaces.moe import ExpertPlacement, MovableExperts
from frame.parallel.expert_balance import balance_experts, find_imbalance

_log = logging.getLogger(__name__)
# Of the mean load of ranks: a layer's experts do not move for less. By estimate, the moves of a
# layer of Qwen3-30B-A3B cost 5 to 10 computations of its experts for 8,192 tokens, of which a gain
# of 0.1 saves a tenth each. Loads of even routers differ by 0.03.
_MIN_GAIN = 0.1
_LAYERS_PER_STEP = 4  # that are placed before a step, each in 0.3 to 1 ms


@dataclass(frozen=True, slots=True)
class Move:
    """One expert's weights: from a place of the physical experts to another one."""

    source: int
    target: int


@dataclass(slots=True)
class LayerMove:
    """The moves of a layer that are open, and the received weights: (place on this rank, one tensor
    for each of the layer's)."""

    layer: MovableExperts
    placement: ExpertPlacement
    moves: deque[Move]
    received: list[tuple[int, list[torch.Tensor]]]


@dataclass(slots=True)
class Plan:
    """The placement of all layers, of which the first ones are balanced. load: tokens of each
    logical expert, [layers, experts]; present: see `ExpertPlacement.logical`, [layers, physical
    experts]; balanced: likewise, of the first layers."""

    load: np.ndarray
    present: np.ndarray
    balanced: list[np.ndarray]


def list_movable(model: object) -> list[MovableExperts]:
    """The model's layers with experts that can move."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return [module for module in modules if isinstance(module, MovableExperts)]


def count_transit_bytes(layers: Sequence[MovableExperts], stage_bytes: int) -> int:
    """The most that experts in transit take: the received experts of a layer, and those of a stage
    that are sent."""
    sizes = [0]
    for layer in layers:
        tensors = layer.list_tensors()
        sizes.append(sum(tensor.nbytes for tensor in tensors) + max(stage_bytes, sum(tensor[0].nbytes for tensor in tensors)))
    return max(sizes)


class ExpertBalancer:
    """Balances the experts of `layers` among the ranks of `group`, every `interval` steps.

    A stage moves at most `stage_bytes`, or one expert. The weights of a layer's experts are
    received beside the present ones, which takes memory for at most one layer's experts; when all
    are there, they are written and the layer's placement changes, before the same step on all
    ranks. `imbalance`: by layer, the load of the busiest rank over the mean load, when it was last
    measured; empty before.
    """

    def __init__(self, layers: Sequence[MovableExperts], group: Collective, interval: int, stage_bytes: int) -> None:
        self._layers = layers
        self._group = group
        self._interval = interval
        self._stage_bytes = stage_bytes
        self._step = 0
        self._plan: Plan | None = None
        self._open: deque[LayerMove] = deque()
        self._num_stages = 0
        self.imbalance: list[float] = []
        for layer in layers:  # counts of warm-up steps
            layer.get_counts().zero_()

    def begin_step(self) -> None:
        """Before a step: run a stage of the moves, or place experts anew when the interval has
        passed, a few layers at a time. Collective."""
        self._step += 1
        if self._open:
            self._run_stage(self._open[0])
            return
        if self._plan is None and self._step >= self._interval and self._layers:
            self._step = 0
            self._plan = self._read_counts()
        if self._plan is not None and self._balance_layers(self._plan):
            self._open_moves(self._plan.load, self._plan.present, np.stack(self._plan.balanced))
            self._plan = None

    def _read_counts(self) -> Plan:
        """Wait for the device, and clear the counts."""
        counts = torch.stack([layer.get_counts() for layer in self._layers])
        load = self._group.all_gather(counts.unsqueeze(0), dim=0).sum(0).cpu().numpy()
        for layer in self._layers:
            layer.get_counts().zero_()
        present = np.array([layer.placement.logical for layer in self._layers])
        if load.any():
            self.imbalance = find_imbalance(load, present, self._group.size).round(3).tolist()
        return Plan(load, present, [])

    def _balance_layers(self, plan: Plan) -> bool:
        """Balance the next layers. -> whether all are balanced."""
        first = len(plan.balanced)
        plan.balanced.extend(balance_experts(plan.load[first : first + _LAYERS_PER_STEP], plan.present.shape[1], self._group.size))
        return len(plan.balanced) == len(self._layers)

    def _open_moves(self, load: np.ndarray, present: np.ndarray, balanced: np.ndarray) -> None:
        ranks = self._group.size
        before, after = find_imbalance(load, present, ranks), find_imbalance(load, balanced, ranks)
        for index in np.flatnonzero(after < before - _MIN_GAIN).tolist():
            layer, placed = self._layers[index], present[index]
            logical = keep_places(placed, balanced[index], ranks)
            moves = deque(find_moves(placed, logical, ranks))
            placement = replace(layer.placement, logical=tuple(logical.tolist()))
            if moves:
                self._open.append(LayerMove(layer, placement, moves, []))
        self._num_stages = 0
        if self._group.rank == 0 and self._open:
            _log.info(
                "experts move in %d of %d layers; the busiest rank has %.2f times the mean load, then %.2f",
                len(self._open), len(self._layers), before.mean(), np.minimum(before, after).mean(),
            )  # fmt: skip

    def _run_stage(self, change: LayerMove) -> None:
        tensors = change.layer.list_tensors()
        maximum = max(1, self._stage_bytes // max(1, sum(tensor[0].nbytes for tensor in tensors)))
        stage = [change.moves.popleft() for _ in range(min(maximum, len(change.moves)))]
        change.received += self._exchange(tensors, stage)
        self._num_stages += 1
        if change.moves:
            return
        for place, weights in change.received:
            for tensor, value in zip(tensors, weights, strict=True):
                tensor[place].copy_(value)
        change.layer.set_placement(change.placement)
        self._open.popleft()
        if not self._open and self._group.rank == 0:
            _log.info("experts have moved, in %d stages", self._num_stages)

    def _exchange(self, tensors: Sequence[torch.Tensor], stage: Sequence[Move]) -> list[tuple[int, list[torch.Tensor]]]:
        """-> (place on this rank, weights) of each expert that this rank receives."""
        rank, size, each = self._group.rank, self._group.size, len(tensors[0])
        ordered = sorted(stage, key=lambda move: (move.source // each, move.target // each))
        sent = [move for move in ordered if move.source // each == rank]
        got = [move for move in ordered if move.target // each == rank]
        send_rows = [sum(move.target // each == other for move in sent) for other in range(size)]
        recv_rows = [sum(move.source // each == other for move in got) for other in range(size)]
        rows = torch.tensor([move.source % each for move in sent], dtype=torch.int64, device=tensors[0].device)
        received = []
        for tensor in tensors:
            chosen = tensor.view(torch.uint8).index_select(0, rows)  # float8 too, which not every collective takes
            taken = self._group.all_to_all(chosen, send_rows, recv_rows).view(tensor.dtype)
            received.append(taken.view(len(got), *tensor.shape[1:]))
        return [(move.target % each, [tensor_rows[index] for tensor_rows in received]) for index, move in enumerate(got)]


def keep_places(present: np.ndarray, balanced: np.ndarray, ranks: int) -> np.ndarray:
    """The experts of each rank in `wanted`, int64 [physical experts], at their present places where
    the rank has them already."""
    placed = []
    for present_ids, new in zip(present.reshape(ranks, -1), balanced.reshape(ranks, -1), strict=True):
        rest, kept = new.tolist(), []
        for logical in present_ids.tolist():
            kept.append(logical if logical in rest else None)
            if logical in rest:
                rest.remove(logical)
        placed += [rest.pop() if logical is None else logical for logical in kept]
    return np.array(placed, np.int64)


def find_moves(present: np.ndarray, balanced: np.ndarray, ranks: int) -> list[Move]:
    """A move for each place whose expert changes, from a place of its own rank if there is one."""
    each, moves = len(present) // ranks, []
    for target in np.flatnonzero(present != balanced).tolist():
        places = np.flatnonzero(present == balanced[target]).tolist()
        moves.append(Move(min(places, key=lambda place: (place // each != target // each, place)), target))
    return moves
