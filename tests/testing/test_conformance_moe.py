"""The suites of MoE runners and dispatchers: their reference, their ranks, and what they ask for.
`test_mutants` shows what they find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from frame.core.interfaces.moe import MoECapabilities
from frame.core.interfaces.plugin import PluginRecord
from frame.testing import conformance
from frame.testing.moe import dispatcher as moe_dispatcher
from frame.testing.moe.experts import draw, reference, split
from frame.testing.ranks.thread_group import ThreadGroup, run_ranks
from tests.testing.mutants import load_mutants


def test_reference_is_the_definition() -> None:
    x, ids, weights, gate_up, down = draw((5, 4, 2, 16, 8), torch.float32)
    expected = torch.zeros_like(x)
    for token in range(5):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(reference(x, ids, weights, gate_up, down).float(), expected)


def test_slices_add_up() -> None:
    x, ids, weights, *layer = draw((5, 4, 2, 16, 12), torch.float32)
    parts = [reference(x, ids, weights, *split(*layer, rank, 3)) for rank in range(3)]
    torch.testing.assert_close(sum(parts), reference(x, ids, weights, *layer))


@pytest.mark.parametrize("kind", ["moe_runner", "moe_dispatcher"])
def test_only_stated_types_are_checked(kind: str) -> None:
    target = load_mutants(kind).reference.make()

    def names(capabilities: MoECapabilities) -> list[str]:
        record = PluginRecord(kind, "x", "m:X", f"{kind}/2", capabilities)
        subject = conformance.Subject(record, target, None, conformance.Setting())
        return [check.name for check in conformance.checks(kind, subject)]

    assert all(name.endswith("bfloat16") for name in names(MoECapabilities(devices=("cpu",), dtypes=("bfloat16",))))
    with pytest.raises(conformance.PluginError, match="No conformance check"):
        names(MoECapabilities(devices=("cuda",)))


def test_ranks_meet() -> None:
    def work(group: ThreadGroup) -> list[Any]:
        own = torch.tensor([float(group.rank + 1)])
        return [group.all_reduce(own).tolist(), group.all_gather(own).tolist(), group.broadcast(own, 1).tolist(), own.tolist()]

    assert run_ranks(2, work) == [[[3.0], [1.0, 2.0], [2.0], [1.0]], [[3.0], [1.0, 2.0], [2.0], [2.0]]]


def test_ranks_that_part_are_told() -> None:
    with pytest.raises(AssertionError, match="different calls: all_gather of .*, all_reduce of"):
        run_ranks(2, lambda group: (group.all_reduce if group.rank else group.all_gather)(torch.ones(1)))
    with pytest.raises(ValueError, match="own fault"):  # not the barrier that it broke for the others
        run_ranks(2, lambda group: group.all_reduce(torch.ones(1)) if group.rank else (_ for _ in ()).throw(ValueError("own fault")))


def test_dispatched_ids_are_checked() -> None:
    class Outside(load_mutants("moe_dispatcher").reference.make()):  # type: ignore[misc]
        def dispatch(self, x: Any, ids: Any, weights: Any, placement: Any) -> Any:
            return super().dispatch(x, ids + 100, weights, placement)

    record = PluginRecord("moe_dispatcher", "outside", "m:X", "moe_dispatcher/3")
    first = next(iter(moe_dispatcher.suite(conformance.Subject(record, Outside, None, conformance.Setting()))))
    with pytest.raises(AssertionError, match="not indices of the rank's 8 experts"):
        first.run()
