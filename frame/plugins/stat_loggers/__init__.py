"""Manifest of the in-tree stat loggers: records only. Must not import the plugins."""

from __future__ import annotations

from pydantic import Field

from frame.registration import KindRegistry, PluginOptions, hookimpl


class LogOptions(PluginOptions):
    """Settings of the stat logger `log`."""

    interval: float = Field(10.0, gt=0, description="Seconds between two lines.")


@hookimpl
def register_stat_loggers(registry: KindRegistry) -> None:
    """Add the in-tree stat loggers. A rank below 0 keeps one out of `builtin`."""
    registry.add(
        "prometheus", "frame.plugins.stat_loggers.prometheus:Prometheus", summary="The metrics of GET /metrics, in Prometheus' format."
    )
    registry.add(
        "log",
        "frame.plugins.stat_loggers.log:LogLine",
        options=LogOptions,
        rank=-1,
        summary="Logs throughput, requests and KV cache usage in one line every few seconds.",
    )
