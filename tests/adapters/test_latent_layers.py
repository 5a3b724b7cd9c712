"""Deltas of `kv_b_proj` on one of two ranks, against queries and results of the merged weight.

Run also by `tests/kernels/test_interpreted.py`, and collected by `tests/gpu/test_lora.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from frame.adapters.adapter_pool import AdapterPool, AdapterSizes
from frame.adapters.adapter_reader import CONFIG, TENSORS, AdapterReader, ChosenFormat
from frame.adapters.deltas import DeltaOperations, TorchDeltas
from frame.adapters.device_adapters import DeviceAdapters
from frame.core.interfaces.batch import AdapterLoad
from frame.core.interfaces.rank_context import Limits
from frame.interfaces.adapter import AdapterConfig, AdapterError, LowRankDelta
from frame.kernels import INTERPRETED
from frame.models.layers.mla import multiply_heads
from frame.models.layers.parameter import Range

NAME, OTHER = "layers.0.kv_b_proj", "layers.0.o_proj"
HEADS, NOPE, VALUE, RANK = 6, 20, 12, 40  # heads of both ranks
MINE = slice(3 * (NOPE + VALUE), 6 * (NOPE + VALUE))
TOKENS = [3, 1, 4, 2]  # of requests with the adapters 0, none, 1 and 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_delta(ranks: int, norm: torch.Tensor | None = None) -> LowRankDelta:
    return LowRankDelta(draw(ranks, RANK), draw(HEADS * (NOPE + VALUE), ranks) * ranks**-0.5, 0.7, output_norm=norm)


def read(adapters: DeviceAdapters, folder: Path, deltas: Iterable[tuple[str, LowRankDelta]], invocation: tuple[int, ...] = ()) -> Any:
    (folder / CONFIG).write_text("{}")
    save_file({}, folder / TENSORS)
    deltas = list(deltas)
    rank = max(delta.a.shape[0] for _, delta in deltas)
    plugin: Any = SimpleNamespace(read_config=lambda _: AdapterConfig(rank, "", invocation), read_deltas=lambda *_: deltas)
    tensors = [f"{name}.weight" for name in (NAME, OTHER, "layers.0.gate")]
    return AdapterReader([ChosenFormat("test", lambda _: True, plugin)], adapters.pool, lambda pairs: pairs, (), tensors).read(folder)


def open_adapters(operations: DeltaOperations) -> tuple[DeviceAdapters, Any]:
    platform: Any = SimpleNamespace(device=DEVICE)
    tp: Any = SimpleNamespace(size=2)
    adapters = DeviceAdapters(AdapterPool(AdapterSizes(3, 6, 2), platform, torch.float32, tp), operations)
    adapters.add_layer((OTHER,), Range.whole(8), (Range.whole(8),))
    widths = Range.whole(NOPE), Range.whole(VALUE)
    layer = adapters.add_latent_layer(NAME, Range.whole(RANK), Range.split(HEADS * (NOPE + VALUE), 1, 2), widths)
    adapters.allocate(Limits(8, 512, 64, 4))
    return adapters, layer


def begin_step(adapters: DeviceAdapters, places: list[int], loads: list[AdapterLoad]) -> None:
    setups = [SimpleNamespace(slot=slot, adapter=place, adapter_start=0) for slot, place in enumerate(places)]
    batch: Any = SimpleNamespace(adapter_loads=loads, slots=list(range(len(places))), released=[], setups=setups)
    adapters.begin_step(batch)
    counts = torch.tensor(TOKENS[: len(places)], device=DEVICE)
    total = int(counts.sum())
    tokens: Any = SimpleNamespace(
        request_slots=torch.arange(len(places), device=DEVICE), num_tokens=total, num_rows=len(places), query_lens=counts,
        positions=torch.zeros(total, dtype=torch.int64, device=DEVICE),
    )  # fmt: skip
    adapters.place_tokens(tokens, total)
    adapters.plan_tokens(total)


def check_products(operations: DeltaOperations, folder: Path) -> None:
    adapters, layer = open_adapters(operations)
    weight = draw(HEADS * (NOPE + VALUE), RANK)
    layer.gemm = lambda x: x @ weight[MINE].to(x.device).t()
    norm = torch.rand(len(weight), generator=torch.Generator().manual_seed(3)) * 5 + 1
    deltas = {"plain": make_delta(20), "norm": make_delta(5, norm), "other": LowRankDelta(draw(3, 8), draw(8, 3))}
    merged = [weight]
    for key, delta in deltas.items():
        adapters.host[key] = read(adapters, folder, [(OTHER if key == "other" else NAME, delta)])
        changed = weight if key == "other" else weight + 0.7 * delta.b @ delta.a
        merged.append(changed if delta.output_norm is None else changed / changed.norm(dim=1, keepdim=True) * norm[:, None])
    begin_step(adapters, [0, -1, 1, 2], [AdapterLoad(0, "plain", [4, 1]), AdapterLoad(1, "norm", [0]), AdapterLoad(2, "other", [5])])
    assert layer.is_active

    rows = torch.tensor([1, 0, 2, 3]).repeat_interleave(torch.tensor(TOKENS))
    keys, values = torch.stack(merged)[rows][:, MINE].unflatten(1, (3, -1)).split((NOPE, VALUE), 2)  # [tokens, heads, width, rank]
    q, out = draw(len(rows), 3, NOPE), draw(len(rows), 3, RANK)
    w_k, w_v = weight[MINE].unflatten(0, (3, -1)).to(DEVICE).split((NOPE, VALUE), 1)
    multiplied = lambda x: multiply_heads(x, w_k), lambda x: multiply_heads(x, w_v.transpose(1, 2))
    got = layer.absorb(q.to(DEVICE), multiplied[0]), layer.unabsorb(out.to(DEVICE), multiplied[1])
    want = torch.einsum("thn,thnr->thr", q, keys), torch.einsum("thr,thvr->thv", out, values)
    plain = multiplied[0](q.to(DEVICE)), multiplied[1](out.to(DEVICE))
    for each, correct, base in zip(got, want, plain, strict=True):
        torch.testing.assert_close(each.cpu(), correct, atol=1e-4, rtol=1e-4)
        assert torch.equal(each[3], base[3])
        assert torch.equal(each[8:], base[8:])
    assert layer.adapted_rows.tolist() == [True] * 3 + [False] + [True] * 6

    begin_step(adapters, [2, -1], [])
    assert adapters.is_active
    assert not layer.is_active  # no adapter of the step changes it
    adapters.is_active = True  # for a capture
    assert layer.is_active
    begin_step(adapters, [1, -1], [])
    assert layer.is_active
    adapters.end_step()
    assert not layer.is_active


def test_products(tmp_path: Path) -> None:
    check_products(TorchDeltas(), tmp_path)


@pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="runs on a GPU and under the interpreter")
def test_products_of_kernels(tmp_path: Path) -> None:
    from frame.adapters.triton_deltas import TritonDeltas

    check_products(TritonDeltas(), tmp_path)


def test_a_page_has_the_first_matrix_twice_and_not_by_head() -> None:
    _, layer = open_adapters(TorchDeltas())
    assert sum(layer.sizes) == 16 * (3 * (NOPE + VALUE) + 2 * RANK)


@pytest.mark.parametrize(
    ("name", "invocation", "sentence"),
    [
        (NAME, (7, 8), "starts at its invocation tokens and changes layers.0.kv_b_proj"),
        ("layers.0.gate", (), "changes layers.0.gate, which takes no adapter here; train it without"),
        ("layers.9.kv_b_proj", (), "changes layers.9.kv_b_proj, and this model has no such layer; train it without"),
    ],
)
def test_refusals(name: str, invocation: tuple[int, ...], sentence: str, tmp_path: Path) -> None:
    adapters, _ = open_adapters(TorchDeltas())
    with pytest.raises(AdapterError, match=sentence):
        read(adapters, tmp_path, [(name, make_delta(4))], invocation)
