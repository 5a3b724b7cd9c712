"""`frame replay`: sends the requests of `log.request_dump` to a server again, and compares tokens
and latencies."""

from __future__ import annotations

from pathlib import Path

import click

from frame.core.errors import ConfigError
from frame.entrypoints.cli.bench_kernels import finish
from frame.entrypoints.cli.options import OUTPUT_FILE, ParsedType
from frame.entrypoints.tools.bench.replay import parse_speed

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
def command(
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
    finish(report("replay", rows, server=url, model=model, speed=str(speed), skipped=dict(skipped)), path)
    replayed = rows["replayed"]
    for difference in replayed.get("differences", ()):
        click.echo(f"different: {difference.translate(CONTROLS)}", err=True)
    if replayed["failed"]:
        raise click.ClickException("; ".join(replayed["errors"]).translate(CONTROLS))
    if require_equal and replayed.get("different"):
        raise click.ClickException(f"{replayed['different']} outputs differ from the record")
