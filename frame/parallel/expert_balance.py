"""`balance_experts`: a placement of experts on ranks by their measured load, with replicas of the
experts that are used most. A pure function.

The policy is that of the expert-parallelism load balancer of DeepSeek-V3 (EPLB, arXiv 2412.19437,
section 3.4.1): whole groups of experts are divided among hosts, each host's experts are replicated,
and the replicas are divided among the host's ranks. Must not know a model or a rank's state.
"""

from __future__ import annotations

import numpy as np


def balance_experts(load: np.ndarray, num_physical: int, num_ranks: int, num_groups: int = 1, num_hosts: int = 1) -> np.ndarray:
    """The logical expert of each physical one, int64 [layers, num_physical]; rank r holds the r-th
    of `num_ranks` equal parts.

    load: tokens of each logical expert, [layers, experts]. num_groups: of experts, from which a
    token chooses; where `num_hosts` does not divide it, groups and hosts are not considered. Raises
    ValueError for numbers that cannot be divided.
    """
    load = np.asarray(load, np.float64)
    _, experts = load.shape
    if num_groups % num_hosts:
        num_groups = num_hosts = 1
    for what, whole, divisor in (
        ("experts", experts, num_groups), ("physical experts", num_physical, num_ranks), ("ranks", num_ranks, num_hosts),
    ):  # fmt: skip
        if whole % divisor:
            raise ValueError(f"{whole} {what} cannot be divided by {divisor}")
    if num_physical < experts:
        raise ValueError(f"{num_physical} physical experts cannot hold {experts} logical ones")
    return np.stack([_balance_layer(row, num_physical, num_ranks, num_groups, num_hosts) for row in load])


def _balance_layer(load: np.ndarray, num_physical: int, num_ranks: int, num_groups: int, num_hosts: int) -> np.ndarray:
    group_size = len(load) // num_groups
    groups = pack(load.reshape(num_groups, group_size).sum(1), num_hosts)  # [hosts, groups of a host]
    placed = []
    for members in groups:
        experts = (members[:, None] * group_size + np.arange(group_size)).ravel()
        replicas, counts = replicate(load[experts], num_physical // num_hosts)
        packs = pack((load[experts] / counts)[replicas], num_ranks // num_hosts)
        placed.append(experts[replicas[packs.ravel()]])
    return np.concatenate(placed)


def pack(load: np.ndarray, num_packs: int) -> np.ndarray:
    """Divide items into packs of equal numbers and nearly equal loads: the heaviest item first,
    each into the lightest pack that has room. -> int64 [packs, items of a pack]."""
    size = len(load) // num_packs
    if size == 1:
        return np.arange(num_packs)[:, None]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    loads = np.zeros(num_packs)
    for item in np.argsort(-load, kind="stable"):
        lightest = min((index for index in range(num_packs) if len(packs[index]) < size), key=loads.__getitem__)
        packs[lightest].append(int(item))
        loads[lightest] += load[item]
    return np.array(packs, np.int64)


def replicate(load: np.ndarray, num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the expert with the greatest load of one replica another one until there are
    `num_replicas`. -> (expert of each replica, replicas of each expert), int64."""
    counts = np.ones(len(load), np.int64)
    replicas = list(range(len(load)))
    for _ in range(num_replicas - len(load)):
        busiest = int(np.argmax(load / counts))
        replicas.append(busiest)
        counts[busiest] += 1
    return np.array(replicas, np.int64), counts


def find_imbalance(load: np.ndarray, placement: np.ndarray, num_ranks: int) -> np.ndarray:
    """The load of the busiest rank over the mean load of ranks, float64 [layers]; 1.0: balanced.
    The replicas of an expert share its load equally."""
    imbalances = []
    for row, logical in zip(np.asarray(load, np.float64), placement, strict=True):
        each = row / np.maximum(np.bincount(logical, minlength=len(row)), 1)
        ranks = each[logical].reshape(num_ranks, -1).sum(1)
        imbalances.append(ranks.max() / max(ranks.mean(), 1e-9))
    return np.array(imbalances)
