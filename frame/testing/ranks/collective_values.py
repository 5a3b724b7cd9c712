"""Checks of what collectives return: deterministic sums, exchanges without rows, parts of sums
along any dimension, and tensors that are written again. Used by the suite of the kind. Must not
know a collective by name."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from typing import Any

import torch

from frame.core.interfaces.collective import LOOPBACK, Collective, CollectiveContext, SupportsStartSend
from frame.plugins.devices import open_platform
from frame.testing.conformance import SkipCheck, Subject
from frame.testing.ranks.rank_threads import (
    count_devices,
    count_ranks,
    get_device,
    make_tensor,
    require_same,
    require_several,
    run_ranks,
    run_threads,
)

SECONDS = 6.0  # of a timeout that no operation should need
SIZES = (5, 4096, 100_000)  # elements of deterministic sums
LARGE = 1 << 22  # elements of a send that no buffer of the system holds


def check_deterministic_sums_add_in_the_order_of_ranks(subject: Subject) -> None:
    """Of floats of any size the bits of adding rank after rank, and of integers the exact sum."""
    if not getattr(subject.record.capabilities, "batch_invariant", False):
        raise SkipCheck("its capabilities do not state it")
    size = require_several(subject)

    def draw(rank: int, count: int) -> torch.Tensor:
        return torch.randn(count, generator=torch.Generator().manual_seed(100 * rank + count % 97)) * 10.0**rank

    def count(rank: int) -> torch.Tensor:
        return torch.tensor([2**24 + 1 + rank, 2**53 + 1 + rank, -(2**61) - rank])

    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        sums = [group.all_reduce(draw(group.rank, number).to(device)).cpu() for number in SIZES]
        return [*sums, group.all_reduce(count(group.rank).to(device)).cpu()]

    expected = []
    for number in SIZES:
        total = draw(0, number)
        for rank in range(1, size):
            total = total + draw(rank, number)
        expected.append(total)
    for *sums, integers in run_ranks(subject, act, size, deterministic=True):
        for number, one, other in zip(SIZES, sums, expected, strict=True):
            require_same(one, other, f"a deterministic sum of {number} elements in the order of the ranks")
        require_same(integers, torch.stack([count(rank) for rank in range(size)]).sum(0), "a deterministic sum of integers")


def check_exchanges_no_rows(subject: Subject) -> None:
    """Ranks that send nothing, that receive nothing, or neither: the other dimensions stay."""
    size = count_ranks(subject)
    tables = [
        [[0] * size for _ in range(size)],
        [[2 * (target == 0) for target in range(size)] for _ in range(size)],  # all to rank 0
        [[3 * (source == size - 1) for _ in range(size)] for source in range(size)],  # all from the last
    ]

    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        results = []
        for rows in tables:
            mine = make_tensor(group.rank, rows=sum(rows[group.rank])).view(-1, 2, 2).to(device)
            results.append(group.all_to_all(mine, rows[group.rank], [rows[source][group.rank] for source in range(size)]).cpu())
        return results

    received = run_ranks(subject, act)
    for number, rows in enumerate(tables):
        sent = [make_tensor(rank, rows=sum(rows[rank])).view(-1, 2, 2).split(rows[rank]) for rank in range(size)]
        for rank in range(size):
            what = f"what rank {rank} receives of {rows}"
            require_same(received[rank][number], torch.cat([sent[source][rank] for source in range(size)]), what)


def check_exchanges_rows_of_any_type(subject: Subject) -> None:
    """Values that another type would round: states, weights and numbers of experts."""
    size = count_ranks(subject)
    values = (
        torch.tensor([1 + 2**-10, -(2**-14)], dtype=torch.float16), torch.tensor([1 + 2**-7, 3e38], dtype=torch.bfloat16),
        torch.tensor([1 + 2**-23, 1e-30]), torch.tensor([2**53 + 1, -(2**31) - 1]),
    )  # fmt: skip

    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        ones = [1] * size
        return [group.all_to_all((value * (group.rank + 1)).repeat(size, 1).to(device), ones, ones).cpu() for value in values]

    for results in run_ranks(subject, act):
        for value, result in zip(values, results, strict=True):
            expected = torch.stack([value * (rank + 1) for rank in range(size)])
            require_same(result, expected, f"rows of {value.dtype} from all ranks")


def check_scatters_sums_along_any_dimension(subject: Subject) -> None:
    """Of three, counted from the first or the last."""
    size, dims = count_ranks(subject), (-1, -2, -3, 0, 1, 2)

    def make(rank: int) -> torch.Tensor:
        return torch.arange(8 * size**3).view(2 * size, 2 * size, 2 * size).float() % 11 + 100 * rank

    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        return [group.reduce_scatter(make(group.rank).to(device), dim).cpu() for dim in dims]

    total = torch.stack([make(rank) for rank in range(size)]).sum(0)
    for rank, results in enumerate(run_ranks(subject, act)):
        for dim, result in zip(dims, results, strict=True):
            require_same(result, total.chunk(size, dim)[rank], f"a part of the sum along {dim} of three dimensions")


def check_groups_of_one_address_do_not_mix(subject: Subject) -> None:
    """Two groups of other ranks and names, as the tensor groups of two pipeline stages."""
    require_several(subject)
    if 0 < count_devices(get_device(subject)) < 4:
        raise SkipCheck("there are fewer than four devices")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
        meetings = [f"file://{Path(folder) / 'ranks'}"]
        if getattr(subject.record.capabilities, "several_hosts", False):
            meetings.append(f"tcp://{LOOPBACK}:{port}")
        probe.close()
        for meeting in meetings:
            results = _sum_in_two_groups(subject, meeting)
            assert results == {0: 2.0, 1: 2.0, 2: 202.0, 3: 202.0}, f"two groups that meet at {meeting} sum {results}"


def _sum_in_two_groups(subject: Subject, meeting: str) -> dict[int, float | str]:
    """The sums of four ranks, of which each two form a group, or their errors."""
    results: dict[int, float | str] = {}
    groups: list[Collective] = []  # closed when all ranks have ended: one of them listens

    def work(number: int) -> None:
        platform, (stage, rank) = open_platform(f"{get_device(subject)}:{number}"), divmod(number, 2)
        platform.activate()
        context = CollectiveContext(rank, 2, meeting, platform, timeout=SECONDS, name=f"stage{stage}", listens=number == 0)
        try:
            group: Collective = subject.target(context, subject.options)
            groups.append(group)
            results[number] = float(group.all_reduce(torch.full((1,), 1.0 + 100 * stage, device=platform.device)))
        except RuntimeError as error:
            results[number] = str(error)

    run_threads(4, work, 2 * SECONDS)
    for group in groups:
        group.close()
    return results


def check_started_sends_may_be_written_when_they_have_ended(subject: Subject) -> None:
    """The tensor of a started send is written where there is nothing to wait for, or after the
    wait."""
    require_several(subject)
    if not issubclass(subject.target, SupportsStartSend):
        raise SkipCheck("this collective sends by `send` alone")

    def act(group: Any, device: torch.device) -> bool:
        if group.rank == 1:
            group.recv(torch.empty(1, device=device), 0)
            return bool((group.recv(torch.empty(LARGE, device=device), 0) == 7).all())
        mine = torch.full((LARGE,), 7.0, device=device)
        started = group.start_send(torch.zeros(1, device=device), 1)
        if started is not None:
            started.wait()
        sending = group.start_send(mine, 1)
        if sending is None:
            mine.zero_()
        else:
            sending.wait()
            mine.zero_()
        return True

    assert run_ranks(subject, act, 2) == [True, True], "a send that has ended sends what is written to its tensor later"
