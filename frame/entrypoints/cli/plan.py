"""`frame plan`: memory of each rank, lower bounds of each phase, and the fewest devices that meet a
target. Needs `config.json` alone, and none of the devices."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import click
from click.core import ParameterSource

from frame.core.errors import ConfigError
from frame.entrypoints.cli.options import FiniteRange, config_command
from frame.entrypoints.configuration.sources import LoadedConfig

GIB = 1024**3
RANKED_SECONDS = 60.0  # in which requests arrive


@config_command(help="Print the memory and the lower bounds of time of a configuration, without its devices.")
@click.option("--machine", metavar="NxCARD", help="Plan for this machine, such as 8xh200, in place of the one that runs the command.")
@click.option("--requests", type=click.IntRange(min=1), help="Target: requests at once. Finds the fewest devices.")
@click.option("--context", type=click.IntRange(min=2), default=1024, help="Target: tokens of a request.")
@click.option("--rate", type=FiniteRange(min=0), default=0.0, help="Target: output tokens/s of each request.")
@click.option("--share", type=FiniteRange(min=0.01, max=1), default=0.6, help="Share of the bound's speed that counts.")
@click.option("--hosts", type=click.IntRange(1, 1024), help="Rank the plans of so many machines by simulation; with --arrivals.")
@click.option("--arrivals", type=FiniteRange(min=0.001, max=1e5), help="Requests/s of --hosts: prompts of 3/4 of --context.")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def command(
    loaded: LoadedConfig,
    machine: str | None,
    requests: int | None,
    context: int,
    rate: float,
    share: float,
    hosts: int | None,
    arrivals: float | None,
    is_json: bool,
) -> None:
    from frame.entrypoints.tools.plan.machines import parse_machine
    from frame.entrypoints.tools.plan.planner import Target, plan_deployment, try_plans

    target_machine = parse_machine(machine) if machine is not None else None
    ctx = click.get_current_context()
    explicit = [name for name in ("context", "rate", "share") if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if hosts is not None or arrivals is not None:
        if hosts is None or arrivals is None or target_machine is None or requests is not None:
            raise ConfigError("--hosts ranks plans for arriving requests; write --hosts, --arrivals and --machine, and no --requests")
        from frame.entrypoints.tools.simulate.simulation import Cluster

        _rank(loaded, Cluster(hosts, target_machine), arrivals, context, is_json=is_json)
        return
    if requests is None and explicit:
        raise ConfigError(f"--{explicit[0]} is part of a target; add --requests and --machine, or leave it out")
    if requests is not None:
        if target_machine is None:
            raise ConfigError("--requests searches plans for a named machine; add --machine, such as --machine 8xh200")
        tried = list(try_plans(loaded.config, target_machine, Target(requests, context, rate, share)))
        met = [name for name, shortage in tried if not shortage]
        if is_json:
            click.echo(json.dumps({"tried": dict(tried), "cheapest": met[0] if met else None}, indent=2))
            return
        for name, shortage in tried:
            click.echo(f"{name:16} {shortage or 'meets the target'}")
        click.echo(f"cheapest: {met[0]}" if met else "no plan on this machine meets the target")
        return
    plan = plan_deployment(loaded.config, target_machine)
    click.echo(json.dumps(plan.describe(), indent=2) if is_json else _format(plan.describe(), plan.resolved.device, machine))


_RANKED = ("first_token_ms", "between_tokens_ms", "end_to_end_ms")


def _rank(loaded: LoadedConfig, cluster: Any, arrivals: float, context: int, *, is_json: bool) -> None:
    """Print the plans in the order of their median end-to-end latency."""
    from frame.entrypoints.tools.simulate.simulation import rank_plans
    from frame.entrypoints.tools.simulate.workload import Distribution

    output = max(1, context // 4)
    ranked = dict(rank_plans(loaded.config, cluster, Distribution(arrivals, RANKED_SECONDS, (context - output,) * 2, (output,) * 2)))
    figures = {name: row for name, row in ranked.items() if isinstance(row, dict)}
    order = sorted(figures, key=lambda name: figures[name]["end_to_end_ms"].get("p50", inf))
    if is_json:
        click.echo(json.dumps({"order": order, "plans": ranked}, indent=2))
        return
    for name in order:
        row = figures[name]
        shown = {key: "none" if "p50" not in row[key] else f"{row[key]['p50']:,.1f} ms" for key in _RANKED}
        ttft, itl, whole = shown.values()
        click.echo(f"{name:16} {row['replicas']:4} replicas: TTFT {ttft}, ITL {itl}, end to end {whole} (p50)")
    for name, reason in ranked.items():
        if name not in figures:
            click.echo(f"{name:16} {reason}")


def _format(plan: dict, device: str, machine: str | None) -> str:  # type: ignore[type-arg]
    rows = [f"{plan['model']} ({plan['config']}) on {machine or 'this machine'}, {device}: {plan['parallel']}", "", "memory of a rank, GiB"]
    names = ("others", "weights", "drafter", "activations", "graphs", "workspaces", "cache", "used", "total")
    notes = {"others": "driver and other processes", "drafter": "part of the weights", "graphs": "part of the activations"}
    notes["cache"] = f"{plan['max_total_tokens']:,} tokens"
    seen: list[dict[str, int]] = []
    for rank in plan["ranks"]:
        if rank not in seen:
            seen.append(rank)
    for name in names:
        sizes = "".join(f"{rank[name] / GIB:10.2f}" for rank in seen)
        rows.append(f"  {name:12}{sizes}{'   ' + notes[name] if name in notes else ''}")
    rows += ["", f"largest context {plan['largest_context']:,} tokens; {plan['largest_batch']} requests of 1,024 tokens at once"]
    for tier in plan["tiers"]:
        blocks = "" if tier["blocks"] is None else f": {tier['blocks']:,} blocks"
        memory = f"{tier['host_bytes'] / GIB:,.2f} GiB of host memory in all"
        if tier["device_bytes"]:
            memory = f"{tier['device_bytes'] / GIB:,.2f} GiB of device memory in all, a part of the activations"
        rows.append(f"tier {tier['name']} of each replica or attention group{blocks}, {tier['block_bytes']:,} bytes each; {memory}")
    if not plan["phases"]:
        return "\n".join([*rows, "no lower bounds: the rates of this machine or the operations of this model are unknown"])
    rows += ["", f"  {'lower bound':22}{'step, ms':>10}{'tokens/s':>12}  bound by"]
    for phase in plan["phases"]:
        rows.append(f"  {phase['name']:22}{phase['seconds'] * 1e3:10.2f}{phase['rate']:12,.0f}  {phase['bound']}")
    return "\n".join(rows)
