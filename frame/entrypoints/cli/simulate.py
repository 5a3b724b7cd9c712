"""`frame simulate`: a fleet of servers on a virtual clock. Needs `config.json` alone, and none of
the devices."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click
from click.core import ParameterSource

from frame.core.errors import ConfigError
from frame.entrypoints.cli.options import OUTPUT_FILE, FiniteRange, ParsedType, config_command
from frame.entrypoints.configuration.sources import LoadedConfig

MAX_REQUESTS = 10_000_000
MAX_SHARED_TOKENS = 1 << 26  # of the prefixes of all groups, which are in memory


def parse_span(text: str) -> tuple[int, int]:
    """A length, or a range of lengths. Raises ValueError."""
    from frame.entrypoints.tools.bench.workload import span

    return span(text)


SPAN = ParsedType("N[:M]", parse_span)
_DRAWN = ("duration", "input_len", "output_len", "shared", "groups", "burstiness")


@config_command(help="Serve requests on a virtual clock: latencies, throughput, hit rate and bounds of a fleet, without its devices.")
@click.option("--machine", metavar="[HOSTSx]NxCARD", required=True, help="The hosts and their devices, such as 4x8xh200.")
@click.option("--replicas", type=click.IntRange(1, 4096), help="Replicas behind the router. Default: as many as the machine has room for.")
@click.option("--policy", help="Routing policy, by plugin name. Default: the best-ranked one.")
@click.option("--dump", type=click.Path(path_type=Path), help="Serve the requests of this file or folder of --request-dump.")
@click.option("--rate", type=FiniteRange(min=0.001, max=1e6), help="Requests/s. Default: 1, or the times of the dump.")
@click.option("--duration", type=FiniteRange(min=0.001, max=7 * 86400), default=60.0, help="Seconds in which requests arrive.")
@click.option("--burstiness", type=FiniteRange(min=0.01, max=100), default=1.0, help="1: Poisson arrivals; below 1: bursts.")
@click.option("--input-len", type=SPAN, default="512:1536", help="Prompt tokens of a request, besides the shared ones.")
@click.option("--output-len", type=SPAN, default="96:288", help="Output tokens of a request.")
@click.option("--shared-prefix", "shared", type=click.IntRange(0, 1 << 20), default=0, help="Tokens that the prompts of a group share.")
@click.option("--prefix-groups", "groups", type=click.IntRange(1, 65536), default=1, help="Number of groups with a shared prefix.")
@click.option("--workload-seed", "seed", type=click.IntRange(min=0), default=0, help="Seed of requests and of the routing policy.")
@click.option("--json", "path", type=OUTPUT_FILE, help="Write the report to this JSON file.")
def command(
    loaded: LoadedConfig,
    machine: str,
    replicas: int | None,
    policy: str | None,
    dump: Path | None,
    rate: float | None,
    duration: float,
    burstiness: float,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    shared: int,
    groups: int,
    seed: int,
    path: Path | None,
) -> None:
    from rich.console import Console

    from frame.entrypoints.tools.bench.dump import read_dump
    from frame.entrypoints.tools.bench.report import table
    from frame.entrypoints.tools.bench.workload import Arrivals
    from frame.entrypoints.tools.simulate.simulation import Simulation, describe, parse_cluster
    from frame.entrypoints.tools.simulate.workload import Distribution, read_arrivals

    ctx = click.get_current_context()
    explicit = [name for name in _DRAWN if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if dump is not None and explicit:
        flag = next(each.opts[0] for each in ctx.command.params if each.name == explicit[0])
        raise ConfigError(f"{flag} describes drawn requests, and --dump brings its own; leave one out")
    if dump is None and (rate or 1.0) * duration > MAX_REQUESTS:
        raise ConfigError(f"--rate and --duration give more than {MAX_REQUESTS:,} requests; lower one of them")
    if shared * groups > MAX_SHARED_TOKENS:
        raise ConfigError(f"--shared-prefix and --prefix-groups give more than {MAX_SHARED_TOKENS:,} tokens; lower one of them")
    simulation = Simulation.build(loaded.config, parse_cluster(machine), replicas, policy, seed)
    vocab_size = simulation.plan.resolved.model.vocab_size
    if dump is not None:
        arrivals = iter(read_arrivals(read_dump(dump), vocab_size, Arrivals(math.inf if rate is None else rate), seed))
    else:
        _check_lengths(input_len[1], output_len[1], shared, simulation.plan.resolved.max_context)
        arrivals = Distribution(rate or 1.0, duration, input_len, output_len, shared, groups, burstiness).draw(vocab_size, seed)
    results = describe(simulation, machine, simulation.run(arrivals))
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")
    Console().print(table(results))
    row = results["rows"]["simulated"]
    click.echo(f"steps are bound by {row['bound']} ({row['time_of'][row['bound']]:.0%} of their time); replicas are busy {row['busy']:.0%}")
    for assumption in results["assumptions"]:
        click.echo(f"assumed: {assumption}", err=True)


def _check_lengths(prompt: int, output: int, shared: int, max_context: int) -> None:
    """Raises ConfigError for requests that the engine would refuse, before any is drawn."""
    if prompt + output + shared > max_context:
        parts = f"--input-len ({prompt}), --output-len ({output}) and --shared-prefix ({shared})"
        raise ConfigError(f"{parts} give requests of more than {max_context} tokens, the maximum (--max-model-len); lower one of them")
