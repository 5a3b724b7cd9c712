"""The dispatcher `deepep` with a library in Python: what the suite of dispatchers asks for, and
that the calls are those of the real library where it is installed."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frame.core.interfaces.moe import DispatcherCapabilities
from frame.core.interfaces.plugin import PluginRecord
from frame.plugins.moe_dispatchers.deepep import Communicator, DeepEP
from frame.testing import conformance
from frame.testing.conformance import run_suite
from frame.testing.ranks.thread_group import ThreadGroup, run_ranks


def exchange(comm: Any, rows: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' rows."""
    kind, width = rows.dtype, rows.shape[1]
    values = comm.allgather(bytearray(rows.contiguous().view(torch.uint8).numpy().tobytes()))
    return [torch.frombuffer(value, dtype=kind).view(-1, width) if value else rows.new_empty(0, width) for value in values]


class Buffer:
    """`deep_ep.Buffer`, as far as it is used: its parameters, results and errors."""

    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, comm: Any = None) -> None:
        assert group is None and num_nvl_bytes == 96 * 1024 and num_rdma_bytes == 0
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        assert comm.allgather(self.rank) == list(range(self.size)) and comm.allgather(None) == [None] * self.size

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row_bytes, ranks: 1024 * 48, get_rdma_buffer_size_hint=lambda row_bytes, ranks: 0
        )

    @staticmethod
    def get_combine_config(num_ranks: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda row_bytes, ranks: 1024 * 96, get_rdma_buffer_size_hint=lambda row_bytes, ranks: 0
        )

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64 and num_experts % self.size == 0
        ranks = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.size), -1)
        is_sent = torch.stack([(ranks == rank).any(1) for rank in range(self.size)], dim=1)
        by_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return is_sent.sum(0).int(), None, by_expert, is_sent, None

    def dispatch(
        self,
        x: torch.Tensor,
        num_tokens_per_rank: torch.Tensor,
        num_tokens_per_rdma_rank: torch.Tensor | None,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and topk_idx.is_contiguous() and topk_weights.dtype == torch.float32
        each = len(num_tokens_per_expert) // self.size
        masks = [mask.bool() for mask in exchange(self.comm, is_token_in_rank.to(torch.uint8))]
        rows, ids, weights = (
            torch.cat([part[mask[:, self.rank]] for part, mask in zip(exchange(self.comm, tensor), masks, strict=True)])
            for tensor in (x, topk_idx, topk_weights)
        )
        is_own = (ids >= 0) & (ids // each == self.rank)
        return rows, torch.where(is_own, ids % each, -1), torch.where(is_own, weights, 0), [], (masks,), None

    def combine(self, x: torch.Tensor, handle: tuple[Any, ...]) -> tuple[Any, ...]:
        (masks,) = handle
        assert x.is_contiguous() and len(x) == sum(int(mask[:, self.rank].sum()) for mask in masks)
        summed = torch.zeros(len(masks[self.rank]), x.shape[1])
        for rank, rows in enumerate(exchange(self.comm, x)):
            mine = rows.split([int(mask[:, rank].sum()) for mask in masks])[self.rank]
            summed[masks[self.rank][:, rank]] += mine.float()
        return summed.to(x.dtype), None, None


def test_the_suite_of_dispatchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Buffer))
    able = DispatcherCapabilities(devices=("cpu",), dtypes=("bfloat16",), sliced_experts=False, whole_experts=True)
    record = PluginRecord("moe_dispatcher", "deepep", "m:X", "moe_dispatcher/3", able)
    outcomes = run_suite(conformance.Subject(record, DeepEP, None, conformance.Setting()))
    assert len(outcomes) >= 6 and not [each for each in outcomes if each.result != "passed"]


def test_ranks_exchange_values_of_different_sizes() -> None:
    def work(group: ThreadGroup) -> list[Any]:
        return Communicator(group, torch.device("cpu")).allgather(bytearray(range(3 * group.rank)) if group.rank else None)

    assert run_ranks(3, work) == [[None, bytearray(range(3)), bytearray(range(6))]] * 3


def test_the_calls_are_those_of_the_library() -> None:
    found = importlib.util.find_spec("deep_ep")
    if found is None or found.origin is None:
        pytest.skip("needs deep_ep, which is read without being imported")
    folder = Path(found.origin).parent
    file = next(path for path in (folder / "buffers" / "legacy.py", folder / "buffer.py") if path.exists())
    (library,) = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == "Buffer")
    methods = {node.name: node.args for node in library.body if isinstance(node, ast.FunctionDef)}
    for name, made in inspect.getmembers(Buffer, inspect.isfunction):
        wanted = {parameter.arg for parameter in (*methods[name].args, *methods[name].kwonlyargs)}
        assert set(inspect.signature(made).parameters) <= wanted, name
