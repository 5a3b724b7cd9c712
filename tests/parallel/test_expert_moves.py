"""Moves of experts: places that stay, and what is on a rank after each stage."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frame.core.interfaces.collective import Collective
from frame.core.interfaces.moe import ExpertPlacement
from frame.models.layers.moe import ExpertRoutes
from frame.parallel import expert_moves
from frame.parallel.expert_balance import balance_experts
from frame.parallel.expert_moves import ExpertBalancer, Move, count_transit_bytes, find_moves, keep_places
from frame.testing.ranks.thread_group import run_ranks


def test_experts_of_a_rank_stay_in_their_places() -> None:
    present, wanted = np.array([0, 1, 2, 3, 4, 0]), np.array([3, 4, 0, 2, 1, 0])
    kept = keep_places(present, wanted, ranks=2)
    assert sorted(kept[:3]) == [0, 3, 4] and kept[0] == 0
    assert sorted(kept[3:]) == [0, 1, 2] and kept[5] == 0


def test_a_copy_comes_from_the_same_rank_if_it_can() -> None:
    assert find_moves(np.array([0, 1, 2, 3, 0, 2]), np.array([0, 1, 0, 3, 0, 0]), ranks=2) == [Move(0, 2), Move(4, 5)]


def test_replicas_take_turns() -> None:
    routes = ExpertRoutes(ExpertPlacement.divide(4, 2, 2), 4, torch.device("cpu"), counts_tokens=True)
    ids = torch.tensor([[0, 2], [0, 3], [1, 0]])
    assert routes(ids).tolist() == [[0, 2], [4, 3], [1, 0]]
    assert routes.counts.tolist() == [3, 1, 1, 1]


class Layer:
    """Four experts and two redundant places on two ranks; an expert's weights are its number, in
    two dtypes."""

    def __init__(self, group: Collective, load: tuple[int, ...] = (90, 90, 90, 1)) -> None:
        self.placement = ExpertPlacement.divide(4, 2, 2)
        self.counts = torch.tensor(load)
        own = torch.tensor(self.placement.find_local(group.rank))
        self.tensors = [own.float()[:, None, None].expand(-1, 2, 3).contiguous(), own.to(torch.float8_e4m3fn)[:, None].contiguous()]

    def get_counts(self) -> torch.Tensor:
        return self.counts

    def list_tensors(self) -> list[torch.Tensor]:
        return self.tensors

    def set_placement(self, placement: ExpertPlacement) -> None:
        self.placement = placement


def test_a_layer_switches_when_all_weights_are_there() -> None:
    def act(group: Collective) -> list[tuple[int, ...]]:
        layer = Layer(group)
        counts = layer.counts.clone()
        balancer = ExpertBalancer([layer], group, interval=2, stage_bytes=1)  # type: ignore[arg-type,list-item]
        assert not layer.counts.any()  # those of warm-up steps
        layer.counts += counts
        one = sum(tensor[0].nbytes for tensor in layer.tensors)
        assert count_transit_bytes([layer], 1) == (len(layer.tensors[0]) + 1) * one  # type: ignore[list-item]
        seen = []
        for _ in range(8):
            balancer.begin_step()
            seen.append(layer.placement.logical)
            assert bool(balancer.imbalance) == (len(seen) > 1)  # measured before the second step
            own = layer.placement.find_local(group.rank)
            assert all(value >= 1.0 for value in balancer.imbalance)
            assert layer.tensors[0][:, 0, 0].tolist() == list(own) == layer.tensors[1][:, 0].float().tolist()
        return seen

    first, second = run_ranks(2, act)
    assert first == second
    changes = [index for index in range(1, 8) if first[index] != first[index - 1]]
    assert len(changes) == 1 and changes[0] > 2  # the counts are read before the second step, and a stage moves one expert
    assert set(first[-1]) == {0, 1, 2, 3}


def test_experts_stay_where_moves_would_not_pay() -> None:
    """The first rank has experts 0 to 2, of which 0 and 1 have a replica on the other one."""

    def act(group: Collective, load: tuple[int, ...]) -> tuple[float, bool]:
        layer = Layer(group, load)
        balancer = ExpertBalancer([layer], group, interval=1, stage_bytes=1 << 20)  # type: ignore[list-item]
        layer.counts += torch.tensor(load)
        balancer.begin_step()
        balancer.begin_step()
        return balancer.imbalance[0], layer.placement != ExpertPlacement.divide(4, 2, 2)

    # balanced, the busiest rank has 1.049 and 1.070 times the mean load
    for load, imbalance, moves in (((100, 100, 130, 80), 1.122, False), ((100, 100, 160, 70), 1.209, True)):
        assert run_ranks(2, lambda group, load=load: act(group, load)) == [(imbalance, moves)] * 2


def test_a_few_layers_are_placed_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []

    def balance(load: np.ndarray, *sizes: int) -> np.ndarray:
        placed.append(len(load))
        return balance_experts(load, *sizes)

    monkeypatch.setattr(expert_moves, "balance_experts", balance)

    def act(group: Collective) -> list[int]:
        layers = [Layer(group) for _ in range(9)]
        balancer = ExpertBalancer(layers, group, interval=3, stage_bytes=1 << 20)  # type: ignore[arg-type]
        for layer in layers:
            layer.counts += torch.tensor([90, 90, 90, 1])
        changed = []
        for _ in range(16):
            balancer.begin_step()
            changed.append(sum(layer.placement != ExpertPlacement.divide(4, 2, 2) for layer in layers))
        assert not any(layer.counts.any() for layer in layers)
        return changed

    changed = run_ranks(2, act)[0]
    assert sorted(placed[:6]) == [1, 1, 4, 4, 4, 4]  # of both ranks, in three steps
    assert changed[:5] == [0] * 5 and changed[5:14] == list(range(1, 10))
