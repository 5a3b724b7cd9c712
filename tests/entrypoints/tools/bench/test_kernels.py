"""Kernels are timed through the registry, beside a floor that is reckoned of their bytes and
operations; reports and pictures of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click import BadParameter
from click.testing import CliRunner

from frame.core.errors import ConfigError
from frame.entrypoints.cli.bench_kernels import NAMES, NUMBERS, SPANS
from frame.entrypoints.cli.main import cli
from frame.entrypoints.tools.bench.attention import AttentionBench, AttentionShape, Batch, figures, parse_batches
from frame.entrypoints.tools.bench.clock import Clock
from frame.entrypoints.tools.bench.experts import ExpertBench, ExpertShape
from frame.entrypoints.tools.bench.floors import Ceilings
from frame.entrypoints.tools.bench.report import draw
from frame.plugins.loader import load_registry

CEILINGS = Ceilings(1e9, 1e9)


def test_figures_stand_to_the_slower_ceiling() -> None:
    found = figures(2e-3, "host", 1_000_000, 500_000, CEILINGS)
    wanted = {"microseconds": 2000, "gb_per_s": 0.5, "floor_microseconds": 1000, "share_of_floor": 0.5, "bound": "memory", "timed": "host"}
    assert found.items() >= wanted.items()
    assert figures(2e-3, "host", 1, 1_500_000, CEILINGS)["bound"] == "operations"


def test_batches_are_every_combination() -> None:
    names = [batch.name for batch in parse_batches(("decode", "extend"), [1, 2], [(64, 64)], None)]
    assert names == ["decode 1 × 64", "decode 2 × 64", "extend 1 × 64", "extend 2 × 64"]
    assert [batch.name for batch in parse_batches(("extend",), [1], [(64, 64)], 16)] == ["extend 1 × 16 after 48"]
    (ragged,) = parse_batches(("decode",), [50], [(10, 90)], None)
    assert ragged.name == "decode 50 × 10–90"
    assert 10 <= min(ragged.layout.lengths) < max(ragged.layout.lengths) <= 90
    with pytest.raises(ConfigError, match="--new 100"):
        parse_batches(("extend",), [1], [(64, 64)], 100)


@pytest.mark.parametrize("shape", [AttentionShape(4, 2, 32, 32), AttentionShape(4, 4, 24, 16, rank=32, rope=8)])
def test_a_backends_bytes_and_operations_are_counted(shape: AttentionShape) -> None:
    bench = AttentionBench(load_registry(), shape, Clock(torch.device("cpu"), 0.001), CEILINGS, torch.float32)
    record = bench.registry.get("attention_backend", "torch_native")
    ((_, decode), (_, extend)) = bench.rows(record, [Batch(3, (20, 20)), Batch(2, (10, 10), 4)])
    cached = (2 * 2 * 32 if not shape.rank else 40) * 4
    read = 3 * 20 * cached + 2 * 3 * 4 * shape.head_dim * 4
    each = 2 * 4 * (shape.head_dim + shape.v_head_dim)  # operations of a pair
    assert decode["floor_microseconds"] == pytest.approx(max(read, 60 * each) / 1e3, rel=1e-3)
    pairs = 2 * (7 + 8 + 9 + 10)
    read = 2 * 10 * cached + 2 * 8 * 4 * shape.head_dim * 4
    assert extend["floor_microseconds"] == pytest.approx(max(read, pairs * each) / 1e3, rel=1e-3)
    assert decode["timed"] == "host"


def test_a_runners_bytes_are_those_of_the_experts_that_were_touched() -> None:
    bench = ExpertBench(load_registry(), ExpertShape(8, 2, 32, 16), Clock(torch.device("cpu"), 0.001), CEILINGS, torch.float32)
    record = bench.registry.get("moe_runner", "torch_native")
    ((_, one), (_, many)) = bench.rows(record, bench.layer(), [1, 200])
    assert (one["experts_touched"], many["experts_touched"]) == (2, 8)
    assert one["floor_microseconds"] == pytest.approx((2 * 3 * 32 * 16 + 64) * 4 / 1e3, rel=1e-3)
    refused = dict(bench.rows(load_registry().get("moe_runner", "torch_grouped"), bench.layer(), [1]))
    assert "cuda" in refused[1]["refused"]


def test_lists_on_the_command_line() -> None:
    assert NUMBERS.convert("1,8", None, None) == [1, 8]
    assert NAMES.convert("a,b", None, None) == ("a", "b")
    assert SPANS.convert("7,1:8", None, None) == [(7, 7), (1, 8)]
    for wrong in ("1,x", "0", ""):
        with pytest.raises(BadParameter):
            NUMBERS.convert(wrong, None, None)


def test_as_they_are_typed(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    common = ["--seconds", "0.001", "--threads", "1", "--ceilings", "h200", "--device", "cpu", "--json", str(path)]
    small = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16", "--batch", "1,2", "--context", "8"]
    done = CliRunner().invoke(cli, ["bench", "attention", "--backend", "torch_native", *small, *common])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["batch"] for row in rows.values()] == ["decode 1 × 8", "decode 2 × 8", "extend 1 × 8", "extend 2 × 8"]
    done = CliRunner().invoke(cli, ["bench", "compare", str(path), str(path)])
    assert "1.00×" in done.output
    sizes = ["--experts", "4", "--top-k", "2", "--hidden", "16", "--inner", "8", "--tokens", "1,3"]
    done = CliRunner().invoke(cli, ["bench", "moe", "--runner", "torch_native", *sizes, *common])
    assert done.exit_code == 0, done.output
    assert "3 tokens" in done.output
    done = CliRunner().invoke(cli, ["bench", "moe", "--experts", "2", "--top-k", "3"])
    assert done.exit_code == 78


def test_a_picture(tmp_path: Path) -> None:
    row: dict[str, Any] = {"plugin": "a", "batch": "decode", "microseconds": 10.0, "share_of_floor": 0.5}
    found = {"kind": "attention", "machine": {"accelerators": []}, "settings": {"dtype": "float32"}, "rows": {"x": row}}
    pytest.importorskip("matplotlib")
    draw(found, tmp_path / "x.svg")
    assert "share of the floor" in (tmp_path / "x.svg").read_text() or (tmp_path / "x.svg").stat().st_size > 1000
