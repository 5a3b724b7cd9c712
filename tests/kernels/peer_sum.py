"""Sums and gathered columns of ranks that write to each other's memory: several calls of different
sizes in a row, with and without residual addition and norm.

Run by `test_interpreted.py` under TRITON_INTERPRET=1, with a process for each rank, and by
tests/gpu, with a stream of one GPU for each rank.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import reduce

import pytest
import torch

from frame.kernels import INTERPRETED, peer_sum
from frame.kernels.elementwise.norm import add_rms_norm
from frame.kernels.peer_sum import Peers

DEVICE = "cpu" if INTERPRETED else "cuda"
EPS = 1e-5
_PATIENCE = 240  # seconds: ranks that wait take processor time from the others
Results = list[list[torch.Tensor]]  # of each call
TOLERANCE = {  # the interpreter cuts bfloat16 instead of rounding
    torch.bfloat16: {"rtol": 1e-2, "atol": 5e-2}, torch.float16: {"rtol": 2e-3, "atol": 2e-3}, torch.float32: {"rtol": 1e-5, "atol": 1e-5}
}  # fmt: skip
CALLS = (  # (columns, rows, form)
    (8192, 1, "sum"), (96, 3, "norm"), (2048 * 5 + 16, 1, "sum"), (160, 2, "norm"), (1040, 3, "gather"), (64, 4, "norm"), (16, 1, "sum"),
    (512, 1, "norm"), (2064, 1, "gather"),
)  # fmt: skip


def make(rank: int, call: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's summand, with values that the kernel must tell from empty memory."""
    columns, rows, _ = CALLS[call]
    x = torch.randn(columns * rows, generator=torch.Generator().manual_seed(10 * call + rank)).to(dtype)
    x[:3] = torch.tensor([-0.0, float("inf"), 0.0])
    x.view(torch.int32 if dtype is torch.float32 else torch.int16)[3] = -1  # a NaN
    return x.view(rows, columns).to(DEVICE)


def residual_of(call: int, dtype: torch.dtype) -> torch.Tensor:
    columns, rows, _ = CALLS[call]
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(call)).to(dtype).to(DEVICE)


def weight_of(columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(columns) % 7 / 8 + 0.5).to(dtype).to(DEVICE)


def prepare(rank: int, dtype: torch.dtype) -> Callable[[Peers], Results]:
    """All calls of a rank, with their arguments on the device."""
    arguments = []
    for call, (columns, _, form) in enumerate(CALLS):
        others = (residual_of(call, dtype), weight_of(columns, dtype)) if form == "norm" else ()
        arguments.append((form, make(rank, call, dtype), *others))

    def act(peers: Peers) -> Results:
        found: Results = []
        for form, x, *others in arguments:
            if form == "gather":
                found.append([peer_sum.gather_peers(x, peers)])
            elif form == "sum":
                found.append([peer_sum.sum_peers(x, peers)])
            else:
                residual = others[0].clone()
                found.append([peer_sum.sum_add_norm(x, residual, others[1], EPS, peers), residual])
        return found

    return act


def expect(call: int, dtype: torch.dtype, ranks: int) -> list[torch.Tensor]:
    """The results by the separate steps."""
    parts, form = [make(rank, call, dtype) for rank in range(ranks)], CALLS[call][2]
    if form == "gather":
        return [torch.cat(parts, 1)]
    total = reduce(torch.add, [part.float() for part in parts]).to(dtype)
    if form == "sum":
        return [total]
    return list(add_rms_norm(total, residual_of(call, dtype), weight_of(CALLS[call][0], dtype), EPS))


def make_peers(ranks: int) -> list[Peers]:
    memories = [torch.zeros(peer_sum.count_bytes(ranks), dtype=torch.uint8, device=DEVICE) for _ in range(ranks)]
    turns = [torch.zeros(peer_sum.CHANNELS, dtype=torch.int32, device=DEVICE) for _ in range(ranks)]
    for memory in memories:
        if INTERPRETED:
            memory.share_memory_()
        peer_sum.clear(memory)
    addresses = torch.tensor([memory.data_ptr() for memory in memories], device=DEVICE)
    peers = [Peers(rank, ranks, addresses, turns[rank]) for rank in range(ranks)]
    made.extend(memories)
    return peers


made: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def free_memory() -> None:
    made.clear()


def on_processes(peers: list[Peers], dtype: torch.dtype) -> list[Results]:
    """The results of all ranks, each in a process that shares the memory."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in peers]

    def run(rank: int) -> None:
        results = prepare(rank, dtype)(peers[rank])
        pipes[rank][1].send([[part.float().tolist() for part in parts] for parts in results])

    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(len(peers))]
    for process in processes:
        process.start()
    found = []
    for ours, _ in pipes:
        assert ours.poll(_PATIENCE), "a rank waits for another"
        found.append([[torch.tensor(part) for part in parts] for parts in ours.recv()])
    for process in processes:
        process.join()
    return found


def on_streams(peers: list[Peers], dtype: torch.dtype) -> list[Results]:
    """The results of all ranks, each a graph on a stream of one GPU, after three replays."""
    graphs, found = [torch.cuda.CUDAGraph() for _ in peers], []
    acts = [prepare(each.rank, dtype) for each in peers]  # which hold what the graphs read
    for each, act, graph in zip(peers, acts, graphs, strict=True):
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            found.append(act(each))
    streams = [torch.cuda.Stream() for _ in peers]
    torch.cuda.synchronize()
    for _ in range(3):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    return [[[part.float().cpu() for part in parts] for parts in results] for results in found]


@pytest.mark.parametrize(("dtype", "ranks"), [(torch.bfloat16, 2), (torch.float32, 3), (torch.float16, 2)])
def test_calls_in_a_row_give_the_sums_of_all_ranks(dtype: torch.dtype, ranks: int) -> None:
    found = (on_processes if INTERPRETED else on_streams)(make_peers(ranks), dtype)
    for call in range(len(CALLS)):
        expected = expect(call, dtype, ranks)
        for rank in range(ranks):
            for mine, first, right in zip(found[rank][call], found[0][call], expected, strict=True):
                torch.testing.assert_close(mine.view(-1), first.view(-1), rtol=0, atol=0, equal_nan=True)  # the same bits on all ranks
                expected_values = right.float().cpu()
                torch.testing.assert_close(mine.view(right.shape), expected_values, **TOLERANCE[dtype], equal_nan=True)
                is_number = ~expected_values.isnan() & (CALLS[call][2] != "norm")
                assert (mine.view(right.shape).signbit() == expected_values.signbit())[is_number].all()  # negative zeros too
    for memory in made:
        half = memory.view(torch.int16)
        assert (half == half[0]).all()  # all places are empty again
