"""The conformance suite of `collective/2`. The ranks are threads of one process, each with a member
of the group and a device of its own.

Run by the conformance option of the pytest plugin. A collective of one rank is checked alone; one
for a device of which there are too few is checked with as many ranks as there are. Must not know a
collective by name.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from frame.core.interfaces.collective import Collective, CollectiveCapabilities, CollectiveContext, SupportsStartSend
from frame.core.interfaces.platform import SupportsGraphs, SupportsStreams
from frame.plugins.devices import capture_graph, open_platform
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.generators import require_bounded
from frame.testing.ranks import collective_values
from frame.testing.ranks.rank_threads import (
    PATIENCE,
    count_ranks,
    get_device,
    make_tensor,
    require_same,
    require_several,
    run_ranks,
    run_threads,
)

MAX_SECONDS = 0.015  # of the fastest sum
_LONG = 12.0  # seconds of a timeout that no operation should need
LATE = 15.0  # seconds after which an operation with a timeout of two goes on too long
_TYPES = (torch.float32, torch.bfloat16, torch.int64)


def suite(subject: Subject) -> Iterable[Check]:
    """The checks of a collective, on the device that the setting names."""
    yield from collect(__name__, subject)
    yield from collect(collective_values.__name__, subject)


def check_members_have_their_places(subject: Subject) -> None:
    size = count_ranks(subject)
    places = run_ranks(subject, lambda group, device: (group.rank, group.size))
    assert places == [(rank, size) for rank in range(size)], "rank and size must be those of the context"


def check_sums(subject: Subject) -> None:
    size = count_ranks(subject)

    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        plain = [group.all_reduce(make_tensor(group.rank, dtype).to(device)).cpu() for dtype in _TYPES]
        return [*plain, group.all_reduce(make_tensor(group.rank).to(device).t()).cpu()]

    for results in run_ranks(subject, act):
        for dtype, each in zip(_TYPES, results, strict=False):
            require_same(each, sum((make_tensor(rank, dtype) for rank in range(size)), torch.zeros(6, 4, dtype=dtype)), f"a sum of {dtype}")
        require_same(results[-1], sum((make_tensor(rank) for rank in range(size)), torch.zeros(6, 4)).t(), "the sum of transposed tensors")


def check_batch_invariant(subject: Subject) -> None:
    """The sum of a row has the bits that it has among any other rows."""
    if not getattr(subject.record.capabilities, "batch_invariant", False):
        raise SkipCheck("its capabilities do not state it")

    def act(group: Collective, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(group.rank)
        for dtype in (torch.float32, torch.bfloat16):
            x = (torch.randn(513, 40, generator=generator) * 10.0**group.rank).to(device, dtype)
            x[8] = -0.0
            whole = group.all_reduce(x.clone()).cpu().view(torch.uint8)
            for first, rows in ((0, 1), (7, 1), (5, 16), (100, 300)):
                alone = group.all_reduce(x[first : first + rows].clone()).cpu().view(torch.uint8)
                assert torch.equal(alone, whole[first : first + rows]), f"the sum of {rows} rows has other bits than among 513 ({dtype})"

    run_ranks(subject, act, require_several(subject), deterministic=True)


def check_sums_have_the_same_bits(subject: Subject) -> None:
    def act(group: Collective, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(group.rank)
        return group.all_reduce((torch.randn(4096, generator=generator) * 10.0**group.rank).to(device)).cpu()

    first, *others = run_ranks(subject, act)
    assert all(torch.equal(first, other) for other in others), "a sum must have the same bits on all ranks"
    exact = sum(
        torch.randn(4096, generator=torch.Generator().manual_seed(rank)).double() * 10.0**rank for rank in range(count_ranks(subject))
    )
    assert torch.allclose(first.double(), torch.as_tensor(exact), rtol=1e-5, atol=1e-4), "a sum loses precision"


def check_gathers(subject: Subject) -> None:
    size = count_ranks(subject)

    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        return [group.all_gather(make_tensor(group.rank).to(device), dim).cpu() for dim in (-1, 0, 1)]

    results = run_ranks(subject, act)
    for rank in range(size):
        for dim, each in zip((-1, 0, 1), results[rank], strict=True):
            require_same(each, torch.cat([make_tensor(other) for other in range(size)], dim), f"what is gathered along {dim}")


def check_broadcasts(subject: Subject) -> None:
    size = count_ranks(subject)

    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        return [group.broadcast(make_tensor(group.rank).to(device), source).cpu() for source in range(size)]

    for results in run_ranks(subject, act):
        for source, each in enumerate(results):
            require_same(each, make_tensor(source), f"the tensor of source {source}")


def check_scatters_sums(subject: Subject) -> None:
    size = count_ranks(subject)
    rows = 2 * size

    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        mine = make_tensor(group.rank, rows=rows).to(device)
        return [group.reduce_scatter(mine.clone()).cpu(), group.reduce_scatter(mine.t().contiguous(), 1).cpu()]

    total = sum((make_tensor(rank, rows=rows) for rank in range(size)), torch.zeros(rows, 4))
    for rank, (first, second) in enumerate(run_ranks(subject, act)):
        require_same(first, total[2 * rank : 2 * rank + 2], "a part of the sum")
        require_same(second, total.t()[:, 2 * rank : 2 * rank + 2], "a part of the sum along 1")


def check_exchanges_rows(subject: Subject) -> None:
    size = count_ranks(subject)
    counts = [[(source + target + 1) % 3 if size > 1 else 4 for target in range(size)] for source in range(size)]

    def act(group: Collective, device: torch.device) -> torch.Tensor:
        mine = make_tensor(group.rank, rows=sum(counts[group.rank])).to(device)
        return group.all_to_all(mine, counts[group.rank], [counts[source][group.rank] for source in range(size)]).cpu()

    sent = [make_tensor(rank, rows=sum(counts[rank])).split(counts[rank]) for rank in range(size)]
    for rank, result in enumerate(run_ranks(subject, act)):
        require_same(result, torch.cat([sent[source][rank] for source in range(size)]), "what is received")


def check_sends_in_order(subject: Subject) -> None:
    size = require_several(subject)

    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        before, after = (group.rank - 1) % size, (group.rank + 1) % size
        results = []
        for turn in range(size):
            if turn == group.rank:
                for number in range(3):
                    group.send(make_tensor(group.rank + 10 * number).to(device), after)
            elif turn == before:
                results = [group.recv(torch.empty(6, 4, device=device), before).cpu() for _ in range(3)]
        return results

    for rank, results in enumerate(run_ranks(subject, act)):
        for number, each in enumerate(results):
            require_same(each, make_tensor((rank - 1) % size + 10 * number), f"message {number}")
        assert len(results) == 3


def check_starts_sends(subject: Subject) -> None:
    require_several(subject)
    size = 2

    if not issubclass(subject.target, SupportsStartSend):
        raise SkipCheck("this collective sends by `send` alone")

    def act(group: Any, device: torch.device) -> list[torch.Tensor]:
        results = []
        for number in range(3):  # pairs take turns, so that collectives whose sends wait pass too
            sends = [group.start_send(make_tensor(group.rank + number).to(device), (group.rank + 1) % size)] if group.rank % 2 == 0 else []
            results.append(group.recv(torch.empty(6, 4, device=device), (group.rank - 1) % size).cpu())
            sends += [group.start_send(make_tensor(group.rank + number).to(device), (group.rank + 1) % size)] if group.rank % 2 else []
            for send in filter(None, sends):
                send.wait()
        return results

    for rank, results in enumerate(run_ranks(subject, act, 2)):
        for number, each in enumerate(results):
            require_same(each, make_tensor((rank - 1) % 2 + number), f"tensor {number} of a started send")


def check_arguments_stay(subject: Subject) -> None:
    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        mine = [make_tensor(group.rank, rows=group.size).to(device) for _ in range(3)]
        group.all_gather(mine[0], 0)
        group.all_to_all(mine[1], [1] * group.size, [1] * group.size)
        if group.rank == 0:
            group.broadcast(mine[2])
        else:
            group.broadcast(torch.zeros_like(mine[2]))
        return [each.cpu() for each in mine]

    for rank, results in enumerate(run_ranks(subject, act)):
        for each in results:
            require_same(each, make_tensor(rank, rows=count_ranks(subject)), "an argument of an operation that must not change it")


def check_large_tensors(subject: Subject) -> None:
    size = count_ranks(subject)
    results = run_ranks(subject, lambda group, device: group.all_reduce(torch.full((1 << 18,), group.rank + 1.0, device=device)).cpu())
    assert all(bool((each == size * (size + 1) / 2).all()) for each in results), "a large sum is wrong"


def check_other_types_and_shapes(subject: Subject) -> None:
    """Booleans, integers above 2**53, tensors without elements, and three dimensions, where no sum
    rounds."""
    size = count_ranks(subject)

    def flags(rank: int) -> torch.Tensor:
        return torch.tensor([rank == 0, rank != 0, True, False])

    def numbers(rank: int) -> torch.Tensor:
        return torch.tensor([2**53 + 1 + rank, -(2**60) - rank, 16_777_217 + rank])

    def cube(rank: int) -> torch.Tensor:
        return torch.arange(24.0).view(2, 3, 4) + 100 * rank

    def act(group: Collective, device: torch.device) -> list[torch.Tensor]:
        rank = group.rank
        empty = torch.zeros(0, 4, device=device)
        results = [group.broadcast(flags(rank).to(device), size - 1), group.all_gather(flags(rank).to(device), 0)]
        results += [group.all_reduce(numbers(rank).to(device)), group.all_gather(numbers(rank).to(device), 0)]
        results += [group.broadcast(numbers(rank).to(device), size - 1)]
        results += [group.all_gather(cube(rank).to(device), dim) for dim in (0, 1, -2, 2)]
        results += [group.all_reduce(empty.clone()), group.all_gather(empty, 0), group.broadcast(empty.clone())]
        return [each.cpu() for each in results]

    ranks = range(size)
    expected = [flags(size - 1), torch.cat([flags(rank) for rank in ranks])]
    expected += [torch.stack([numbers(rank) for rank in ranks]).sum(0), torch.cat([numbers(rank) for rank in ranks]), numbers(size - 1)]
    expected += [torch.cat([cube(rank) for rank in ranks], dim) for dim in (0, 1, -2, 2)]
    expected += [torch.zeros(0, 4)] * 3
    names = ["broadcast booleans", "gathered booleans", "a sum of integers above 2**53", "gathered integers above 2**53"]
    names += ["broadcast integers above 2**53", *(f"what is gathered along {dim} of three" for dim in (0, 1, -2, 2))]
    names += [f"{what} of a tensor without elements" for what in ("the sum", "the gathering", "the broadcast")]
    for results in run_ranks(subject, act):
        for name, result, one in zip(names, results, expected, strict=True):
            require_same(result, one, name)


def check_results_are_kept(subject: Subject) -> None:
    """A result is the same after the next operation of its form."""

    def act(group: Collective, device: torch.device) -> None:
        for name, call in (("a sum", group.all_reduce), ("what is gathered", group.all_gather), ("a broadcast tensor", group.broadcast)):
            first = call(make_tensor(group.rank).to(device))
            kept = first.clone()
            call(make_tensor(group.rank + 7).to(device))
            assert torch.equal(first, kept), f"{name} changes with the next operation; return memory of its own"

    run_ranks(subject, act)


def check_very_large_tensors(subject: Subject) -> None:
    """A sum of more than 2**22 elements, of which the last ones are compared; one of them is
    beyond the range of float16."""
    size = min(count_ranks(subject), 2)

    def act(group: Collective, device: torch.device) -> torch.Tensor:
        mine = torch.ones((1 << 22) + 5, dtype=torch.bfloat16, device=device)
        mine[-3:] = group.rank + 2
        mine[1 << 21] = 2.0**17
        return group.all_reduce(mine)[[0, 1 << 21, (1 << 22) - 1, 1 << 22, -1]].cpu()

    expected = torch.tensor([size, size * 2.0**17, size, size, sum(rank + 2 for rank in range(size))], dtype=torch.bfloat16)
    for result in run_ranks(subject, act, size):
        require_same(result, expected, "a sum of 2**22 + 5 elements")


def check_many_operations(subject: Subject) -> None:
    """300 sums leave no memory behind, and the fastest takes less than 15 ms."""
    size = min(count_ranks(subject), 2)

    def act(group: Collective, device: torch.device) -> None:
        x, best = torch.ones(64, device=device), 1.0

        def add(_: int) -> None:
            nonlocal best
            began = time.perf_counter()
            group.all_reduce(x.clone())
            best = min(best, time.perf_counter() - began)

        stores = [one for one in vars(group).values() if isinstance(one, dist.Store)]
        add(0)
        before = [store.num_keys() for store in stores]
        require_bounded(group, add, 300, "sums")
        grown = [store.num_keys() - keys for store, keys in zip(stores, before, strict=True)]
        assert not any(keys > 100 for keys in grown), f"300 sums leave {max(grown)} keys in its store: delete those that have been read"
        assert best < MAX_SECONDS, f"a sum of 64 elements takes {best * 1e3:.1f} ms"

    run_ranks(subject, act, size)


def check_operations_in_a_row(subject: Subject) -> None:
    size = count_ranks(subject)

    def act(group: Collective, device: torch.device) -> list[float]:
        results = []
        for number in range(1, 9):
            x = torch.full((number,), float(group.rank + number), device=device)
            results += [
                float(group.all_reduce(x.clone()).sum()),
                float(group.all_gather(x, 0).sum()),
                float(group.broadcast(x, size - 1).sum()),
            ]
        return results

    expected = []
    for number in range(1, 9):
        total = number * sum(rank + number for rank in range(size))
        expected += [float(total), float(total), float(number * (size - 1 + number))]
    assert all(results == expected for results in run_ranks(subject, act)), "operations of different sizes in a row mix"


def check_groups_do_not_mix(subject: Subject) -> None:
    def both(group: Collective, device: torch.device) -> float:
        return float(group.all_reduce(torch.ones(2, device=device)).sum())

    require_several(subject)
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.extend(run_ranks(subject, both)))
    other.start()
    results += run_ranks(subject, both)
    other.join(PATIENCE)
    assert results == [2.0 * count_ranks(subject)] * 2 * count_ranks(subject), "two groups of one process mix"


def check_named_groups_meet_at_one_address(subject: Subject) -> None:
    """Tensor and pipeline groups of an engine, whose ranks have other numbers in each."""
    require_several(subject)
    results: dict[tuple[str, int], list[float]] = {}

    def work(rank: int, meeting: str) -> None:
        platform, groups = open_platform(f"{get_device(subject)}:{rank}"), {}
        platform.activate()
        for name, place in (("tensor", rank), ("pipeline", 1 - rank)):
            context = CollectiveContext(place, 2, meeting, platform, timeout=_LONG, name=name)
            groups[name] = subject.target(context, subject.options)
        for name, group in reversed(groups.items()):
            mine = torch.full((2,), float(group.rank + 1), device=platform.device)
            results[name, rank] = group.all_gather(mine, 0).tolist()
        for group in groups.values():
            group.close()

    with tempfile.TemporaryDirectory() as folder:
        run_threads(2, lambda rank: work(rank, f"file://{Path(folder) / 'ranks'}"), 2 * _LONG)
    expected = {(name, rank): [1.0, 1.0, 2.0, 2.0] for name in ("tensor", "pipeline") for rank in range(2)}
    assert results == expected, f"two groups of other names that meet at one address gather {results}"


def check_absent_ranks_end_the_wait(subject: Subject) -> None:
    require_several(subject)
    ends: list[BaseException | None] = []

    def wait(meeting: str) -> None:
        platform = open_platform(f"{get_device(subject)}:0")
        try:
            platform.activate()
            group: Collective = subject.target(CollectiveContext(0, 2, meeting, platform, timeout=1.0), subject.options)
            group.all_reduce(torch.ones(1, device=platform.device))
            if isinstance(platform, SupportsStreams):
                platform.synchronize()
        except BaseException as error:  # noqa: BLE001 - looked at below
            ends.append(error)
        else:
            ends.append(None)

    with tempfile.TemporaryDirectory() as folder:
        has_ended = run_threads(1, lambda _: wait(f"file://{Path(folder) / 'ranks'}"), 20.0)
    assert has_ended, "a group whose other ranks do not come must end after its timeout"
    assert isinstance(ends[0], RuntimeError), f"a group whose other ranks do not come must raise RuntimeError, not {ends[0]!r:.200}"


def check_operations_end_after_the_timeout(subject: Subject) -> None:
    """The other rank has joined, and calls nothing."""
    if require_several(subject) and get_device(subject) != "cpu":
        raise SkipCheck("on a device, the watchdog of a library may end the process")
    names, ends = ("recv", "all_reduce"), dict[str, BaseException | None]()
    over = {name: threading.Event() for name in names}

    def act(rank: int, name: str, meeting: str) -> None:
        group = subject.target(CollectiveContext(rank, 2, meeting, open_platform("cpu"), timeout=2.0), subject.options)
        if rank == 1:
            over[name].wait(LATE)
            return
        try:
            group.all_reduce(torch.ones(1)) if name == "all_reduce" else group.recv(torch.ones(1), 1)
            ends[name] = None
        except BaseException as error:  # noqa: BLE001 - looked at below
            ends[name] = error
        over[name].set()

    with tempfile.TemporaryDirectory() as folder:
        run_threads(4, lambda number: act(number % 2, names[number // 2], f"file://{Path(folder) / names[number // 2]}"), LATE)
    for name in names:
        assert name in ends, f"{name} goes on {LATE:g} seconds after its timeout of 2, when the other rank calls nothing"
        assert isinstance(ends[name], RuntimeError), f"{name} of one rank alone must raise RuntimeError, not {ends[name]!r:.200}"


def check_ends_are_noticed(subject: Subject) -> None:
    if require_several(subject) and get_device(subject) != "cpu":
        raise SkipCheck("on a device, the watchdog of a library may end the process")
    left = threading.Event()

    def act(rank: int, meeting: str, seen: list[str]) -> None:
        group = subject.target(CollectiveContext(rank, 2, meeting, open_platform("cpu"), timeout=_LONG), subject.options)
        group.all_reduce(torch.ones(1))
        if rank == 1:
            group.close()
            left.set()
            return
        left.wait(PATIENCE)
        began = time.monotonic()
        try:
            group.all_reduce(torch.ones(1))
            seen.append("no error")
        except RuntimeError:
            seen.append("error" if time.monotonic() - began < _LONG / 2 else "a late error")

    seen: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        run_threads(2, lambda rank: act(rank, f"file://{Path(folder) / 'ranks'}", seen), seconds=2 * _LONG)
        what = "an operation after another rank has left must raise RuntimeError at once, not hang, go on, or wait for its timeout"
        assert seen == ["error"], what


def check_meets_by_tcp(subject: Subject) -> None:
    can = subject.record.capabilities
    require_several(subject)
    if not (isinstance(can, CollectiveCapabilities) and can.several_hosts):
        raise SkipCheck("the record says that it connects ranks of one host")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = run_ranks(
        subject, lambda group, device: float(group.all_reduce(torch.ones(1, device=device))), address=f"tcp://127.0.0.1:{port}"
    )
    assert results == [float(count_ranks(subject))] * count_ranks(subject)


def check_rank_0_listens(subject: Subject) -> None:
    """The others may be on hosts that only know its address."""
    can = subject.record.capabilities
    require_several(subject)
    if not (isinstance(can, CollectiveCapabilities) and can.several_hosts) or get_device(subject) != "cpu":
        raise SkipCheck("the record says that it connects ranks of one host, or the device has a library of its own")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def wait() -> None:
        with contextlib.suppress(RuntimeError):  # no other rank comes
            subject.target(CollectiveContext(0, 2, f"tcp://127.0.0.1:{port}", open_platform("cpu"), timeout=2.0), subject.options)

    rank, listens, deadline = threading.Thread(target=wait, daemon=True), False, time.monotonic() + 2.0
    rank.start()
    while not listens and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            listens = True
        time.sleep(0.02)
    rank.join(PATIENCE)
    assert listens, "rank 0 must listen at the group's address"


def check_is_captured(subject: Subject) -> None:
    can = subject.record.capabilities
    if not (isinstance(can, CollectiveCapabilities) and can.capturable):
        raise SkipCheck("the record does not say that it can be captured")
    if not isinstance(open_platform(get_device(subject)), SupportsGraphs):
        raise SkipCheck("this platform captures no graphs")

    def act(group: Collective, device: torch.device) -> float:
        x = torch.ones(4, device=device)
        group.all_reduce(x.clone())
        out: list[torch.Tensor] = []
        graph = capture_graph(group.context.platform, lambda: out.append(group.all_reduce(x + 0)))
        x.fill_(2)
        graph.replay()
        return float(out[0][0])

    size = count_ranks(subject)
    assert run_ranks(subject, act) == [2.0 * size] * size, "a replay must sum the values of now"
