"""Manifest of the in-tree MoE dispatchers: records only. Must not import the plugins."""

from __future__ import annotations

from frame.core.interfaces.moe import DispatcherCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_moe_dispatchers(registry: KindRegistry) -> None:
    """Add the in-tree MoE dispatchers."""
    registry.add(
        "all_reduce",
        "frame.plugins.moe_dispatchers.all_reduce:AllReduce",
        capabilities=DispatcherCapabilities(devices=("cpu", "cuda"), graphs=True, whole_experts=True, batch_invariant=True),
        rank=10,
        summary="Every rank computes its experts, or a slice of each, for all tokens; the results are summed.",
    )
    registry.add(
        "all_gather_reduce_scatter",
        "frame.plugins.moe_dispatchers.all_gather_reduce_scatter:AllGatherReduceScatter",
        capabilities=DispatcherCapabilities(devices=("cpu", "cuda"), graphs=True, whole_experts=True, attention_groups=True),
        summary="As all_reduce, with the sum in two halves; attention groups gather their tokens before it.",
    )
    registry.add(
        "all_to_all",
        "frame.plugins.moe_dispatchers.all_to_all:AllToAll",
        capabilities=DispatcherCapabilities(devices=("cpu", "cuda"), sliced_experts=False, whole_experts=True, attention_groups=True),
        summary="Tokens are sent to the ranks of their experts, and the results back.",
    )
    registry.add(
        "deepep",
        "frame.plugins.moe_dispatchers.deepep:DeepEP",
        capabilities=DispatcherCapabilities(
            devices=("cuda",),
            dtypes=("bfloat16",),
            min_compute_capability=(9, 0),
            sliced_experts=False,
            whole_experts=True,
            attention_groups=True,
        ),
        modules={"deep_ep": "install sgl-deep-ep, or build github.com/deepseek-ai/DeepEP"},
        rank=-1,
        summary="As all_to_all, by the kernels of DeepEP. `auto` does not choose it.",
    )
