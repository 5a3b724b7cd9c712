"""`frame bench offline | serve | startup | attention | moe | compare`: measures an engine, a
server, a start or kernels. Prints a table and writes a JSON report. `frame replay`: sends the
requests of `log.request_dump` to a server again, and compares tokens and latencies."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from frame.core.errors import ConfigError
from frame.entrypoints.cli.bench_kernels import PLOT_FILE, attention, moe, write_results
from frame.entrypoints.cli.options import OUTPUT_FILE, FiniteRange, ParsedType, config_command, join_options
from frame.entrypoints.configuration.sources import LoadedConfig, refuse_server_settings
from frame.entrypoints.tools.bench.replay import parse_speed
from frame.entrypoints.tools.bench.workload import ALL, SHAPES, Arrivals, Shape, Workload, chosen, span
from frame.host.progress import track

WARM_UP = Shape(8, (32, 32), (8, 8))


def parse_rates(text: str) -> tuple[float, ...]:
    """Rates, `0.5,1,2`; none for an empty text. Raises ValueError."""
    try:
        rates = tuple(float(piece) for piece in text.split(",") if piece.strip())
    except ValueError:
        raise ValueError(f"{text!r} is not a list of rates; write 0.5,1,2") from None
    if not all(0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
        raise ValueError("the rates must be different numbers above 0")
    return rates


SPAN = ParsedType("N[:M]", span)
RATES = ParsedType("A,B,…", parse_rates)

# The options that choose and change workloads.
workload_options = join_options(
    click.option(
        "--workload",
        "names",
        multiple=True,
        type=click.Choice([*SHAPES, ALL]),
        help="Workload; repeatable. all: the six reference workloads. Default: mixed.",
    ),
    click.option("--requests", type=click.IntRange(min=1), help="Number of requests. Default: the workload's."),
    click.option("--input-len", "input", type=SPAN, help="Prompt tokens per request. Default: the workload's."),
    click.option("--output-len", "output", type=SPAN, help="Output tokens per request. Default: the workload's."),
    click.option(
        "--shared-prefix", "shared", type=click.IntRange(min=0), help="Length in tokens of the prefix that the prompts of a group share."
    ),
    click.option(
        "--prefix-groups", "groups", type=click.IntRange(min=1), help="Number of groups of requests, each with its own shared prefix."
    ),
    click.option("--temperature", type=FiniteRange(0, 2), help="Sampling temperature. Default: the workload's."),
    click.option("--workload-seed", "seed", type=int, default=0, help="Seed of prompts and arrival times."),
    click.option("--json", "path", type=OUTPUT_FILE, help="Write the report to this JSON file."),
)


@click.group("bench", help="Measure throughput and latency.")
def command() -> None:
    pass


@config_command(help="Measure the throughput of an engine in this process. Reports the fastest run of each workload.")
@workload_options
@click.option("--repeats", type=click.IntRange(min=1), default=2, help="Number of runs per workload.")
@click.option(
    "--ceilings", type=click.Choice(["measured", "h200", "none"]), default="measured",
    help="Hardware limits for the lower bound of the time: measured on this machine, those of one H200, or none.",
)  # fmt: skip
def offline(loaded: LoadedConfig, names: Sequence[str], seed: int, path: Path | None, repeats: int, ceilings: str, **changes: Any) -> None:
    from frame.entrypoints.offline.engine import Engine
    from frame.entrypoints.tools.bench.offline import floors, measure
    from frame.entrypoints.tools.bench.report import report

    refuse_server_settings(loaded)
    workloads = chosen(names, changes)
    under = None if ceilings == "none" else floors(loaded.config, ceilings)
    with Engine(config=loaded.config) as engine:
        vocabulary = engine.info["vocab_size"]
        _check_lengths(workloads, engine.info["max_context"])
        measure(engine, WARM_UP.jobs(vocabulary, -1))
        rows = {}
        for name, workload in workloads.items():
            numbers = track(range(repeats), f"runs of {name}", repeats)
            runs = [measure(engine, workload.jobs(vocabulary, seed + number)) for number in numbers]
            rows[name] = min(runs, key=lambda run: run["seconds"]) | {"all_seconds": [run["seconds"] for run in runs]}
            if under is not None:
                rows[name] |= under.row(workload, vocabulary, rows[name]["seconds"])
        write_results(report("offline", rows, engine=engine.info, **({} if under is None else under.about())), path)


@click.command(help="Measure latency and throughput of a server. Open loop: requests are sent at their arrival times.")
@click.option("--base-url", default="http://127.0.0.1:30000", help="URL of a server with /v1/completions.")
@click.option("--model", help="Model name. Default: the first model that the server lists.")
@click.option("--api-key", envvar="FRAME_API_KEY", help="API key of the server.")
@workload_options
@click.option(
    "--dump", type=click.Path(path_type=Path), help="Requests of a dump (--request-dump), at their recorded times without --rate."
)
@click.option("--rate", "rates", type=RATES, default="", help="Requests per second; several are measured in turn. Default: all at once.")
@click.option("--plot", type=PLOT_FILE, help="Plot TTFT, ITL and throughput over --rate to a .png or .svg file; needs frame-serve[bench].")
@click.option(
    "--baseline", type=click.Path(path_type=Path), help="Report of an earlier run, from --json, that --plot draws beside this one."
)
@click.option(
    "--burstiness",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    help="1: Poisson arrivals; below 1: bursts; above 1: more even.",
)
@click.option("--concurrency", type=click.IntRange(min=1), help="Maximum number of concurrent requests. Default: no limit.")
@click.option("--vocabulary", type=click.IntRange(min=16), default=2000, help="Token ids of prompts are below this value.")
@click.option("--goal-ttft", type=FiniteRange(min=0, min_open=True), help="TTFT goal in milliseconds, for goodput.")
@click.option("--goal-itl", type=FiniteRange(min=0, min_open=True), help="ITL goal in milliseconds, for goodput.")
@click.option("--goal-e2e", type=FiniteRange(min=0, min_open=True), help="End-to-end latency goal in milliseconds, for goodput.")
def serve(
    base_url: str,
    model: str | None,
    api_key: str | None,
    names: Sequence[str],
    seed: int,
    path: Path | None,
    dump: Path | None,
    rates: Sequence[float],
    plot: Path | None,
    baseline: Path | None,
    burstiness: float,
    concurrency: int | None,
    vocabulary: int,
    **rest: Any,
) -> None:
    from frame.entrypoints.tools.bench.dump import RecordedWorkload, read_dump
    from frame.entrypoints.tools.bench.load import Target, run
    from frame.entrypoints.tools.bench.rate_plot import draw_rates, find_points
    from frame.entrypoints.tools.bench.report import read, report
    from frame.entrypoints.tools.bench.summary import Objective, row
    from frame.entrypoints.tools.server_calls import ask_server

    if plot is not None and not rates:
        raise click.UsageError("--plot draws values over the request rate; give the rates, such as --rate 1,2,4,8")
    if baseline is not None and plot is None:
        raise click.UsageError("--baseline has no effect without --plot")
    before = None if baseline is None else read(baseline)
    if before is not None:
        find_points(before)
    goals = [rest.pop(name) for name in ("goal_ttft", "goal_itl", "goal_e2e")]
    objective = Objective(*goals) if any(goal is not None for goal in goals) else None
    if dump is not None and (names or any(value is not None for value in rest.values())):
        raise click.UsageError("--dump has the requests; leave out --workload and what changes one")
    recorded = {"dump": RecordedWorkload(read_dump(dump))} if dump is not None else None
    if not model:
        models = ask_server("GET", base_url.rstrip("/").removesuffix("/v1"), "/v1/models", api_key, timeout=30)
        model = str(models["data"][0]["id"])
    target = Target(base_url, model, api_key)
    asyncio.run(run(target, WARM_UP.jobs(vocabulary, -1), title="warm-up"))
    rows = {}
    for name, workload in (recorded or chosen(names, rest)).items():
        for rate in rates or (math.inf,):
            title = f"{name} at {rate:g}/s" if len(rates) > 1 else name
            jobs = workload.jobs(vocabulary, seed, Arrivals(rate, burstiness))
            figures = row(asyncio.run(run(target, jobs, concurrency, title)), objective)
            rows[title] = figures if math.isinf(rate) else {"workload": name, "rate": rate, **figures}
    about = {"server": base_url, "model": target.model, "rate": _simplify(rates), "burstiness": burstiness, "concurrency": concurrency}
    results = report("serve", rows, **about)
    write_results(results, path)
    if plot is not None:
        draw_rates(results, plot, before)
    if any(figures["failed"] for figures in rows.values()):
        raise click.ClickException("; ".join(error for figures in rows.values() for error in figures["errors"]))


@config_command(help="Measure the start time of an engine in this process. Reports seconds per phase.")
@click.option("--cold", is_flag=True, help="Use an empty home folder, so that all kernels are compiled.")
@click.option("--json", "path", type=OUTPUT_FILE, help="Write the report to this JSON file.")
def startup(loaded: LoadedConfig, cold: bool, path: Path | None) -> None:
    import tempfile

    from frame.entrypoints.offline.engine import Engine
    from frame.entrypoints.tools.bench.report import report
    from frame.kernels.cache import CACHE_DIR_VARIABLE

    refuse_server_settings(loaded)
    kept = {name: os.environ.get(name) for name in (CACHE_DIR_VARIABLE, "HOME")}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if cold:
            os.environ.update(dict.fromkeys(kept, folder))  # libraries cache compiled kernels below it
        started = time.perf_counter()
        with Engine(config=loaded.config) as engine:
            seconds = time.perf_counter() - started
            rows = {"ready": {"seconds": round(seconds, 3)}}
            rows |= {name: {"seconds": phase} for name, phase in engine.info.get("phases", {}).items()}
            write_results(report("startup", rows, engine=engine.info), path)
    for name, value in kept.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@click.command(help="Compare two reports. Prints the values of the second and their ratios to the first.")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
def compare(first: Path, second: Path) -> None:
    from rich.console import Console

    from frame.entrypoints.tools.bench.report import comparison, read

    Console().print(comparison(read(first), read(second)))


for _each in (offline, serve, startup, attention, moe, compare):
    command.add_command(_each)


def _simplify(rates: Sequence[float]) -> Sequence[float] | float | None:
    """The rates for a report, which has one of them as a number."""
    return rates if len(rates) > 1 else rates[0] if rates else None


def _check_lengths(workloads: Mapping[str, Workload | Shape], max_length: int) -> None:
    for name, workload in workloads.items():
        if workload.max_length > max_length:
            raise ConfigError(
                f"The workload {name} has requests of up to {workload.max_length} tokens, and the engine takes {max_length};"
                " give a larger --max-model-len, or shorter ones with --input-len, --output-len or --shared-prefix."
            )


SPEED = ParsedType("X|max", parse_speed)


@click.command(help="Send recorded requests to a server again, and compare tokens and latencies. DUMP: a file or folder of --request-dump.")
@click.argument("dump", type=click.Path(path_type=Path))
@click.option("--url", default="http://127.0.0.1:30000", help="URL of a server.")
@click.option("--model", help="Model name. Default: the first model that the server lists.")
@click.option("--api-key", envvar="FRAME_API_KEY", help="API key of the server.")
@click.option("--speed", type=SPEED, default="1", help="1: as recorded; 2: twice as fast; max: all at once.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Maximum number of concurrent requests. Default: no limit; of max, 256.")
@click.option("--vocabulary", type=click.IntRange(min=16), default=2000, help="Token ids for a dump of shapes are below this value.")
@click.option("--require-equal", is_flag=True, help="End with code 1 if tokens differ.")
@click.option("--json", "path", type=OUTPUT_FILE, help="Write the report to this JSON file.")
def replay_command(
    dump: Path,
    url: str,
    model: str | None,
    api_key: str | None,
    speed: float,
    concurrency: int | None,
    vocabulary: int,
    require_equal: bool,
    path: Path | None,
) -> None:
    from frame.entrypoints.tools.bench.dump import read_dump
    from frame.entrypoints.tools.bench.replay import ReplayTarget, build_jobs, replay
    from frame.entrypoints.tools.bench.report import report
    from frame.entrypoints.tools.server_calls import CONTROLS, ask_server

    jobs, skipped = build_jobs(read_dump(dump), speed, vocabulary)
    for reason, count in skipped.items():
        click.echo(f"{count} sequences {reason} and are left out", err=True)
    if not jobs:
        raise ConfigError(f"{dump} has no sequence that can be replayed.")
    base = url.rstrip("/").removesuffix("/v1")
    model = model or str(ask_server("GET", base, "/v1/models", api_key, timeout=30)["data"][0]["id"])
    rows = replay(ReplayTarget(base, model, api_key), jobs, concurrency)
    write_results(report("replay", rows, server=url, model=model, speed=str(speed), skipped=dict(skipped)), path)
    replayed = rows["replayed"]
    for difference in replayed.get("differences", ()):
        click.echo(f"different: {difference.translate(CONTROLS)}", err=True)
    if replayed["failed"]:
        raise click.ClickException("; ".join(replayed["errors"]).translate(CONTROLS))
    if require_equal and replayed.get("different"):
        raise click.ClickException(f"{replayed['different']} outputs differ from the record")
