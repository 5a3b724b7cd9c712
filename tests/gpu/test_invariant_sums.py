"""The batch-invariant mode on two GPUs: the sum of a row has the same bits in every form in which
`p2p` sums, alone and among other rows, and with the norm in the same kernel."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

from frame.core.interfaces.collective import CollectiveContext
from frame.plugins.devices import open_platform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

ROWS, EPS = 4096, 1e-5
ONE_SHOT = 1 << 20  # bytes; more goes by copies, and in a graph by NCCL
COUNTS = (1, 2, 3, 16, 64, 127, 128, 129, 256, 257, 1000, 2048)


def make_rows(rank: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    x[:, 3] = -0.0
    x[:, 4] = float("nan")
    x[1::2, 4] = 1.0
    return x.to(f"cuda:{rank}", dtype)


def require_bits(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """NaN is NaN, whatever its bits are."""
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan), what
    integers = {2: torch.int16, 4: torch.int32}[found.itemsize]
    equal = (found.contiguous().view(integers) == expected.contiguous().view(integers)) | is_nan
    assert equal.all(), f"{what}: {(~equal).sum().item()} of {equal.numel()} elements differ"


def compare(rank: int, folder: str, columns: int, name: str) -> None:
    """On one rank: sums of parts beside the sums of all rows."""
    from frame.kernels.elementwise.norm import add_rms_norm
    from frame.plugins.collectives import P2pOptions
    from frame.plugins.collectives.p2p import P2p

    platform, dtype = open_platform(f"cuda:{rank}"), getattr(torch, name)
    platform.activate()
    context = CollectiveContext(rank, 2, f"file://{folder}/ranks", platform, timeout=60.0, deterministic=True)
    group = P2p(context, P2pOptions(one_shot_bytes=ONE_SHOT))
    assert group._copies is not None, "the GPUs cannot write to each other's memory"
    x = make_rows(rank, columns, dtype)
    whole = group.all_reduce(x)
    both = [make_rows(each, columns, dtype).to(x.device).float() for each in range(2)]
    require_bits(whole, (both[0] + both[1]).to(dtype), "a sum by copies is not the rounded sum in float32")
    half = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.device, dtype)
    weight = torch.rand(columns, generator=torch.Generator().manual_seed(3)).to(x.device, dtype)
    residual = half.clone()
    normed = add_rms_norm(whole, residual, weight, EPS)[0]
    halves = group.reduce_matmul(lambda rows: rows * 1, x, columns)
    assert halves is not None
    require_bits(halves, whole, "a sum of pieces")
    is_fused = []
    for first in (0, 777):
        for count in COUNTS:
            rows = slice(first, first + count)
            require_bits(group.all_reduce(x[rows]), whole[rows], f"{count} rows from {first}")
            stream = half[rows].clone()
            joined = group.reduce_add_norm(x[rows], stream, weight, EPS)
            is_fused.append(joined is not None)
            if joined is not None:
                require_bits(stream, residual[rows], f"the residual of {count} rows from {first}")
                require_bits(joined, normed[rows], f"the norm of {count} rows from {first}")
    assert any(is_fused), "no sum was joined with a norm"
    odd = x[:3, :7].contiguous()  # no kernel takes 21 elements
    require_bits(group.all_reduce(odd), whole[:3, :7], "21 elements")
    graph = torch.cuda.CUDAGraph()
    group.all_reduce(x[:2048].clone())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = group.all_reduce(x[:2048])
    graph.replay()
    torch.cuda.synchronize()
    require_bits(captured, whole[:2048], "2,048 rows in a graph")
    graph.reset()  # NCCL does not end while a graph has its operations
    group.close()


@pytest.mark.parametrize(("columns", "dtype"), [(2048, "bfloat16"), (4096, "bfloat16"), (5120, "float16"), (1024, "float32")])
def test_a_sum_has_the_same_bits_in_every_form(columns: int, dtype: str, tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compare, rank, str(tmp_path), columns, dtype) for rank in range(2)]:
            done.result(120)
