"""`frame dashboard`: prints the Grafana dashboard of this version's metrics."""

from __future__ import annotations

from importlib.resources import files

import click

FILE = "grafana_dashboard.json"


@click.command(help="Print a Grafana dashboard (JSON) of the metrics at /metrics, to import or provision in Grafana.")
def command() -> None:
    click.echo(files("frame.entrypoints.http.operations").joinpath(FILE).read_text(encoding="utf-8"), nl=False)
