"""`frame profile offline | server | read`: summarises the time of steps by kernel, gaps and host
functions, from a trace of torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from frame.core.errors import ConfigError
from frame.entrypoints.cli.options import OUTPUT_FILE, FiniteRange, config_command, join_options
from frame.entrypoints.configuration.sources import LoadedConfig, refuse_server_settings
from frame.entrypoints.tools.bench.workload import SHAPES

_MAX_WAIT = 120.0  # seconds to wait for a server's steps
_WIDTH = 150  # columns of tables that are not printed to a terminal
_TIMES = {
    "steps": "steps",
    "rows": "rows, mean",
    "tokens": "tokens, mean",
    "period_ms": "step to step, ms",
    "busy_ms": "device busy, ms",
    "gaps_inside_ms": "idle between a step's kernels, ms",
    "gap_after_ms": "idle before the next step, ms",
    "idle_share": "idle share",
    "kernels_per_step": "kernels a step",
    "launch_ms": "host: launch, ms",
    "between_launches_ms": "host: between launches, ms",
}


# The options of the output.
result_options = join_options(
    click.option("--top", type=click.IntRange(min=1), default=15, help="Number of rows per table."),
    click.option("--json", "out", type=OUTPUT_FILE, help="Write the values to this JSON file."),
)


@click.group("profile", help="Profile steps: kernels, gaps between them, host time.")
def command() -> None:
    pass


@config_command(help="Profile the steps of an engine in this process. It runs one workload.")
@click.option("--workload", type=click.Choice(list(SHAPES)), default="batch8")
@click.option("--requests", type=click.IntRange(min=1), help="Number of requests. Default: the workload's.")
@click.option("--input-len", "input_len", type=click.IntRange(min=1), help="Prompt tokens per request. Default: the workload's.")
@click.option("--output-len", "output_len", type=click.IntRange(min=1), help="Output tokens per request. Default: the workload's.")
@click.option("--steps", type=click.IntRange(1, 2000), default=50, help="Number of steps to record.")
@click.option("--skip", type=click.IntRange(min=0), default=0, help="Output tokens per request before recording starts.")
@click.option("--trace", type=OUTPUT_FILE, help="Write the trace to this .json.gz file, for Perfetto.")
@result_options
def offline(
    loaded: LoadedConfig, workload: str, steps: int, skip: int, trace: Path | None, out: Path | None, top: int, **lengths: int | None
) -> None:
    from frame.entrypoints.offline.engine import Engine
    from frame.entrypoints.tools.bench.workload import changed

    refuse_server_settings(loaded)
    spans = {name: (length, length) for name in ("input", "output") if (length := lengths[f"{name}_len"]) is not None}
    shape = changed(SHAPES[workload], requests=lengths["requests"], **spans)
    with tempfile.TemporaryDirectory() as folder:
        execution = loaded.config.execution.model_copy(update={"profile_dir": folder})
        with Engine(config=loaded.config.model_copy(update={"execution": execution})) as engine:
            max_length = engine.info["max_context"]
            if shape.max_length > max_length:
                raise ConfigError(f"The workload {workload} needs --max-model-len {shape.max_length}; the engine takes {max_length}.")
            if skip >= shape.output[1]:
                raise ConfigError(f"--skip {skip} is not below the {shape.output[1]} output tokens of the workload's longest answer.")
            vocabulary = engine.info["vocab_size"]
            _run(engine, shape.jobs(vocabulary, 0), None)  # a first run compiles and allocates
            recorded = _run(engine, shape.jobs(vocabulary, 1), (steps, skip))
            if trace is not None:
                trace.write_bytes(recorded.read_bytes())
            _reply(recorded, out, top, {"engine": engine.info, "workload": workload})


def _run(engine: Any, jobs: list[Any], record: tuple[int, int] | None) -> Path:
    """Run the jobs. `record`: (steps, output tokens before them). -> the trace, if recorded."""
    from frame.core.interfaces.sampling_params import SamplingParams

    params = [SamplingParams(max_tokens=job.output, temperature=job.temperature, ignore_eos=True) for job in jobs]
    prompts = [job.prompt for job in jobs]
    if record is None:
        engine.generate(prompts, params)
        return Path()
    steps, skip = record
    if not skip:
        engine.control("start_profile", num_steps=steps)
        engine.generate(prompts, params)
    else:
        for count, _ in enumerate(engine.stream(prompts, params)):
            if count == skip * len(jobs):
                engine.control("start_profile", num_steps=steps)
    return Path(engine.control("stop_profile")["path"])


@click.command(help="Profile the next steps of a server. The server needs --profile-dir.")
@click.option("--base-url", default="http://127.0.0.1:30000", help="URL of the server or its admin listener.")
@click.option("--key", envvar="FRAME_ADMIN_KEY", help="Admin key of the server.")
@click.option("--steps", type=click.IntRange(1, 2000), default=50, help="Number of steps to record.")
@click.option("--seconds", type=FiniteRange(0, _MAX_WAIT), default=5.0, help="Seconds to wait for these steps.")
@result_options
def server(base_url: str, key: str | None, steps: int, seconds: float, out: Path | None, top: int) -> None:
    import time

    from frame.entrypoints.tools.server_calls import ask_server

    started = ask_server("POST", base_url, "/start_profile", key, {"num_steps": steps}, _MAX_WAIT)
    time.sleep(seconds)
    ask_server("POST", base_url, "/stop_profile", key, {}, _MAX_WAIT)
    path = Path(str(started["path"]))
    if not path.exists():
        raise click.ClickException(
            f"the trace is {path} on the server's machine; copy it to this machine and pass it to `frame profile read`"
        )
    _reply(path, out, top, {"server": base_url})


@click.command(help="Summarise a recorded trace. TRACE: a .json or .json.gz file that frame wrote.")
@click.argument("trace", type=click.Path(path_type=Path))
@result_options
def read(trace: Path, out: Path | None, top: int) -> None:
    _reply(trace, out, top, {})


for _each in (offline, server, read):
    command.add_command(_each)


def _reply(path: Path, out: Path | None, top: int, about: Mapping[str, Any]) -> None:
    from frame.entrypoints.tools.bench.report import report
    from frame.entrypoints.tools.bench.step_times import step_times
    from frame.entrypoints.tools.bench.trace import read_trace

    trace = read_trace(path)
    rows = step_times(trace)
    if out is not None:
        out.write_text(json.dumps(report("profile", rows, has_gpu=trace.has_gpu, strays=trace.strays, **about), indent=2) + "\n")
    _show(rows, top, trace.has_gpu, trace.strays)


def _show(rows: Mapping[str, Mapping[str, Any]], top: int, has_gpu: bool, strays: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    times = Table("", *rows, title="steps (medians)", title_justify="left")
    for key, title in _TIMES.items():
        if any(key in row for row in rows.values()):
            times.add_row(title, *(f"{row[key]:,g}" if key in row else "" for row in rows.values()))
    console.print(times)
    for kind, row in rows.items():
        tables = (("kernels" if has_gpu else "operators", row["kernels"]), ("host, while launching", row["host"]))
        for title, lines in tables[: 2 if has_gpu else 1]:
            drawn = Table("", "share", "a step", "mean, µs", "µs a step", title=f"{kind}: {title}", title_justify="left")
            for line in lines[:top]:
                figures = (f"{line[key]:,g}" if key in line else "" for key in ("per_step", "mean_us", "us_per_step"))
                drawn.add_row(line["name"], f"{line['share']:.1%}", *figures)
            console.print(drawn)
    if strays:
        console.print(f"{strays} kernels were launched by no recorded step.")
