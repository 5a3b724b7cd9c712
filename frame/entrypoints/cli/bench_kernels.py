"""`frame bench attention | moe`: times attention backends and MoE runners on batches of given
shapes, against the roofline, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from frame.config.selection import ResolveError
from frame.core.errors import ConfigError
from frame.entrypoints.cli.options import OUTPUT_FILE, FiniteRange, ParsedType, join_options, parse_output
from frame.entrypoints.tools.bench.workload import Span, span
from frame.host.installation import install_command
from frame.host.progress import track
from frame.plugins.loader import load_registry

if TYPE_CHECKING:
    from frame.core.interfaces.plugin import PluginRecord
    from frame.plugins.registry import Registry

Row = TypeVar("Row")

_PLOT_TYPES = (".png", ".svg")
_DTYPES = ("bfloat16", "float16", "float32")


def parse_numbers(text: str) -> list[int]:
    """Numbers from 1, `1,8,64`. Raises ValueError."""
    try:
        numbers = [int(piece) for piece in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers; write 1,8,64") from None
    if min(numbers) < 1:
        raise ValueError("the numbers must be at least 1")
    return numbers


def parse_plot(text: str) -> Path:
    """A file that `draw` can write. Raises ValueError."""
    if not text.endswith(_PLOT_TYPES):
        raise ValueError(f"{text!r} has no supported file type; use {' or '.join(_PLOT_TYPES)}")
    if find_spec("matplotlib") is None:
        raise ValueError(f"plots need matplotlib; run {install_command('frame-serve[bench]')}")
    return parse_output(text)


NUMBERS = ParsedType("A,B,…", parse_numbers)
SPANS = ParsedType("N[:M],…", lambda text: [span(part) for part in text.split(",")])
PLOT_FILE = ParsedType("FILE", parse_plot)
NAMES = ParsedType("A,B,…", lambda text: tuple(filter(None, text.split(","))))


# The options of device, hardware limits and report.
machine_options = join_options(
    click.option("--model", help="Folder with the config.json of the model whose shapes are used."),
    click.option("--device", help="Platform by plugin name. Default: the best-ranked one with a device."),
    click.option("--dtype", type=click.Choice(_DTYPES), default=_DTYPES[0]),
    click.option("--threads", type=click.IntRange(min=1), help="Number of CPU threads."),
    click.option(
        "--ceilings",
        type=click.Choice(["measured", "h200"]),
        default="measured",
        help="Hardware limits for the lower bound of the time: measured on this machine, or those of one H200.",
    ),
    click.option("--seconds", type=FiniteRange(min=0, min_open=True), default=0.3, help="Measuring time per value, in seconds."),
    click.option("--json", "path", type=OUTPUT_FILE, help="Write the report to this JSON file."),
    click.option("--plot", type=PLOT_FILE, help="Write a plot to this .png or .svg file; needs frame-serve[bench]."),
)


@click.command(help="Time attention backends against the roofline. Batches are decodes and extends of one shape.")
@click.option("--backend", "names", type=NAMES, default="", show_default="all that can be loaded", help="Plugin names.")
@machine_options
@click.option("--heads", type=click.IntRange(min=1), default=32)
@click.option("--kv-heads", type=click.IntRange(min=1), default=8)
@click.option("--head-dim", type=click.IntRange(min=1), default=128)
@click.option("--phase", type=click.Choice(["decode", "extend", "both"]), default="both")
@click.option("--batch", "rows", type=NUMBERS, default="1,8,64", help="Numbers of rows per batch.")
@click.option("--context", "contexts", type=SPANS, default="1024,4096", help="Tokens per row; a range N:M: drawn uniformly.")
@click.option("--new", type=click.IntRange(min=1), help="New tokens per row of an extend. Default: the whole context.")
@click.option("--page-size", type=click.IntRange(min=1), default=16)
def attention(
    names: tuple[str, ...], model: str | None, heads: int, kv_heads: int, head_dim: int, phase: str, rows: list[int], contexts: list[Span],
    new: int | None, page_size: int, path: Path | None, plot: Path | None, **machine: Any,
) -> None:  # fmt: skip
    from frame.checkpoint.model_config import read_model_config
    from frame.entrypoints.tools.bench.attention import AttentionBench, AttentionShape, parse_batches

    phases = ("decode", "extend") if phase == "both" else (phase,)
    batches = parse_batches(phases, rows, contexts, new)
    shape = AttentionShape(heads, kv_heads, head_dim, head_dim) if model is None else AttentionShape.of(read_model_config(model))
    bench = AttentionBench(load_registry(), shape, *_machine(machine), page_size)
    records = _records(bench.registry, "attention_backend", names)
    rows_of = [bench.rows(record, batches) for record in records]
    measured = [(name, batch.name, figures) for name, (batch, figures) in _measure(records, rows_of, len(batches))]
    _report("attention", measured, bench, machine, path, plot)


@click.command(help="Time MoE runners against the roofline. The experts are those of one layer.")
@click.option("--runner", "names", type=NAMES, default="", show_default="all that can be loaded", help="Plugin names.")
@machine_options
@click.option("--experts", type=click.IntRange(min=1), default=128)
@click.option("--top-k", type=click.IntRange(min=1), default=8, help="Experts per token.")
@click.option("--hidden", type=click.IntRange(min=1), default=2048)
@click.option("--inner", type=click.IntRange(min=1), default=768)
@click.option("--tokens", "counts", type=NUMBERS, default="1,8,64,256,4096", help="Numbers of tokens per batch.")
def moe(
    names: tuple[str, ...], model: str | None, experts: int, top_k: int, hidden: int, inner: int, counts: list[int],
    path: Path | None, plot: Path | None, **machine: Any,
) -> None:  # fmt: skip
    from frame.checkpoint.model_config import read_model_config
    from frame.entrypoints.tools.bench.experts import ExpertBench, ExpertShape

    if model is None and top_k > experts:
        raise ConfigError(f"--top-k {top_k} is more than --experts {experts}; a token uses each expert once.")
    shape = ExpertShape(experts, top_k, hidden, inner) if model is None else ExpertShape.of(read_model_config(model))
    bench = ExpertBench(load_registry(), shape, *_machine(machine))
    layer, records = bench.layer(), _records(bench.registry, "moe_runner", names)
    rows_of = [bench.rows(record, layer, counts) for record in records]
    measured = [(name, f"{count} tokens", figures) for name, (count, figures) in _measure(records, rows_of, len(counts))]
    _report("moe", measured, bench, machine, path, plot)


def _measure(records: Sequence[PluginRecord], rows_of: Sequence[Iterable[Row]], batches: int) -> Iterator[tuple[str, Row]]:
    """(plugin, row) of the rows, which are measured as they are read. Shows the progress."""
    pairs = ((record.name, row) for record, rows in zip(records, rows_of, strict=True) for row in rows)
    return track(pairs, "measuring", len(records) * batches)


def write_results(results: dict[str, Any], path: Path | None) -> None:
    """Write the report to `path`, if given, and print its table."""
    from rich.console import Console

    from frame.entrypoints.tools.bench.report import table

    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")
    Console().print(table(results))


def _records(registry: Registry, kind: str, names: tuple[str, ...]) -> list[PluginRecord]:
    """The plugins with these names; without names, all that can be loaded."""
    if names:
        return [registry.get(kind, name) for name in names]
    return [record for record in registry.records(kind) if not record.problems]


def _choose_device(device: str | None) -> str:
    """The platform that is named, or the best-ranked one that has a device. Raises ConfigError."""
    from frame.config.resolution.platform import choose_platform
    from frame.config.schema import FrameConfig
    from frame.entrypoints.configuration.hardware_probe import probe

    platforms = load_registry().records("platform")
    config = FrameConfig.model_validate({"execution": {"device": device}})
    try:
        return choose_platform(config, probe(platforms), platforms).record.name
    except ResolveError as error:
        raise ConfigError(f"--device {device}: {error}") from None


def _machine(options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(clock, ceilings, dtype) of the options. Sets `wanted["device"]` if it was open."""
    import torch

    from frame.entrypoints.tools.bench.clock import Clock, measured_ceilings
    from frame.entrypoints.tools.bench.floors import H200

    options["device"] = _choose_device(options["device"])
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    device, dtype = torch.device(options["device"]), getattr(torch, options["dtype"])
    ceilings = H200 if options["ceilings"] == "h200" else measured_ceilings(device, dtype)
    return Clock(device, options["seconds"]), ceilings, dtype


def _report(
    kind: str, measured: Sequence[tuple[str, str, dict[str, Any]]], bench: Any, machine: dict[str, Any],
    path: Path | None, plot: Path | None,
) -> None:  # fmt: skip
    from dataclasses import asdict

    from frame.entrypoints.tools.bench.report import draw, report

    rows = {f"{name}: {batch}": {"plugin": name, "batch": batch, **figures} for name, batch, figures in measured}
    results = report(kind, rows, shape=asdict(bench.shape), settings=machine, ceilings=asdict(bench.ceilings))
    write_results(results, path)
    if plot is not None:
        draw(results, plot)
